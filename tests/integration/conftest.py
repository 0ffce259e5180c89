"""Fixtures of tests that run real programs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock

from infra.prefect_server import ensure_server
from tests.support.browser import Page, chromium
from tests.support.command import LONGER, SMALL, Finished, Stage, refiner
from tests.support.prefect_server import PrefectApi, private_server
from tests.support.require import require
from tests.support.slurm_cluster import Cluster, missing, running_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that talk to real programs as slow, so that `make quick` leaves them out."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def prefect_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Prefect server for all tests; it starts when the first one asks."""
    with private_server(tmp_path_factory.mktemp("state")):
        yield


@pytest.fixture
def prefect(prefect_session: None) -> PrefectApi:
    """The API of that server, which is started again if the last test has ended it."""
    return PrefectApi(ensure_server(400))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm of this test process's own, without accounting; SLURM_CONF names it."""
    require("slurm", not missing(), f"no Slurm of our own: {missing()}")
    with running_cluster() as cluster, cluster.joined():
        yield cluster


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One tab of a headless Chromium that all tests of pages share, told of all that goes wrong."""
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        for domain in ("Runtime", "Network", "Log", "Security"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        yield tab


def made_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Finished]
) -> tuple[Path, Finished]:
    """A workspace that the first test process that needs it makes for all, and the call's end."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    workspace, note = base / name, base / f"{name}.json"
    with FileLock(base / f"{name}.lock"):
        if not note.exists():
            done = make(workspace)
            assert done.code == 0, done.stderr
            note.write_text(json.dumps(asdict(done)))
    return workspace, Finished(**json.loads(note.read_text()))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives some valid answers. From an untrained one, every reward is 0, every group
    is dropped, and GRPO moves nothing that a test could look at."""

    def make(workspace: Path) -> Finished:
        return refiner(
            *("run", "tiny", f"workspace={workspace}", "stages=[data,sft]", "--no-server"),
            *("data.synthetic_sft_rows=800", "data.synthetic_rl_rows=20"),
            *("sft.max_train_steps=60", "sft.pack_length=1024", "sft.eval_freq=1000"),
            *("sft.save_freq=1000", "tracking.wandb=disabled"),
        )

    workspace, _ = made_once(tmp_path_factory, "trained", make)
    return Stage(workspace, "sft").attempts[-1] / "output" / "model"


@pytest.fixture(scope="session")
def small(trained: Path) -> tuple[str, ...]:
    """Overrides: the tiny recipe from there on, cut down to a few seconds a stage."""
    return (*SMALL, f"model.name_or_path={trained}", *(f"sft.{n}=1e-5" for n in _RATES))


_RATES = ("learning_rate", "muon_learning_rate")


@pytest.fixture(scope="session")
def small_run(
    tmp_path_factory: pytest.TempPathFactory, small: tuple[str, ...]
) -> tuple[Path, Finished]:
    """The small recipe, run once and undisturbed for all tests that only look at it or copy it."""

    def make(workspace: Path) -> Finished:
        words = ("run", "tiny", f"workspace={workspace}", *small, *LONGER)
        return refiner(*words, "--no-server", "--json")

    return made_once(tmp_path_factory, "small-run", make)


@pytest.fixture(scope="session")
def with_data(
    tmp_path_factory: pytest.TempPathFactory, small: tuple[str, ...]
) -> Callable[[Path], Path]:
    """Puts the finished stage `data` of the small recipe into a workspace; returns that."""

    def make(workspace: Path) -> Finished:
        words = ("run", "tiny", f"workspace={workspace}", *small, "stages=[data]")
        return refiner(*words, "--no-server")

    source, _ = made_once(tmp_path_factory, "data", make)

    def copy(workspace: Path) -> Path:
        shutil.copytree(source / "stages", workspace / "stages")
        return workspace

    return copy
