"""A damaged checkpoint is never resumed from, and no other one is lost with it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.attempt.stage_io import AttemptIO
from infra.disk.garbage_collection import carry_out, plan_reclaim
from infra.disk.inventory import read_inventory
from infra.host import files as reading
from infra.store.checkpoints import (
    DAMAGED,
    MARKER,
    CheckpointStore,
    checkpoint_to_export,
    read_checkpoint,
    step_name,
)
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.errors import WorkspaceError
from refiner_core.contract.planned import PlannedStage
from tests.support.faulty_reads import FaultyReads
from tests.support.plans import claim, small_plan

WEIGHTS, STATE = "model.safetensors", "state-rank00000-of-00001.safetensors"


@pytest.fixture
def stage(workspace: Workspace) -> PlannedStage:
    return claim(workspace, small_plan(), "data")


def make_io(workspace: Workspace, stage: PlannedStage, attempt: int) -> AttemptIO:
    paths = workspace.layout.stage(stage.id)
    store = CheckpointStore(paths.checkpoints, attempt, keep=2, before_commit=lambda: io.flush())
    io = AttemptIO(paths, attempt, store)
    return io


def train(io: AttemptIO, until: int, *, save_every: int = 2) -> None:
    """A training stage: resume, log, store, save."""
    latest = io.latest_checkpoint()
    for step in range(1 if latest is None else latest.step + 1, until + 1):
        io.log_metrics(step, {"attempt": io.checkpoints.attempt})
        io.save_rollouts(step, [{"text": f"{step}"}])
        if step % save_every == 0:
            save(io, step)
    io.close()


def save(io: AttemptIO, step: int) -> None:
    with io.new_checkpoint(step) as folder:
        for name in (WEIGHTS, STATE):
            (folder / name).write_bytes(f"{name} {step} ".encode() * 500)
        (folder / "progress.json").write_text(json.dumps({"step": step}))


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / STATE).read_bytes())
    data[len(data) // 2] ^= 4
    (folder / STATE).write_bytes(data)


def cut_off(folder: Path) -> None:
    (folder / STATE).write_bytes((folder / STATE).read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def cut_the_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"step": 2, "fil')


def swap_two_files(folder: Path) -> None:
    data = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(data[:100] + data[200:300] + data[100:200] + data[300:])


DAMAGES = [flip_a_bit, cut_off, lose_a_file, cut_the_marker, swap_two_files]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_gone_on_from_and_the_damaged_one_is_named(
    workspace: Workspace,
    stage: PlannedStage,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(make_io(workspace, stage, 1), 5)
    newest = workspace.layout.stage(stage.id).checkpoints / step_name(4)
    damage(newest)
    left = sorted(p.name for p in newest.iterdir() if p.name not in (MARKER, DAMAGED))
    io = make_io(workspace, stage, 2)
    found = io.latest_checkpoint()
    assert found.step == 2
    assert str(newest) in caplog.text
    still = sorted(p.name for p in newest.iterdir() if p.name not in (MARKER, DAMAGED))
    assert still == left, "it is evidence, and stays"
    # Its step is saved again, and at each moment there is one to resume from.
    train(make_io(workspace, stage, 3), 4)
    again = make_io(workspace, stage, 4)
    found = again.latest_checkpoint()
    assert (found.step, (newest / WEIGHTS).read_bytes()[:20]) == (4, b"model.safetensors 4 ")
    lines = read_metrics(workspace.layout.attempt(stage.id, 4).metrics)
    assert [line.step for line in lines] == list(range(1, 5))
    assert [line.metrics["attempt"] for line in lines] == [1] * 2 + [3] * 2


@pytest.mark.parametrize("step", [4, 6])
def test_a_save_keeps_the_good_one(workspace: Workspace, stage: PlannedStage, step: int) -> None:
    train(make_io(workspace, stage, 1), 4)
    checkpoints = workspace.layout.stage(stage.id).checkpoints
    flip_a_bit(checkpoints / step_name(4))
    io = make_io(workspace, stage, 2)
    assert io.latest_checkpoint() is not None
    with io.new_checkpoint(step) as folder:
        (folder / WEIGHTS).write_text("again")
        assert read_checkpoint(checkpoints / step_name(2)), "the successor is not complete yet"
    assert [c.step for c in io.checkpoints.complete()] == [2, step]
    assert (checkpoints / step_name(4) / STATE).exists() is (step == 6), "evidence stays"


def test_a_reclaim_keeps_the_good_one(workspace: Workspace, stage: PlannedStage) -> None:
    train(make_io(workspace, stage, 1), 4)
    checkpoints = workspace.layout.stage(stage.id).checkpoints
    plan = plan_reclaim(read_inventory(workspace), None)
    assert [c.step for c in plan] == [2]
    flip_a_bit(checkpoints / step_name(4))
    assert carry_out(workspace, plan).items == ()
    found = make_io(workspace, stage, 2).latest_checkpoint()
    assert found.step == 2


def test_a_marker_needs_no_hashes(workspace: Workspace, stage: PlannedStage) -> None:
    """Older versions wrote no hashes."""
    train(make_io(workspace, stage, 1), 4)
    newest = workspace.layout.stage(stage.id).checkpoints / step_name(4)
    marker = json.loads((newest / MARKER).read_text())
    del marker["sha256"]
    (newest / MARKER).write_text(json.dumps(marker))
    shutil.copytree(newest, newest.with_name(step_name(6)))
    assert make_io(workspace, stage, 2).latest_checkpoint().path == newest


def test_an_export_checks_its_weights_only(workspace: Workspace, stage: PlannedStage) -> None:
    train(make_io(workspace, stage, 1), 2)
    checkpoints = workspace.layout.stage(stage.id).checkpoints
    flip_a_bit(checkpoints / step_name(2))
    assert checkpoint_to_export(checkpoints, 2) == checkpoints / step_name(2)
    data = (checkpoints / step_name(2) / WEIGHTS).read_bytes()
    (checkpoints / step_name(2) / WEIGHTS).write_bytes(data.replace(b" 2 ", b" 3 "))
    with pytest.raises(WorkspaceError, match=r"the contents of model\.safetensors differ"):
        checkpoint_to_export(checkpoints, 2)


def test_checkpoints_that_cannot_be_read_just_now_are_no_reason_to_start_again(
    workspace: Workspace, stage: PlannedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of their disk is away, and that of the records is not."""
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0, 0.0))
    train(make_io(workspace, stage, 1), 5)
    folder = workspace.layout.stage(stage.id).checkpoints
    for name in (step_name(2), step_name(4)):
        assert read_checkpoint(folder / name) is not None
    io = make_io(workspace, stage, 2)
    for at in range(1, 12):  # the marker, its files, their contents (hashes)
        reads = FaultyReads(folder, at, errno.EIO, "from then on")
        with reads.mounted(), pytest.raises(OSError, match=r"Input/output error|cannot be read"):
            io.latest_checkpoint()
        io = make_io(workspace, stage, 2)
    found = io.latest_checkpoint()
    assert found.step == 4
