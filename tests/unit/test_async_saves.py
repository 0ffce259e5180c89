"""Saves beside training, of one or two ranks, and on a full disk: no state and no error is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infra.attempt.stage_io import AttemptIO
from infra.store.checkpoints import CheckpointStore, step_name
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted, NoSpaceError
from refiner_core.training.ranks import Ranks
from refiner_core.training.sft import train_sft
from refiner_core.training.steps.checkpoint_manager import SAVE_TRIES, CheckpointManager
from tests.support.grpo_ranks import launch
from tests.support.plans import claim, small_plan
from tests.support.quota import fill, small_tmpfs
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import recipe, save_data, save_tiny_model

PATIENCE_S = 60.0


class FullIO(FolderStageIO):
    """A disk that refuses the first ``full`` saves."""

    def __init__(self, root: Path, full: int, comes_back: bool) -> None:
        super().__init__(root)
        self.full, self.waited, self.comes_back = full, 0, comes_back

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        with super().new_checkpoint(step) as folder:
            if self.waited < self.full:
                raise NoSpaceError("full")
            yield folder

    def room_again(self, error: NoSpaceError) -> bool:
        self.waited += 1
        return self.comes_back


class OneNumber:
    """An engine whose state is a number."""

    ranks = Ranks()

    def snapshot(self, progress: Mapping[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(write=lambda folder: (folder / "state").write_text("7"))


# ---------------------------------------------------------------- real training, the real store


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    save_data(root / "data")
    save_tiny_model(root / "model")
    return root


class SlowStore(CheckpointStore):
    """Lets a save end only when training has gone one step further."""

    def __init__(self, *args: Any, further: Mapping[int, threading.Event], **options: Any) -> None:
        super().__init__(*args, **options)
        self.further = further

    @contextmanager
    def new(self, step: int) -> Iterator[Path]:
        if step in self.further:
            assert self.further[step].wait(PATIENCE_S)
        with super().new(step) as folder:
            yield folder


class TellingIO(AttemptIO):
    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log_metrics(step, metrics)
        if isinstance(self.checkpoints, SlowStore) and step - 1 in self.checkpoints.further:
            self.checkpoints.further[step - 1].set()


def run_sft(
    inputs: Path, root: Path, *, async_save: bool, stop_after: int | None = None
) -> tuple[AttemptIO, dict[str, Any] | None]:
    """One attempt at a stage, over the real store, in which saves take longer than a step."""
    workspace = Workspace.open(root / "ws")
    stage = small_plan().by_name["data"]
    number = len(workspace.layout.stage(stage.id).attempt_numbers()) + 1
    claim(workspace, small_plan(), "data", after=number - 1)
    paths = workspace.layout.stage(stage.id)
    further = {2: threading.Event(), 4: threading.Event()} if async_save else {}
    store = SlowStore(
        *(paths.checkpoints, number), keep=9, before_commit=lambda: io.flush(), further=further
    )
    done: list[int] = []
    io: TellingIO = TellingIO(
        *(paths, number, store),
        on_progress=lambda progress: done.append(progress.done),
        stop_requested=lambda: stop_after is not None and stop_after in done,
    )
    try:
        report = train_sft(
            recipe(sft={"async_save": async_save}),
            data_dir=inputs / "data",
            model_ref=str(inputs / "model"),
            output_dir=root / "out",
            io=io,
        )
    except Interrupted:
        report = None
    io.close()
    return io, report


def all_files(io: AttemptIO) -> dict[str, str]:
    """Hashes of all that checkpoints hold, but for what tells the time, and for Python's own random
    state: whatever thread another test has left behind draws from it, and no training does."""
    return {
        f"{c.step}/{path.name}": hashlib.sha256(_contents(path)).hexdigest()
        for c in io.checkpoints.complete()
        for path in sorted(c.path.iterdir())
        if path.suffix in (".safetensors", ".pt") or path.name == "progress.json"
    }


def _contents(path: Path) -> bytes:
    if path.suffix != ".pt":
        return path.read_bytes()
    states = torch.load(path, weights_only=True)
    return repr((states["numpy"], states["torch"].tolist())).encode()


@pytest.fixture(scope="module")
def synchronous(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("synchronous")
    io, report = run_sft(inputs, root, async_save=False)
    return all_files(io), report, (root / "out/model/model.safetensors").read_bytes()


def test_async_saves_change_no_bit(inputs: Path, tmp_path: Path, synchronous: Any) -> None:
    io, report = run_sft(inputs, tmp_path, async_save=True)
    weights = (tmp_path / "out/model/model.safetensors").read_bytes()
    files, *rest = synchronous
    found = all_files(io)
    assert found.keys() == files.keys()
    assert [name for name in files if found[name] != files[name]] == []
    assert [report, weights] == rest
    steps = [line.step for line in read_metrics(io.paths.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    waited = [m.metrics for m in read_metrics(io.paths.metrics) if "time/save_s" in m.metrics]
    assert len(waited) >= 2


def test_a_stopped_run_continues_from_its_newest_readable_checkpoint(
    inputs: Path, tmp_path: Path, synchronous: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of a damaged one may match its marker: no hashes, or a fault before the hash."""
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    stopped, report = run_sft(inputs, damaged, async_save=True, stop_after=3)
    assert report is None
    assert [c.step for c in stopped.checkpoints.complete()] == [2, 3]
    shutil.copytree(damaged, whole)
    newest = stopped.checkpoints.folder / step_name(3)
    marker = (newest / "COMPLETE.json").read_text()
    (newest / "COMPLETE.json").write_text(marker.replace('"sha256"', '"other"'))
    rng = next(newest.glob("rng-rank*"))
    rng.write_bytes(b"\0" * rng.stat().st_size)  # the last that is read
    for root, step in ((whole, 3), (damaged, 2)):
        io, report = run_sft(inputs, root, async_save=True)
        assert io.resumed_step == step
        weights = (root / "out/model/model.safetensors").read_bytes()
        assert (report, weights) == synchronous[1:]
    assert f"{newest} is damaged" in caplog.text


