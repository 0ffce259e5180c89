"""Damaged checkpoints, logs once per step after interruptions, and the end of an attempt."""

import errno
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.attempt.attempt import AttemptRun
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
from infra.store.traces import list_rollouts, read_metrics
from infra.store.workspace import Workspace
from infra.tracking import TrackedRun, Tracker
from refiner_core.contract.config import TrackingConfig
from refiner_core.contract.errors import NoSpaceError, WorkspaceError
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.types import Progress
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


def delete_half(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / STATE).unlink()


def cut_the_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"step": 2, "fil')


def replace_the_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"step": "x", "files": [], "sha256": 3}')


def swap_two_files(folder: Path) -> None:
    data = (folder / STATE).read_bytes()
    (folder / STATE).write_bytes(data[:100] + data[200:300] + data[100:200] + data[300:])


DAMAGES = [
    *(flip_a_bit, cut_off, lose_a_file, delete_half, cut_the_marker, replace_the_marker),
    swap_two_files,
]


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


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("damage", [flip_a_bit, cut_off])
def test_no_older_one_goes_before_a_save_while_the_newest_is_damaged(
    workspace: Workspace, stage: PlannedStage, damage: Callable[[Path], None], attempt: int
) -> None:
    """Its sizes may be right; a save that fails would then leave none to resume from."""
    first = make_io(workspace, stage, 1)
    train(first, 4)
    checkpoints = workspace.layout.stage(stage.id).checkpoints
    damage(checkpoints / step_name(4))
    io = first if attempt == 1 else make_io(workspace, stage, 2)
    with pytest.raises(RuntimeError), io.new_checkpoint(6):
        raise RuntimeError("the disk is full")
    found = make_io(workspace, stage, 3).latest_checkpoint()
    assert found.step == 2


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


