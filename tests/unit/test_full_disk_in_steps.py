"""A disk that fills up between two checkpoints costs a wait, not the steps in memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.attempt.stage_io import AttemptIO
from infra.store.checkpoints import CheckpointStore
from infra.store.traces import read_metrics, read_rollouts
from infra.store.workspace import Workspace
from refiner_core.contract.errors import NoSpaceError
from refiner_core.training.ranks import Ranks
from refiner_core.training.steps.boundary import SAVE_TRIES, Boundary
from tests.support.plans import claim, small_plan
from tests.support.quota import fill, small_tmpfs
from tests.support.stage_io import FolderStageIO


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
        io = AttemptIO(paths, 1, CheckpointStore(paths.checkpoints, 1), wait_for_room=wait)
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


class SometimesFull(FolderStageIO):
    """The first ``full`` saves do not fit."""

    def __init__(self, root: Path, full: int, comes_back: bool = True) -> None:
        super().__init__(root)
        self.full, self.comes_back, self.asked = full, comes_back, 0

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        if self.full:
            self.full -= 1
            raise NoSpaceError("full")
        with super().new_checkpoint(step) as folder:
            yield folder

    def room_again(self, error: NoSpaceError) -> bool:
        self.asked += 1
        return self.comes_back


class OnlyProgress:
    """An engine whose whole state is the progress that it is given."""

    ranks = Ranks()

    def __init__(self) -> None:
        self.saved: list[Any] = []

    def snapshot(self, progress: Mapping[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(write=lambda folder: self.saved.append(progress))


@pytest.mark.parametrize(
    ("full", "comes_back", "saved"), [(2, True, 50), (1, False, 0), (SAVE_TRIES, True, 0)]
)
def test_a_save_is_tried_again(tmp_path: Path, full: int, comes_back: bool, saved: int) -> None:
    io, engine = SometimesFull(tmp_path, full, comes_back), OnlyProgress()
    edge = Boundary(io, engine, "grpo", total_steps=100, save_freq=50)
    with contextlib.nullcontext() if saved else pytest.raises(NoSpaceError, match="full"):
        edge.save(50, {"step": 50})
    assert (edge.saved_step, len(engine.saved)) == (saved, 1 if saved else 0)
    assert io.checkpoint_steps() == ([saved] if saved else [])
    assert not saved or io.asked == full