# ---------------------------------------------------------------- two ranks


FAULTS = ("slow", "full", "error")
STATE_OF_STEP_4 = '{"stage": "sft", "step": 4}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(folder: Path) -> dict[str, Any]:
    """What rank 0 has to say in the end of each training."""
    launch(folder, "tests.support.two_savers", str(folder), *FAULTS, ranks=2, timeout_s=240)
    said = (folder / "rank-0.log").read_text().splitlines()
    lines = [json.loads(line) for line in said if line.startswith("{")]
    return dict(zip(FAULTS, lines, strict=True))


@pytest.mark.parametrize("fault", ["slow", "full"])
def test_both_ranks_save_one_moment(told: dict[str, Any], fault: str) -> None:
    found = told[fault]
    assert (found["steps"], found["error"]) == ([4, 8, 9], "")
    assert found["kept"] == {"state-0": STATE_OF_STEP_4, "state-1": STATE_OF_STEP_4}
    assert found["waited"] == (1 if fault == "full" else 0)
    saved = dict(found["seen"])
    assert saved[4] == 0, "training continues before it is complete"
    assert saved[9] == 9


def test_an_error_of_one_rank_is_one_of_both(told: dict[str, Any], folder: Path) -> None:
    assert "the second rank cannot write" in told["error"]["error"]
    assert told["error"]["steps"] == []
    assert list((folder / "error" / "data" / "checkpoints").iterdir()) == []


# ---------------------------------------------------------------- a full disk


@pytest.mark.quota
@pytest.mark.parametrize("comes_back", [True, False])
def test_metrics_and_rollouts_wait_for_room_and_are_whole(tmp_path: Path, comes_back: bool) -> None:
    with small_tmpfs(tmp_path / "disk", mib=4) as disk:
        workspace = Workspace.open(disk / "ws")
        stage = claim(workspace, small_plan(), "data")
        filler, waited = disk / "filler", []

        def wait() -> bool:
            waited.append(1)
            filler.unlink(missing_ok=True)
            return comes_back

        paths = workspace.layout.stage(stage.id)
        io = AttemptIO(paths, 1, CheckpointStore(paths.checkpoints, 1), wait_for_space=wait)
        io.log_metrics(1, {"loss": 1.0})
        fill(filler)
        long = {f"metric/{n}": 0.5 for n in range(4000)}  # not even the half of it fits
        if comes_back:
            io.log_metrics(2, long)
            fill(filler)
            io.save_rollouts(2, [{"text": os.urandom(50_000).hex()}])
            assert len(waited) == 2
            assert len(read_rollouts(paths.attempt(1).rollouts / "step-00000002.parquet")) == 1
        else:
            with pytest.raises(NoSpaceError):
                io.log_metrics(2, long)
        io.log_metrics(3, {"loss": 0.3})
        steps = [line.step for line in read_metrics(paths.attempt(1).metrics)]
        assert steps == ([1, 2, 3] if comes_back else [1, 3])
        io.close()


@pytest.mark.parametrize(
    ("full", "comes_back", "saved"), [(2, True, 50), (1, False, 0), (SAVE_TRIES, True, 0)]
)
def test_a_save_is_tried_again(tmp_path: Path, full: int, comes_back: bool, saved: int) -> None:
    io = FullIO(tmp_path, full, comes_back)
    edge = CheckpointManager(io, OneNumber(), "grpo", total_steps=100, save_freq=50)
    with contextlib.nullcontext() if saved else pytest.raises(NoSpaceError, match="full"):
        edge.save(50, {"step": 50})
    assert edge.saved_step == saved
    assert io.checkpoint_steps() == ([saved] if saved else [])
    assert not saved or io.waited == full
