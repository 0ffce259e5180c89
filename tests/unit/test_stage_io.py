"""Metrics and rollouts once per step after interruptions, tracking, and the end of an attempt."""

import errno
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.attempt.attempt import AttemptRun
from infra.store.traces import list_rollouts, read_metrics
from infra.store.workspace import Workspace
from infra.tracking import TrackedRun, Tracker
from refiner_core.contract.config import TrackingConfig
from refiner_core.contract.errors import NoSpaceError, WorkspaceError
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.types import Progress
from tests.support.plans import claim, small_plan
from tests.unit.test_damaged_checkpoints import make_io, train


@pytest.fixture
def stage(workspace: Workspace) -> PlannedStage:
    return claim(workspace, small_plan(), "data")


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
