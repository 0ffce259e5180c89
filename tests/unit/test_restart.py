"""A worker knows why it was stopped, and one that is overtaken makes nothing visible."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra.attempt.attempt import AttemptRun
from infra.jobs.signals import (
    AttemptClosed,
    SlurmJob,
    Why,
    ask_scheduler,
    job_facts,
    job_of,
    why_stopped,
)
from infra.store.workspace import Claim, Workspace
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import FailureClass, Outcome
from refiner_core.contract.types import Progress
from tests.support.plans import OWNER, small_plan

JOB = SlurmJob(id="7", node="n1")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "ws")


@pytest.fixture
def plan() -> Plan:
    return small_plan()


@pytest.fixture
def stage(workspace: Workspace, plan: Plan) -> PlannedStage:
    """Its first attempt was claimed for Slurm."""
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, Claim(OWNER, "slurm"))
    return stage


def test_a_local_worker_inside_an_allocation_is_no_job_of_its_own(
    workspace: Workspace, stage: PlannedStage, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    local = plan.by_name["sft"]
    workspace.claim_attempt(local, plan.config, {}, Claim(OWNER, "local"))
    assert job_of(workspace, local.id, 1) is None
    assert job_of(workspace, stage.id, 1) == SlurmJob.from_environment()


# ---------------------------------------------------------------- a copy that is still dying


def test_an_attempt_that_was_closed_before_it_started_does_not_start(
    workspace: Workspace, plan: Plan
) -> None:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, Claim(OWNER, "slurm"))
    workspace.close_attempt(stage.id, 1, Outcome("launch_failure", "resume"))
    attempt = AttemptRun(workspace, stage.id, 1, own_log=False)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(AttemptClosed):
        attempt.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before, "handlers are put back"


# ---------------------------------------------------------------- why a worker was asked to stop

#: Fields as `scontrol show job -o` of Slurm 22.05 printed them when the signal had arrived.
RUNNING = "JobState=RUNNING PreemptTime=None RunTime=00:00:04 TimeLimit=00:05:00"
CANCELLED = "JobState=COMPLETING PreemptTime=None RunTime=00:00:04 TimeLimit=00:05:00"
LIMIT_NEAR = "JobState=RUNNING PreemptTime=None RunTime=00:04:56 TimeLimit=00:05:00"
LIMIT_PASSED = "JobState=COMPLETING PreemptTime=None RunTime=00:01:10 TimeLimit=00:01:00"
GRACE = "JobState=RUNNING PreemptTime=2026-11-21T12:30:36 RunTime=00:00:04 TimeLimit=UNLIMITED"


@pytest.mark.parametrize(
    ("facts", "number", "failure"),
    [
        (RUNNING, signal.SIGTERM, "interrupted"),
        (RUNNING, signal.SIGUSR1, "time_limit"),
        (RUNNING.replace("00:05:00", "UNLIMITED"), signal.SIGUSR1, "interrupted"),
        (RUNNING.replace("00:05:00", "2-00:00:00"), signal.SIGUSR2, "time_limit"),
        (LIMIT_NEAR, signal.SIGTERM, "time_limit"),
        (LIMIT_PASSED, signal.SIGTERM, "time_limit"),
        (GRACE, signal.SIGTERM, "preempted"),
        (GRACE, signal.SIGUSR1, "preempted"),
        (CANCELLED, signal.SIGTERM, "cancelled"),
        ("", signal.SIGTERM, "interrupted"),
    ],
)
def test_slurm_is_asked_whose_signal_it_was(facts: str, number: int, failure: FailureClass) -> None:
    found = why_stopped(JOB, number, None, lambda _: f"JobId=7 JobName=x {facts}\n")
    assert found.failure == failure
    assert "job 7" in found.message


def test_of_an_arrays_tasks_only_the_jobs_own_line_counts() -> None:
    text = f"JobId=8 ArrayJobId=7 {RUNNING}\nJobId=7 ArrayJobId=7 {CANCELLED}\n"
    assert job_facts(text, "7")["JobState"] == "COMPLETING"
    assert job_facts(text, "9") == {}


@pytest.mark.parametrize("failure", ["interrupted", "cancelled"])
def test_what_our_own_side_has_said_comes_before_what_slurm_says(failure: FailureClass) -> None:
    def never(_command: Sequence[str]) -> str:
        raise AssertionError("nobody need be asked")

    asked = {"reason": "refiner cancel by ana", "failure": failure}
    expected = Why(failure, "refiner cancel by ana")
    assert why_stopped(JOB, signal.SIGTERM, asked, never) == expected


def test_outside_of_slurm_a_signal_is_an_interruption() -> None:
    assert why_stopped(None, signal.SIGINT, None).failure == "interrupted"


@pytest.mark.parametrize("command", [("false",), ("no-such-command",)])
def test_a_scheduler_that_does_not_answer_is_no_error(command: tuple[str, ...]) -> None:
    assert ask_scheduler(command) == ""


# ---------------------------------------------------------------- the worker's last word


@pytest.fixture
def run(workspace: Workspace, plan: Plan) -> Callable[[], AttemptRun]:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, Claim(OWNER, "local"))
    return lambda: AttemptRun(workspace, stage.id, 1, own_log=False)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2], ids=str
)
def test_every_signal_that_asks_for_the_end_only_raises_a_flag(
    run: Callable[[], AttemptRun], number: int
) -> None:
    before = signal.getsignal(number)
    with run() as attempt:
        assert not attempt.io.should_stop()
        os.kill(os.getpid(), number)
        assert attempt.io.should_stop()
    assert signal.getsignal(number) is before


def test_the_last_word_names_class_step_and_who_asked(
    run: Callable[[], AttemptRun], workspace: Workspace
) -> None:
    with run() as attempt:
        attempt.io.progress(Progress(4, 9, "train"))
        workspace.ask_stop(attempt.stage_id, 1, "cancelled", "refiner cancel by ana")
        os.kill(os.getpid(), signal.SIGTERM)
        attempt.fail(Interrupted("stopped after step 4"))
    found = workspace.read_attempt(attempt.stage_id, 1)
    assert found is not None
    assert found.outcome is not None
    assert (found.outcome.failure, found.outcome.decision) == ("cancelled", "stop")
    assert found.outcome.step == 4
    assert "by ana: stopped after step 4" in found.outcome.message


def test_a_note_beside_the_attempt_is_enough_where_no_signal_gets_through(
    run: Callable[[], AttemptRun], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.attempt.stage_io.INTERVAL_S", 0.01)
    attempt = run()
    with attempt:
        workspace.ask_stop(attempt.stage_id, 1, "interrupted", "Ctrl-C")
        for _ in range(500):
            if attempt.io.should_stop():
                break
            threading.Event().wait(0.01)
        assert attempt.io.should_stop()


def test_an_error_after_a_request_to_stop_is_its_consequence_and_no_bug(
    run: Callable[[], AttemptRun],
) -> None:
    with run() as attempt:
        os.kill(os.getpid(), signal.SIGTERM)
        found = attempt.fail(RuntimeError("a data worker was killed by signal: Terminated"))
    assert (found.failure, found.decision) == ("interrupted", "resume")
    assert "data worker" in found.message


def test_the_same_bug_has_the_same_signature_and_another_line_another(
    run: Callable[[], AttemptRun], workspace: Workspace
) -> None:
    def broken(divisor: int) -> float:
        return 1 / divisor

    signatures = []
    with run() as attempt:
        attempt.io.progress(Progress(3, 9, "train"))
        for _ in range(2):
            try:
                broken(0)
            except ZeroDivisionError as error:
                signatures.append(attempt.fail(error).signature)
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            signatures.append(attempt.fail(error).signature)
    assert signatures[0] == signatures[1] != signatures[2]
