"""A cancel of a run without an orchestrator: which attempts are closed, and which are not."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.running import cancelling
from infra.host.processes import ProcessId, host_name
from infra.jobs.dispatch import Router
from infra.jobs.dispatcher import JobStatus, OpenAttempt
from infra.orchestrator import executor as ending
from infra.store.orchestrators import wanted_by_others
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.records import RunRecord
from tests.support.plans import OWNER, orchestrator_on, run_record, small_plan
from tests.unit.test_campaign_rounds import Cluster


class Scheduler(Cluster):
    """One job that runs, and a scheduler that does not always answer."""

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__(liveness="unknown")
        self.answers, self.killed = list(answers), False

    def stop(self, attempt: OpenAttempt) -> bool:
        return False

    def kill(self, attempt: OpenAttempt) -> bool:
        self.killed = self.answers.pop(0) if self.answers else False
        self.liveness = JobStatus("dead" if self.killed else "unknown")
        return self.killed


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "w")


@pytest.fixture
def run(workspace: Workspace) -> RunRecord:
    """A call whose orchestrator is gone; its one job works."""
    plan = small_plan("data")
    found = run_record(workspace, plan)
    workspace.write_run(found)
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm")) is not None
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    return found


def cancel(
    workspace: Workspace, run: RunRecord, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> cancelling.CancelOutcome:
    router = Router({"slurm": scheduler}, lambda _: "slurm")
    monkeypatch.setattr(ending, "make_router", lambda *_: router)
    monkeypatch.setattr(ending, "POLL_S", 0.01)
    return cancelling.cancel(workspace, run, wait_s=2.0)


@pytest.mark.slow
def test_a_job_that_lives_on_is_not_closed(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([]), monkeypatch)
    assert (outcome.ended, outcome.left) == (False, ("data",))
    attempt = workspace.read_attempt(run.stages["data"], 1)
    assert attempt is not None
    assert attempt.outcome is None
    assert workspace.stop_requested(run.stages["data"], 1) is not None, "its worker reads that"


def test_kills_repeat(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([False, False, True]), monkeypatch)
    assert (outcome.ended, outcome.left) == (True, ())
    assert workspace.read_attempt(run.stages["data"], 1).outcome.failure == "cancelled"


@pytest.mark.parametrize("room_comes_back", [True, False])
@pytest.mark.slow
def test_jobs_are_ended_on_a_full_disk(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch, room_comes_back: bool
) -> None:
    """The run has no orchestrator and the quota is full: the job must end all the same."""
    scheduler, real = Scheduler([True] * 1000), os.open

    def full(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT and not (room_comes_back and scheduler.killed):
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", full)
    outcome = cancel(workspace, run, scheduler, monkeypatch)
    assert scheduler.killed
    assert outcome.by == "here"
    assert outcome.ended == room_comes_back
    assert (workspace.read_attempt(run.stages["data"], 1).outcome is not None) == room_comes_back


def test_a_failed_look_is_repeated(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fails = workspace.read_record, [False, True, True, False, True]

    def read_record(stage_id: str) -> Any:
        if fails and fails.pop(0):
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(stage_id)

    monkeypatch.setattr(workspace, "read_record", read_record)
    assert cancel(workspace, run, Scheduler([True]), monkeypatch).ended


def test_stages_of_another_run_stay(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publication by hand shares the export with the run that trains."""
    other = replace(run, run=f"{run.run}-other")
    workspace.write_run(other)
    me = {"process": str(ProcessId.of()), "host": host_name(), "state": "running"}
    workspace.write_orchestrator(other.run, me)
    outcome = cancel(workspace, run, Scheduler([True]), monkeypatch)
    assert workspace.read_record(run.stages["data"]).state == "claimed", "it goes on"
    assert outcome.stages == ()
    workspace.write_orchestrator(other.run, {**me, "process": "login9:77:1.00"})
    assert wanted_by_others(workspace, {run.run}) == {}
    workspace.write_orchestrator(other.run, me)
    named = cancelling.cancel(workspace, run, ["data"], wait_s=5)
    assert named.ended, "who names it means it"


def test_a_cancelled_call_leaves_stages_of_another_call(workspace: Workspace) -> None:
    plan = small_plan("data")
    mine, other = (run_record(workspace, plan) for _ in range(2))
    workspace.write_run(other)
    stage = plan.by_name["data"]
    claimed = workspace.claim_attempt(
        stage, plan.config, {}, StageClaim(str(ProcessId.of()), "slurm")
    )
    assert claimed is not None
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    me = {"process": str(ProcessId.of()), "host": host_name(), "state": "running"}
    workspace.write_orchestrator(other.run, me)
    router = Router({"slurm": Cluster(liveness="live")}, lambda _: "slurm")
    campaign = orchestrator_on(plan, workspace, router, run=mine)
    campaign.begin()
    workspace.request_cancel(mine.run, "somebody", ())
    assert campaign.step(), "the call itself is over"
    view = campaign.views()["data"]
    assert (view.state, other.run in view.message) == ("interrupted", True)
    assert workspace.stop_requested(stage.id, 1) is None
