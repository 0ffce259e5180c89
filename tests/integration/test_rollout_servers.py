"""Rollout servers as processes: their start, their end, and what is left when they die."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.host.processes import free_port
from infra.process import watchdog
from infra.ranks.messages import JOB_GPUS
from infra.rollouts.servers import (
    EXTENSION,
    MIDDLEWARE,
    ServerResources,
    memory_folder,
    note_shared,
    open_vllm,
    remove_stale_files,
    rollout_environment,
    rollout_server_text,
    shared_memory,
)
from infra.services.process import ListenAddress
from infra.store.traces import read_metrics
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, KilledError, StageFailed
from refiner_core.contract.records import from_json
from refiner_core.contract.sections.steering import Resources
from refiner_core.contract.sections.training import RolloutServerConfig
from refiner_core.contract.types import Completion, SamplingParams
from refiner_core.evaluation.metrics import load_samples
from refiner_core.evaluation.results import load_results
from refiner_core.evaluation.run import evaluate_model
from refiner_core.generation.vllm.client import VllmGenerator
from refiner_core.judges import LexicalJudge
from tests.support.command import Stage, refiner, start, wait_until
from tests.support.port_thief import thief
from tests.support.require import require
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import furthest as furthest_of
from tests.support.tiny_training import recipe, tiny_model, tiny_tokenizer
from tests.support.users import STRANGER, needs_users, run_as
from tests.support.vllm_fleet import requests, whole
from tests.support.vllm_processes import control, marked, serving, status
from tests.support.vllm_server import shim

SERVER = Path(__file__).parents[1] / "support" / "vllm_server.py"
PARAMS, ASKED = SamplingParams(max_new_tokens=20), requests(4)


def config(engines: int = 1, grpo: dict[str, Any] | None = None, **server: Any) -> RecipeConfig:
    return recipe(
        grpo={
            "generation_backend": "vllm",
            "vllm_num_engines": engines,
            "generation_batch_size": 64,
            "max_token_length": 128,
            "rollout_server": RolloutServerConfig(**server),
            **(grpo or {}),
        }
    )


def furthest(model: Any, made: Sequence[Completion]) -> float:
    """The largest difference of a log-probability to the trainer's."""
    return furthest_of(model, ASKED, made, PARAMS)


@contextlib.contextmanager
def opened(settings: RecipeConfig, work: Path, **more: Any) -> Iterator[VllmGenerator]:
    """Rollouts of servers that run and have the weights of ``tiny_model()``."""
    with open_vllm(settings, tiny_tokenizer(), work, **more) as rollouts:
        rollouts.sync(whole(tiny_model()), "0")
        yield rollouts


