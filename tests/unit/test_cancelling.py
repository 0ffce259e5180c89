"""A cancel where nobody works on the run: what is closed, and what must not be yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from flows import cancelling
from infra.dispatch import Router
from infra.jobs import AttemptRef, JobRequest, JobSight, OpenAttempt
from infra.processes import ProcessId
from infra.workspace import Claim, Workspace
from refiner_core.contract.plan import PlannedStage
from refiner_core.contract.records import RunRecord
from tests.support.plans import OWNER, run_record, small_plan


class Scheduler:
    """One job that runs, and a scheduler that does not always answer."""

    executor = "slurm"

    def __init__(self, answers: Sequence[bool]) -> None:
        self.answers, self.killed = list(answers), False

    def check(self, stage: PlannedStage) -> None:
        """It takes everything."""

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        return {}

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobSight]:
        sight = JobSight("dead" if self.killed else "unknown")
        return {a.ref: sight for a in attempts}

    def stop(self, attempt: OpenAttempt) -> bool:
        return False

    def kill(self, attempt: OpenAttempt) -> bool:
        self.killed = self.answers.pop(0) if self.answers else False
        return self.killed

    def release(self, attempt: OpenAttempt) -> None:
        """Nothing is held."""


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
    assert workspace.claim_attempt(stage, plan.config, {}, Claim(OWNER, "slurm")) is not None
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    return found


def cancel(
    workspace: Workspace, run: RunRecord, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> cancelling.CancelOutcome:
    router = Router({"slurm": scheduler}, lambda _: "slurm")
    monkeypatch.setattr(cancelling, "make_router", lambda *_: router)
    monkeypatch.setattr(cancelling, "_POLL_S", 0.01)
    return cancelling.cancel(workspace, run, wait_s=0.5)


def test_a_job_that_could_not_be_ended_is_not_said_to_have_ended(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([]), monkeypatch)
    assert (outcome.ended, outcome.left) == (False, ("data",))
    attempt = workspace.read_attempt(run.stages["data"], 1)
    assert attempt is not None
    assert attempt.outcome is None
    assert workspace.stop_asked(run.stages["data"], 1) is not None, "its worker reads that"


def test_the_scheduler_is_asked_until_it_answers(
    workspace: Workspace, run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = cancel(workspace, run, Scheduler([False, False, True]), monkeypatch)
    assert (outcome.ended, outcome.left) == (True, ())
    attempt = workspace.read_attempt(run.stages["data"], 1)
    assert attempt is not None
    assert attempt.outcome is not None
    assert attempt.outcome.failure == "cancelled"


def test_an_orchestrator_that_has_just_gone_is_not_signalled(workspace: Workspace) -> None:
    from infra.orchestrators import Orchestrator
    from infra.processes import host_name

    gone = Orchestrator("running", 1, 2**22 + 1, host_name())
    assert not cancelling._signal(gone)