def test_logs_after_a_skipped_checkpoint_are_dropped(
    workspace: Workspace, stage: PlannedStage, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer could not read it, though its files are what was saved."""
    train(make_io(workspace, stage, 1), 5)
    io = make_io(workspace, stage, 2)
    newest = io.latest_checkpoint()
    assert newest is not None
    io.pass_over(newest, "it cannot be read")
    found = io.latest_checkpoint()
    assert (found.step, io.resumed_step) == (2, 2)
    paths = workspace.layout.attempt(stage.id, 2)
    assert [m.step for m in read_metrics(paths.metrics)] == list(range(1, 3))
    assert [p.stem for p in list_rollouts(paths.rollouts)] == [step_name(s) for s in range(1, 3)]
    assert json.loads(paths.started.read_text())["resumed"] == {"step": 2, "from_attempt": 1}
    io.pass_over(found, "nor can this one")
    assert io.latest_checkpoint() is None
    assert "starts again" in caplog.text
    assert json.loads(paths.started.read_text())["resumed"] is None
    assert read_metrics(paths.metrics) == []
    # What it says holds for the attempts after it, too.
    assert make_io(workspace, stage, 3).latest_checkpoint() is None


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


# ---------------------------------------------------------------- logs and the end of an attempt


# ---------------------------------------------------------------- metrics and rollouts


def test_a_resumed_attempt_repeats_no_step(workspace: Workspace, stage: PlannedStage) -> None:
    train(make_io(workspace, stage, 1), 5)  # killed after step 5, saved at 4
    train(make_io(workspace, stage, 2), 7)  # resumed from 4, saved at 6
    train(make_io(workspace, stage, 3), 9)
    paths = workspace.layout.attempt(stage.id, 3)
    lines = read_metrics(paths.metrics)
    assert [m.step for m in lines] == list(range(1, 10))
    assert [m.metrics["attempt"] for m in lines] == [1, 1, 1, 1, 2, 2, 3, 3, 3]
    assert [p.stem for p in list_rollouts(paths.rollouts)] == [
        f"step-{n:08d}" for n in range(1, 10)
    ]
    assert json.loads(paths.started.read_text())["resumed"] == {"step": 6, "from_attempt": 2}


def test_logs_come_from_the_checkpoint_maker(workspace: Workspace, stage: PlannedStage) -> None:
    train(make_io(workspace, stage, 1), 4)
    interrupted = make_io(workspace, stage, 2)
    interrupted.latest_checkpoint()
    interrupted.log_metrics(5, {"attempt": 2})  # killed before it saved anything
    train(make_io(workspace, stage, 3), 6)
    lines = read_metrics(workspace.layout.attempt(stage.id, 3).metrics)
    assert [(m.step, m.metrics["attempt"]) for m in lines[3:]] == [(4, 1), (5, 3), (6, 3)]


def test_only_a_last_cut_line_is_skipped(workspace: Workspace, stage: PlannedStage) -> None:
    train(make_io(workspace, stage, 1), 3)
    path = workspace.layout.attempt(stage.id, 1).metrics
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 4, "metr')
    assert [m.step for m in read_metrics(path)] == [1, 2, 3]
    train(make_io(workspace, stage, 2), 4)
    assert len(read_metrics(workspace.layout.attempt(stage.id, 2).metrics)) == 4
    path.write_bytes(whole + b"\xff\0\n")
    with pytest.raises(WorkspaceError, match=r"Line 4 of .*metrics\.jsonl"):
        read_metrics(path)


def test_metrics_are_finite_and_ordered(workspace: Workspace, stage: PlannedStage) -> None:
    io = make_io(workspace, stage, 1)
    io.log_metrics(2, {"loss": math.nan, "kl": math.inf, "lr": 0.1})
    io.log_metrics(2, {"validation_loss": 1})
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        io.log_metrics(1, {"loss": 0.0})
    first = read_metrics(workspace.layout.attempt(stage.id, 1).metrics)[0]
    assert first.metrics == {"loss": None, "kl": None, "lr": 0.1}


# ---------------------------------------------------------------- tracking


def tracked(folder: Path) -> TrackedRun:
    return TrackedRun("sft-0123", "sft", "tiny", "sft", folder / "tracking", {"seed": 1})


def test_a_tracker_that_fails_is_one_warning(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it now fails
    monkeypatch.setenv("WANDB_DIR", "")
    tracker = Tracker(TrackingConfig(wandb="offline"), tracked(tmp_path))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log(step, {"loss": 1.0})
        tracker.finish()
    assert len([r for r in caplog.records if "W&B" in r.message]) == 1


# ---------------------------------------------------------------- the attempt from the inside


@pytest.fixture
def running(workspace: Workspace, stage: PlannedStage) -> Iterator[AttemptRun]:
    with AttemptRun(workspace, stage.id, 1, own_log=False) as attempt:
        yield attempt


def test_a_finished_attempt(workspace: Workspace, stage: PlannedStage, running: AttemptRun) -> None:
    (running.output_dir / "rows").mkdir()
    (running.output_dir / "rows" / "a.txt").write_text("hello")
    running.io.progress(Progress(1, 1, "writing"))
    running.finish({"rows": 1, "undefined": math.nan})
    record = workspace.read_record(stage.id)
    assert record.state == "done"
    assert record.result.report == {"rows": 1, "undefined": None}
    assert [(f.path, f.bytes, f.sha256[:8]) for f in record.result.files] == [
        ("rows/a.txt", 5, "2cf24dba")
    ]
    assert record.attempts[0].outcome is not None
    assert record.attempts[0].outcome.failure == "none"
    beat = workspace.read_heartbeat(stage.id, 1)
    assert beat["progress"] == {"done": 1, "total": 1, "phase": "writing", "values": {}}


def test_inputs_must_be_done(
    workspace: Workspace, stage: PlannedStage, running: AttemptRun
) -> None:
    following = claim(workspace, small_plan(), "sft")
    with pytest.raises(WorkspaceError, match=f"data .{stage.id}. .* is not done"):
        AttemptRun(workspace, following.id, 1)
    (running.output_dir / "rows.txt").write_text("rows")
    running.finish({"rows": 7})
    run = AttemptRun(workspace, following.id, 1)
    assert (run.inputs["data"] / "rows.txt").read_text() == "rows"
    assert run.input_reports["data"] == {"rows": 7}
    assert run.config == small_plan().config


def test_a_full_disk_deletes_half_an_output(running: AttemptRun) -> None:
    (running.output_dir / "rows.txt").write_text("half")
    assert running.fail(NoSpaceError("no room")).failure == "disk_full"
    assert not running.output_dir.exists()


def test_a_full_disk_after_the_result_does_not_undo_a_finished_stage(
    workspace: Workspace, stage: PlannedStage, running: AttemptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (running.output_dir / "rows.txt").write_text("rows")

    def full(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workspace, "close_attempt", full)
    running.finish({})
    running.fail(NoSpaceError("later"))
    assert (workspace.output_dir(stage.id) / "rows.txt").exists()
