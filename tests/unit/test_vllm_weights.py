"""New weights on running servers: whole, checked, or refused."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import KilledError, NoSpaceError, StageFailed
from refiner_core.contract.types import Completion
from refiner_core.generation.vllm import extension
from refiner_core.generation.vllm.sync import WeightSync
from tests.support.tiny_training import furthest, save_tiny_model, tiny_model, tiny_tokenizer
from tests.support.vllm_fleet import (
    PLAIN,
    WINDOW,
    Fixed,
    InThreads,
    fleet_of,
    generator,
    requests,
    whole,
)
from tests.support.vllm_server import served


@pytest.fixture(autouse=True)
def importable_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PYTHONPATH does it for a server of its own."""
    assert extension.__file__ is not None
    monkeypatch.syspath_prepend(str(Path(extension.__file__).parent))


@pytest.mark.slow
def test_after_a_sync_samples_are_of_the_new_weights(tmp_path: Path) -> None:
    """With tied embeddings and a prefix cache from before: both stay old unless seen to."""
    servers = InThreads(2)
    with fleet_of(servers, tmp_path) as fleet:
        ours = generator(fleet)
        for step, model in enumerate((tiny_model(), tiny_model(1), tiny_model())):
            fleet.sync(whole(model), str(step))
            made = ours.generate(requests(), PLAIN)
            assert furthest(model, requests(), made) < 1e-4
            assert len(list(tmp_path.iterdir())) == 1  # only the current weights are kept
        assert all(server.state.version == "2" for server in servers.servers)
        assert all(server.bodies() for server in servers.servers)
    assert servers.gone == []
    assert all(server.routes.count("/resume") == 2 for server in servers.servers)


def test_a_new_version_never_reads_the_prefixes_of_an_old_one(tmp_path: Path) -> None:
    """Even where the server has not dropped them."""
    folder = save_tiny_model(tmp_path)
    model = tiny_model(1)
    with served(folder) as server:
        generator(Fixed(server, version="1")).generate(requests(), PLAIN)
        server.state.engine.model.load_state_dict(model.state_dict())
        server.state.engine.head.pack()
        stale = generator(Fixed(server, version="1")).generate(requests(), PLAIN)
        fresh = generator(Fixed(server, version="2")).generate(requests(), PLAIN)
    assert furthest(model, requests(), stale) > 1e-2  # the trap is there
    assert furthest(model, requests(), fresh) < 1e-4


def test_a_head_that_stayed_old_is_found_and_the_server_replaced(tmp_path: Path) -> None:
    class Plain(WeightSync):
        """Reloads as vLLM does by itself, which answers 200."""

        def _admin(self, index: int) -> Any:
            admin = super()._admin(index)

            def load(weights: str) -> None:
                body = {"method": "reload_weights", "kwargs": {"weights_path": weights}}
                admin.post("/collective_rpc", body)

            admin.load = load
            return admin

    servers, model = InThreads(1), tiny_model(1)
    fleet = Plain(servers, tmp_path, tiny_tokenizer(), tolerance=1e-3, window=WINDOW, timeout_s=240)
    try:
        fleet.sync(whole(tiny_model()), "0")
        fleet.sync(whole(model), "1")
        assert servers.gone
        made = generator(fleet).generate(requests(), PLAIN)
        assert furthest(model, requests(), made) < 1e-4
    finally:
        servers.close()


def test_a_server_whose_reload_failed_is_replaced(tmp_path, monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no such file")

    servers, model = InThreads(2, max_restarts=1), tiny_model(1)
    with fleet_of(servers, tmp_path) as fleet:
        fleet.sync(whole(tiny_model()), "0")
        poisoned = servers.servers[1]
        monkeypatch.setattr(poisoned.state.engine, "reload", fails)
        fleet.sync(whole(model), "1")
        assert servers.gone == [poisoned]
        assert poisoned.routes[-2:] == ["/pause", "/collective_rpc"]
        assert "/resume" not in poisoned.routes
        made = generator(fleet).generate(requests(), PLAIN)
        assert furthest(model, requests(), made) < 1e-4
        monkeypatch.setattr(servers.servers[1].state.engine, "reload", fails)
        with pytest.raises(KilledError, match="collective_rpc"):
            fleet.sync(whole(tiny_model()), "2")


def test_a_server_that_scores_otherwise_than_the_trainer_ends_the_stage(tmp_path: Path) -> None:
    """Its log-probabilities are from before the temperature."""
    servers = InThreads(1, ("--generation-config", "vllm"))
    with (
        fleet_of(servers, tmp_path) as fleet,
        pytest.raises(StageFailed, match=r"differ from the trainer's.*canary_tolerance"),
    ):
        fleet.sync(whole(tiny_model()), "0")


def test_a_sync_and_a_call_wait_for_each_other(tmp_path: Path) -> None:
    """So that no sample is of two versions."""
    servers, models = InThreads(1), [tiny_model(), tiny_model(1)]
    with fleet_of(servers, tmp_path) as fleet:
        fleet.sync(whole(models[0]), "0")
        servers.servers[0].state.control["slow_s"] = 0.01
        made: list[Completion] = []
        call = threading.Thread(
            target=lambda: made.extend(generator(fleet).generate(requests(), PLAIN))
        )
        call.start()
        while not servers.servers[0].state.unfinished:
            time.sleep(0.001)
        fleet.sync(whole(models[1]), "1")
        call.join()
    assert furthest(models[0], requests(), made) < 1e-4


@pytest.mark.slow
def test_a_lost_server_comes_back_with_the_current_weights(tmp_path: Path) -> None:
    servers, model = InThreads(1), tiny_model(1)
    with fleet_of(servers, tmp_path) as fleet:
        fleet.sync(whole(tiny_model()), "0")
        fleet.sync(whole(model), "1")
        servers.servers[0].state.control["hang"] = True
        made = generator(fleet, silence_s=4.0, in_flight=2).generate(requests(), PLAIN)
        assert servers.gone
        assert furthest(model, requests(), made) < 1e-4


def test_sampling_is_refused_after_a_failed_sync(tmp_path, monkeypatch) -> None:
    """The servers have old weights, and samples would be called those of the new ones."""
    with fleet_of(InThreads(1), tmp_path) as fleet:
        fleet.sync(whole(tiny_model()), "0")
        with monkeypatch.context() as patched:
            full = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
            patched.setattr(os, "statvfs", lambda _: full)
            with pytest.raises(NoSpaceError, match=r"0\.00 GiB.*weights_dir"):
                fleet.sync(whole(tiny_model(1)), "1")
        with pytest.raises(RuntimeError, match="sync"):
            generator(fleet).generate(requests(), PLAIN)
        fleet.sync(whole(tiny_model(1)), "1")  # there is room again
        assert (
            furthest(tiny_model(1), requests(), generator(fleet).generate(requests(), PLAIN)) < 1e-4
        )
        assert len(list(tmp_path.iterdir())) == 1