def segment(pid: int) -> Path:
    """Shared memory of a test server."""
    return Path(f"/dev/shm/psm_refiner_{pid}")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tests' server is the `vllm` that is found."""
    folder = shim(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Where weights go."""
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


# ---------------------------------------------------------------- real processes


def test_a_server_that_is_killed_in_a_batch_changes_no_sample_and_leaves_nothing(
    path: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")  # as torchrun sets it for us
    work, model, changed = tmp_path / "work", tiny_model(), tiny_model(1)
    settings = config(2, weights_dir=str(memory))
    with opened(settings, work) as rollouts:
        servers = serving(work)
        assert len(servers) == 2
        pids = {server.pid for server in servers}
        assert all(segment(pid).exists() for pid in pids)
        for server in servers:
            given = server.environ()
            assert given["VLLM_SERVER_DEV_MODE"] == "1"
            assert len(given["VLLM_API_KEY"]) > 30
            assert given["VLLM_API_KEY"] not in " ".join(server.cmdline())
            assert "RANK" not in given
            assert server.cmdline()[server.cmdline().index("--host") + 1] == "127.0.0.1"
        first, second = rollouts.fleet.endpoints()
        route = f"{first.url.removesuffix('/v1')}/resume"
        # Every account on the node reaches loopback.
        assert [status(route, key) for key in ("", "Bearer wrong")] == [401, 401]
        assert status(route, f"Bearer {first.key}") == 200
        before = rollouts.generate(ASKED, PARAMS)
        assert furthest(model, before) < 1e-4
        rollouts.sync(whole(changed), "1")
        wanted = rollouts.generate(ASKED, PARAMS)
        assert furthest(changed, wanted) < 1e-4
        assert wanted != before
        control(second, slow_s=0.02)
        control(first, slow_s=0.02, die_after=3)  # kill -9, with two requests in hand
        made = rollouts.generate(ASKED, PARAMS)
        assert [c.token_ids for c in made] == [c.token_ids for c in wanted]
        assert furthest(changed, made) < 1e-4
        assert sum(server.is_running() for server in servers) == 1
        assert len(serving(work)) == 2  # the one in its place, and the other
        pids |= {server.pid for server in serving(work)}
    assert marked(work) == []
    assert list(memory.iterdir()) == []
    assert len(pids) == 3
    assert not any(segment(pid).exists() for pid in pids)


def test_a_server_that_asks_for_no_key_is_not_used(
    path: Path, memory: Path, tmp_path: Path
) -> None:
    (path / "refiner_vllm_extension.py").write_text(
        "class CompleteReload: ...\nclass KeyOnEveryRoute:\n"
        "    def __init__(self, app): self.app = app\n"
        "    async def __call__(self, *request): await self.app(*request)\n"
    )
    script(path, f'PYTHONPATH={path} exec "{sys.executable}" "{SERVER}" "$@"')
    with (
        pytest.raises(ConfigurationError, match="everyone on this machine"),
        opened(config(weights_dir=str(memory)), tmp_path / "work"),
    ):
        pass


def test_a_port_that_another_user_has_taken_is_passed_over(
    path: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_users()
    with thief() as other:
        ports = iter([other.port])
        monkeypatch.setattr(
            "infra.services.process.free_port", lambda host: next(ports, 0) or free_port(host)
        )
        with opened(config(weights_dir=str(memory)), tmp_path / "work") as rollouts:
            (endpoint,) = rollouts.fleet.endpoints()
            assert f":{other.port}/" not in endpoint.url
            assert furthest(tiny_model(), rollouts.generate(ASKED, PARAMS)) < 1e-4
    assert other.keys == []


LIFE = """
import sys
from pathlib import Path
from infra.rollouts.servers import ServerResources
from infra.rollouts.servers import memory_folder
from infra.rollouts.servers import LocalRolloutServers
from refiner_core.contract.config import RecipeConfig

with memory_folder(Path(sys.argv[1])) as folder:
    (folder / "weights-1").mkdir()
    place = ServerResources("", folder, Path(sys.argv[2]) / "rollout-servers")
    LocalRolloutServers(RecipeConfig(), [place, place], folder).start(folder / "weights-1")
"""


def test_a_trainer_that_is_killed_leaves_neither_servers_nor_memory(
    path: Path, memory: Path, tmp_path: Path
) -> None:
    script(path, "trap '' TERM HUP; sleep 600 & sleep 601; sleep 602")
    work = tmp_path / "work"
    trainer = subprocess.Popen(
        [sys.executable, "-c", LIFE, str(memory), str(work)], cwd=Path(__file__).parents[2]
    )
    try:
        wait_until(lambda: sum("sleep" in p.name() for p in marked(work)) == 4, "they run")
        assert list(memory.iterdir())
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(400)
    wait_until(lambda: not marked(work), "its servers end")
    wait_until(lambda: not list(memory.iterdir()), "its memory is given back")


def test_shared_memory_of_servers_goes_with_the_folder(memory: Path) -> None:
    segment = Path(f"/dev/shm/psm_refiner_test_{os.getpid()}")
    with segment.open("wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096), memory_folder(memory) as folder:
            assert segment in shared_memory([psutil.Process()])
            note_shared(folder, [segment])
    assert not segment.exists()


def test_what_a_killed_trainer_left_is_removed_by_the_next_one(memory: Path) -> None:
    segment = Path(f"/dev/shm/psm_refiner_left_{os.getpid()}")
    segment.touch()
    with memory_folder(memory) as earlier:
        pass
    gone = folder_of_the_dead(memory, earlier, 0)
    note_shared(gone, [segment])
    elsewhere = memory / "refiner-rollouts-elsewhere-0-0-1-1000.00"
    elsewhere.mkdir(mode=0o700)
    with memory_folder(memory) as mine:
        assert not gone.exists()
        assert not segment.exists()
        remove_stale_files(memory)
        assert mine.exists()
    assert list(memory.iterdir()) == [elsewhere], "another machine may still use it"


def folder_of_the_dead(parent: Path, mine: Path, number: int, *, made: bool = True) -> Path:
    """The folder of a process of this machine that is gone."""
    pid = next(pid for pid in range(400_000, 4_000_000) if not psutil.pid_exists(pid))
    folder = parent / f"{mine.name.rsplit('-', 2)[0]}-{pid}-1000.0{number}"
    if made:
        folder.mkdir(mode=0o700)
    return folder


def plant(folder: str, names: list[str]) -> None:
    """Make a folder that looks like one of a process that is gone."""
    made = Path(folder)
    made.mkdir(mode=0o777)
    (made / "shared-memory").write_text("".join(f"{name}\n" for name in names))
    (made / "kept").touch()


def link_to(path: str, target: str) -> None:
    """Make a link."""
    Path(path).symlink_to(target)


def test_what_another_user_has_planted_deletes_nothing() -> None:
    """In /dev/shm every user may make folders and links, and their names are known."""
    needs_users()
    segment = Path(f"/dev/shm/psm_refiner_planted_{os.getpid()}")
    link = segment.with_name(f"{segment.name}_link")
    with tempfile.TemporaryDirectory() as made, segment.open("wb+") as file:
        file.truncate(4096)
        parent, mine = Path(made), Path(made) / "mine"
        parent.chmod(0o1777)
        mine.touch()
        try:
            with mmap.mmap(file.fileno(), 4096):
                run_as(STRANGER, link_to, str(link), str(segment))
                assert shared_memory([psutil.Process()]) & {segment, link} == {segment}
            with memory_folder(parent) as own:
                planted = folder_of_the_dead(parent, own, 0, made=False)
            run_as(STRANGER, plant, str(planted), [str(segment), str(mine)])
            remove_stale_files(parent)
            watchdog.remove(str(planted))
            assert (planted / "kept").exists(), "it is not ours to remove"
            assert segment.exists()
            to_planted = folder_of_the_dead(parent, own, 1, made=False)
            to_planted.symlink_to(planted)
            watchdog.remove(str(to_planted))
            assert (planted / "kept").exists()
            ours = folder_of_the_dead(parent, own, 2)
            note_shared(ours, [mine, Path(f"/dev/shm/../..{mine}"), segment])
            remove_stale_files(parent)
            assert not ours.exists()
            assert mine.exists(), "only shared memory goes with a folder"
            assert not segment.exists()
        finally:
            segment.unlink(missing_ok=True)
            link.unlink(missing_ok=True)


# ---------------------------------------------------------------- servers that do not come up


def script(folder: Path, text: str) -> None:
    """Another `vllm`."""
    (folder / "vllm").write_text(f"#!/bin/sh\n{text}\n")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("echo 'vllm: error: unrecognized arguments: --x'; exit 2", ConfigurationError, "args"),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory'; exit 1", StageFailed, "out of mem"),
        ("kill -9 $$", KilledError, "signal 9"),
        ("sleep 60", StageFailed, "start_timeout_s"),
    ],
)
def test_a_server_that_does_not_start_gives_its_reason(
    path: Path, memory: Path, tmp_path: Path, text: str, error: type[Exception], said: str
) -> None:
    script(path, text)
    settings = config(weights_dir=str(memory), start_timeout_s=1.0)
    work = tmp_path / "work"
    with pytest.raises(error, match=said), opened(settings, work):
        pass
    assert marked(work) == []
    assert list(memory.iterdir()) == []


def test_a_stop_does_not_wait_for_servers(path: Path, memory: Path, tmp_path: Path) -> None:
    script(path, "sleep 60")
    stop = threading.Event()
    told: list[float] = []

    def tell(seconds: float) -> None:
        told.append(seconds)
        stop.set()

    settings = config(weights_dir=str(memory))
    with (
        pytest.raises(Interrupted),
        opened(settings, tmp_path / "work", should_stop=stop.is_set, tell=tell),
    ):
        pass
    assert told


# ---------------------------------------------------------------- a whole run


def test_a_run_samples_from_its_own_server_which_is_killed_in_between(
    tmp_path: Path, small: tuple[str, ...], with_data: Callable[[Path], Path]
) -> None:
    workspace = with_data(tmp_path / "runs")
    process = start(
        *("run", "tiny", f"workspace={workspace}", "--no-server", *small, "stages=[data,grpo]"),
        *("grpo.generation_backend=vllm", "grpo.async_steps=1", "grpo.num_training_steps=4"),
        f"grpo.rollout_server.setup=['export PATH={shim(tmp_path / 'bin')}:$PATH']",
    )
    stage = Stage(workspace, "grpo")
    try:
        wait_until(lambda: stage.steps()[1:], "the second step")
        [server] = serving(stage.folder)
        trainer = stage.worker
        assert trainer is not None
        weights = f"refiner-rollouts-*-{trainer.pid}-*"
        assert [*Path("/dev/shm").glob(weights)]
        server.kill()
        _, errors = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, errors
    assert len(stage.attempts) == 1, "a server that dies ends no attempt"
    log = (stage.attempts[0] / "log.txt").read_text()
    assert "is replaced" in log
    lines = read_metrics(stage.attempts[0] / "metrics.jsonl")
    assert [line.step for line in lines] == [1, 2, 3, 4]
    assert [line.metrics["val/policy_age"] for line in lines] == [0, 1, 1, 1]
    moved = [line.metrics["optimizer_steps"] for line in lines]
    assert sum(moved) > 0, "no weights had to be sent"
    # One step older, on servers of another writing: near, and not the same.
    assert all(line.metrics.get("val/sampler_logprob_gap", 0) < 0.5 for line in lines)
    assert not marked(stage.folder)
    assert not [*Path("/dev/shm").glob(weights)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["a server like vLLM", "vllm"])
def test_an_evaluation_on_servers_gives_the_answers_of_the_model(
    tmp_path: Path,
    small: tuple[str, ...],
    with_data: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    """The same greedy answers as with transformers, in float32, under a protocol of its own."""
    server = f"setup=['export PATH={shim(tmp_path / 'bin')}:$PATH']"
    if engine == "vllm":
        python = os.environ.get("REFINER_VLLM_PYTHON")
        require("vllm", python, "REFINER_VLLM_PYTHON names no interpreter that has vLLM")
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        server = f"python={python}"
    workspace, straight = with_data(tmp_path / "runs"), tmp_path / "straight"
    done = refiner(
        *("run", "tiny", f"workspace={workspace}", "--no-server", "stages=[data,evaluate]"),
        *(*small, "evaluate.models=[base]", "evaluate.batch_size=8"),
        *("evaluate.generation_backend=vllm", f"grpo.rollout_server.{server}"),
        "grpo.rollout_server.args=['--enforce-eager']",
        timeout_s=800,
    )
    assert done.code == 0, done.stderr
    [attempt] = Stage(workspace, "evaluate").attempts
    assert not marked(workspace)
    config = from_json(RecipeConfig, json.loads((attempt / "intent.json").read_text())["config"])
    here = replace(config, evaluate=replace(config.evaluate, generation_backend="transformers"))
    evaluate_model(
        here,
        data_dir=Stage(workspace, "data").attempts[-1] / "output",
        data_digest="",
        model_ref=config.model.name_or_path,
        model_name="base",
        output_dir=straight,
        io=FolderStageIO(tmp_path / "io"),
        judge=LexicalJudge(),
    )
    folders = (attempt / "output", straight)
    served, own = ({e["protocol"] for e in load_results(f)["evaluations"]} for f in folders)
    assert not served & own
    for decoding, same in (("greedy", True), ("sampled", False)):
        tables = (load_samples(f / f"samples-{decoding}.parquet") for f in folders)
        texts, wanted = ([row["response_text"] for row in table] for table in tables)
        assert (texts == wanted) is same
        assert len(texts) == len(wanted) >= 4


# ---------------------------------------------------------------- what is started


def test_the_command_of_a_server_has_all_that_decides_a_sample(tmp_path: Path) -> None:
    cpu = rollout_server_text(config(), ListenAddress("127.0.0.1", 8123), tmp_path / "w")
    assert "--no-enable-chunked-prefill --max-num-batched-tokens 4096 " in cpu
    settings = config(
        python="/opt/vllm/bin/python",
        setup=("module load cuda",),
        container="apptainer exec --nv vllm.sif",
        args=("--gpu-memory-utilization 0.8", "--dtype half"),
        grpo={"vllm_tensor_parallel_size": 2, "resources": Resources(gpus=4)},
    )
    text = rollout_server_text(settings, ListenAddress("127.0.0.1", 8123), tmp_path / "w")
    lines = text.splitlines()
    assert lines[:2] == ["set -e", "module load cuda"]
    words = shlex.split(lines[2])
    start = "exec apptainer exec --nv vllm.sif /opt/vllm/bin/python -m vllm.entrypoints.cli.main"
    assert words[: len(start.split())] == start.split()
    assert words[len(start.split()) :] == [
        *("serve", str(tmp_path / "w"), "--host", "127.0.0.1", "--port", "8123"),
        *("--served-model-name", "policy", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs", "--dtype", "float32"),
        *("--max-model-len", "128", "--max-num-seqs", "64", "--seed", "7"),
        *("--tensor-parallel-size", "2", "--worker-extension-cls", EXTENSION),
        *("--middleware", MIDDLEWARE),
        *("--shutdown-timeout", "5"),
        *("--disable-uvicorn-access-log", "--gpu-memory-utilization", "0.8", "--dtype", "half"),
    ]


def test_a_server_sees_its_own_gpus_and_nothing_of_our_ranks(tmp_path: Path) -> None:
    given = {
        **{"RANK": "3", "WORLD_SIZE": "4", "DS_ACCELERATOR": "cpu", "HOME": "/home/me"},
        **{"CUDA_VISIBLE_DEVICES": "0", JOB_GPUS: "0,1", "PYTHONPATH": "/mine"},
    }
    place = ServerResources("1", tmp_path / "ext", tmp_path / "mark", key="secret")
    made = rollout_environment(place, given)
    assert {n: made[n] for n in ("CUDA_VISIBLE_DEVICES", "HOME", "VLLM_API_KEY")} == {
        "CUDA_VISIBLE_DEVICES": "1",
        "HOME": "/home/me",
        "VLLM_API_KEY": "secret",
    }
    assert made["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "ext"), "/mine"]
    assert made["VLLM_SERVER_DEV_MODE"] == "1"
    assert not {"RANK", "WORLD_SIZE", "DS_ACCELERATOR", JOB_GPUS} & set(made)
    assert "secret" not in repr(place)


# ---------------------------------------------------------------- the real engine


@pytest.mark.timeout(900)
def test_vllm_itself_samples_syncs_and_comes_back(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied embeddings, float32. Takes about three minutes on two cores."""
    python = os.environ.get("REFINER_VLLM_PYTHON")
    require("vllm", python, "REFINER_VLLM_PYTHON names no interpreter that has vLLM")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = config(python=python, args=("--enforce-eager",), weights_dir=str(memory))
    work, before = tmp_path / "work", set(Path("/dev/shm").iterdir())
    with open_vllm(settings, tiny_tokenizer(), work) as rollouts:

        def tokens(on_completion: Any = None) -> list[tuple[int, ...]]:
            return [c.token_ids for c in rollouts.generate(ASKED, PARAMS, on_completion)]

        for version, model in enumerate((tiny_model(), tiny_model(1), tiny_model(2))):
            rollouts.sync(whole(model), str(version))
            assert furthest(model, rollouts.generate(ASKED, PARAMS)) < 1e-4
            wanted = tokens()
            assert tokens() == wanted
        # A load that fails: the engine may call itself healthy, and is replaced all the same.
        with pytest.raises(Exception, match="collective_rpc"):
            rollouts.fleet._admin(0).load(str(tmp_path / "nothing"))
        rollouts.sync(whole(tiny_model(2)), "3")
        assert tokens() == wanted
        once = iter((True,))

        def kill(_: int, __: Completion) -> None:
            """kill -9 of every process of the server, in the middle of a batch."""
            if next(once, False):
                for process in marked(work):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()

        assert tokens(kill) == wanted
    assert marked(work) == []
    assert list(memory.iterdir()) == []
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - before}
    assert not {name for name in left if not name.startswith("refiner-simulation")}
