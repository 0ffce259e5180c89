"""A job that Slurm restarts continues once; a worker knows the reason of each stop."""

import os
import signal
import threading
from collections.abc import Callable, Sequence

import pytest

from infra.attempt.attempt import AttemptRun
from infra.host.processes import ProcessId
from infra.jobs.signals import (
    AttemptClosed,
    SlurmJob,
    StopReason,
    ask_scheduler,
    attempt_to_run,
    job_facts,
    job_of,
    why_restarted,
    why_stopped,
)
from infra.store.traces import read_metrics
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import AttemptOutcome, FailureClass, StageResult
from refiner_core.contract.types import Progress
from tests.support.plans import OWNER, small_plan

GONE = "elsewhere:1:1.00"
FACTS = {"State": "NODE_FAIL"}


def job(restart: int = 0, number: str = "7") -> SlurmJob:
    return SlurmJob(id=number, restart=restart, node="n1")


def silent(_command: Sequence[str]) -> str:
    return ""


@pytest.fixture
def plan() -> Plan:
    return small_plan()


@pytest.fixture
def stage(workspace: Workspace, plan: Plan) -> PlannedStage:
    """Its first attempt was submitted to Slurm as job 7, and has started."""
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm"))
    submitted(workspace, stage, 1, job_id="7")
    started(workspace, stage, 1)
    return stage


def submitted(workspace: Workspace, stage: PlannedStage, number: int, job_id: str) -> None:
    paths = workspace.layout.attempt(stage.id, number)
    paths.job.write_text(f'{{"job_id": "{job_id}", "comment": "c"}}')


def started(
    workspace: Workspace, stage: PlannedStage, number: int, restart: int = 0, process: str = GONE
) -> None:
    token = {"process": process, "started_at": "t", "job_id": "7", "restart": restart}
    assert workspace.start_attempt(stage.id, number, token)


def outcome(workspace: Workspace, stage: PlannedStage, number: int) -> FailureClass | None:
    attempt = workspace.read_attempt(stage.id, number)
    return None if attempt is None or attempt.outcome is None else attempt.outcome.failure


# ---------------------------------------------------------------- which attempt


def test_a_restart_claims_an_attempt(workspace: Workspace, stage: PlannedStage, plan: Plan) -> None:
    workspace.note_scheduler(stage.id, 1, FACTS)
    assert attempt_to_run(workspace, stage.id, 1, job(restart=1), silent) == 2
    record = workspace.read_record(stage.id)
    old, new = record.attempts
    assert (old.outcome.failure, old.outcome.decision) == ("preempted", "resume")
    assert "restart 1" in old.outcome.message
    assert (new.owner, new.executor, new.comment) == (old.owner, "slurm", old.comment)
    assert (new.job_id, new.restart, new.outcome) == ("7", 1, None)
    assert AttemptRun(workspace, stage.id, 2).config == plan.config
    noted = workspace.read_control(workspace.layout.attempt(stage.id, 2).job)
    assert workspace.part(workspace.layout.attempt(stage.id, 1), "scheduler") == FACTS
    assert noted == {"job_id": "7", "comment": "c", "restart": 1}, "it is the same job"


def test_each_restart_leads_to_a_new_attempt(workspace: Workspace, stage: PlannedStage) -> None:
    for restart in (1, 2, 3):
        assert attempt_to_run(workspace, stage.id, 1, job(restart), silent) == restart + 1
        started(workspace, stage, restart + 1, restart)
    record = workspace.read_record(stage.id)
    assert [a.restart for a in record.attempts] == [0, 1, 2, 3]


def test_a_restart_takes_over_a_killed_restart(workspace: Workspace, stage: PlannedStage) -> None:
    assert attempt_to_run(workspace, stage.id, 1, job(1), silent) == 2
    assert attempt_to_run(workspace, stage.id, 1, job(2), silent) == 2


@pytest.mark.parametrize("failure", ["preempted", "time_limit", "node_failure", "interrupted"])
def test_resume_is_followed(
    workspace: Workspace, stage: PlannedStage, failure: FailureClass
) -> None:
    workspace.close_attempt(stage.id, 1, AttemptOutcome(failure, "resume"))
    assert attempt_to_run(workspace, stage.id, 1, job(1), silent) == 2
    assert outcome(workspace, stage, 1) == failure


@pytest.mark.parametrize(
    ("failure", "decision"),
    [("bug", "stop"), ("cancelled", "stop"), ("disk_full", "resume"), ("bug", "resume")],
)
def test_what_an_orchestrator_has_to_decide_is_left_to_one(
    workspace: Workspace, stage: PlannedStage, failure: FailureClass, decision: str
) -> None:
    workspace.close_attempt(stage.id, 1, AttemptOutcome(failure, decision))
    with pytest.raises(AttemptClosed, match=failure):
        attempt_to_run(workspace, stage.id, 1, job(1), silent)
    assert workspace.layout.stage(stage.id).attempt_numbers() == [1]


def test_an_orchestrator_decides_first(workspace: Workspace, stage: PlannedStage) -> None:
    def cancelled_meanwhile(_command: Sequence[str]) -> str:
        workspace.close_attempt(stage.id, 1, AttemptOutcome("cancelled", "stop"))
        return ""

    with pytest.raises(AttemptClosed, match="cancelled"):
        attempt_to_run(workspace, stage.id, 1, job(1), cancelled_meanwhile)
    assert workspace.layout.stage(stage.id).attempt_numbers() == [1]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("done", "it is done"),
        ("another job", "another job"),
        ("stop asked", "asked to stop"),
        ("given up", "gave it up"),
    ],
)
def test_a_requeue_may_be_over(workspace: Workspace, plan: Plan, before: str, message: str) -> None:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm"))
    submitted(workspace, stage, 1, job_id="7")
    if before == "given up":
        workspace.void_attempt(stage.id, 1)
    else:
        assert attempt_to_run(workspace, stage.id, 1, job(), silent) == 1
        started(workspace, stage, 1)
    if before == "done":
        result = StageResult(1, 1, "attempts/0001/output", (), {}, {}, 1.0, "t")
        workspace.publish_result(stage.id, result)
    elif before == "another job":
        workspace.close_attempt(stage.id, 1, AttemptOutcome("preempted", "resume"))
        workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm", after=1))
        submitted(workspace, stage, 2, job_id="8")
    elif before == "stop asked":
        workspace.request_stop_of(stage.id, 1, "cancelled", "refiner cancel")
    with pytest.raises(AttemptClosed, match=message):
        attempt_to_run(workspace, stage.id, 1, job(1), silent)


def test_a_second_process_of_one_start_does_nothing(workspace: Workspace, plan: Plan) -> None:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm"))
    submitted(workspace, stage, 1, job_id="7")
    started(workspace, stage, 1, process=str(ProcessId.of()))
    with pytest.raises(AttemptClosed, match="another process of this job"):
        attempt_to_run(workspace, stage.id, 1, job(0), silent)
    assert outcome(workspace, stage, 1) is None


def test_of_two_claims_one_wins(workspace: Workspace, stage: PlannedStage, plan: Plan) -> None:
    workspace.close_attempt(stage.id, 1, AttemptOutcome("preempted", "resume"))
    won: list[str] = []
    barrier = threading.Barrier(6)

    def restart() -> None:
        barrier.wait()
        try:
            attempt_to_run(workspace, stage.id, 1, job(1), silent)
        except AttemptClosed:
            return
        won.append("restart")

    def orchestrate() -> None:
        barrier.wait()
        if workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm", after=1)):
            won.append("orchestrator")

    threads = [threading.Thread(target=t) for t in (restart, orchestrate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A restart that comes late finds the winner's claim, not started yet, and may start it; the
    # token then decides.
    assert len(won) - won[1:].count("restart") == 1
    assert workspace.layout.stage(stage.id).attempt_numbers() == [1, 2]


def test_a_local_worker_inside_an_allocation_is_no_job_of_its_own(
    workspace: Workspace, stage: PlannedStage, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    local = plan.by_name["sft"]
    workspace.claim_attempt(local, plan.config, {}, StageClaim(OWNER, "local"))
    assert job_of(workspace, local.id, 1) is None
    assert job_of(workspace, stage.id, 1) == SlurmJob.from_environment()


# ---------------------------------------------------------------- a copy that is still dying


def test_a_dying_copy_makes_no_write_visible(workspace: Workspace, plan: Plan) -> None:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm"))
    submitted(workspace, stage, 1, job_id="7")
    with AttemptRun(workspace, stage.id, 1, job(0), own_log=False) as old:
        work(old, 2)
        number = attempt_to_run(workspace, stage.id, 1, job(1), silent)
        with AttemptRun(workspace, stage.id, number, job(1), own_log=False) as new:
            old.io.log_metrics(9, {"from": 1})
            old.io.save_rollouts(9, [{"from": 1}])
            (old.output_dir / "out.txt").write_text("old")
            with pytest.raises(AttemptClosed), old.io.new_checkpoint(9):
                pass
            with pytest.raises(AttemptClosed) as caught:
                old.finish({})
            old.fail(caught.value)
            assert outcome(workspace, stage, 1) == "preempted", "what the restart wrote stays"
            work(new, 4)
            (new.output_dir / "out.txt").write_text("new")
            new.finish({})
    folder = workspace.output_dir(stage.id)
    assert (folder / "out.txt").read_text() == "new"
    paths = workspace.layout.attempt(stage.id, 2)
    assert [m.step for m in read_metrics(paths.metrics)] == [1, 2, 3, 4]
    assert not list(workspace.layout.stage(stage.id).checkpoints.glob("*9*"))


def work(attempt: AttemptRun, until: int) -> None:
    latest = attempt.io.latest_checkpoint()
    for step in range(1 if latest is None else latest.step + 1, until + 1):
        attempt.io.progress(Progress(step, until, "train"))
        attempt.io.log_metrics(step, {"x": step})
        with attempt.io.new_checkpoint(step) as folder:
            (folder / "state").write_text("x")


def test_a_closed_attempt_does_not_start(workspace: Workspace, plan: Plan) -> None:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm"))
    workspace.close_attempt(stage.id, 1, AttemptOutcome("launch_failure", "resume"))
    attempt = AttemptRun(workspace, stage.id, 1, own_log=False)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(AttemptClosed):
        attempt.__enter__()
    assert signal.getsignal(signal.SIGTERM) is before, "handlers are put back"


# ---------------------------------------------------------------- why a job was started again


@pytest.mark.parametrize(
    ("printed", "failure"),
    [
        ("PREEMPTED\nRUNNING\n", "preempted"),
        ("PREEMPTED\nNODE_FAIL\nRUNNING\n", "node_failure"),
        ("NODE_FAIL\nREQUEUED\nRUNNING\n", "preempted"),
        ("NODE_FAIL\n", "preempted"),
        ("PREEMPTED\nCANCELLED by 0\n", "preempted"),
        ("", "preempted"),
    ],
)
def test_accounting_says_how_the_last_start_ended(printed: str, failure: FailureClass) -> None:
    assert why_restarted(job(2), lambda _: printed).failure == failure


# ---------------------------------------------------------------- why a worker was asked to stop

#: Fields as `scontrol show job -o` of Slurm 22.05 printed them when the signal had arrived.
RUNNING = "JobState=RUNNING Restarts=0 PreemptTime=None RunTime=00:00:04 TimeLimit=00:05:00"
CANCELLED = "JobState=COMPLETING Restarts=0 PreemptTime=None RunTime=00:00:04 TimeLimit=00:05:00"
REQUEUED = "JobState=COMPLETING Restarts=1 RunTime=00:00:00 TimeLimit=00:05:00"
LIMIT_NEAR = "JobState=RUNNING Restarts=0 PreemptTime=None RunTime=00:04:56 TimeLimit=00:05:00"
LIMIT_PASSED = "JobState=COMPLETING Restarts=0 PreemptTime=None RunTime=00:01:10 TimeLimit=00:01:00"
GRACE = (
    "JobState=RUNNING Restarts=0 PreemptTime=2026-11-21T12:30:36 RunTime=00:00:04 "
    "TimeLimit=UNLIMITED"
)


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
        (REQUEUED, signal.SIGTERM, "preempted"),
        (CANCELLED, signal.SIGTERM, "cancelled"),
        ("", signal.SIGTERM, "interrupted"),
    ],
)
def test_slurm_is_asked_whose_signal_it_was(facts: str, number: int, failure: FailureClass) -> None:
    found = why_stopped(job(0), number, None, lambda _: f"JobId=7 JobName=x {facts}\n")
    assert found.failure == failure
    assert found.comes_back == (facts == REQUEUED)
    assert "job 7" in found.message


def test_slurm_facts_are_those_of_this_job_and_this_restart() -> None:
    def failed_node(command: Sequence[str]) -> str:
        return "NODE_FAIL\nPENDING\n" if command[0] == "sacct" else f"JobId=7 {REQUEUED}"

    assert why_stopped(job(0), signal.SIGTERM, None, failed_node).failure == "node_failure"
    text = f"JobId=7 {CANCELLED.replace('Restarts=0', 'Restarts=3')}"
    assert why_stopped(job(3), signal.SIGTERM, None, lambda _: text).failure == "cancelled"
    assert why_stopped(None, signal.SIGINT, None).failure == "interrupted", "outside of Slurm"
    text = f"JobId=8 ArrayJobId=7 {RUNNING}\nJobId=7 ArrayJobId=7 {CANCELLED}\n"
    assert job_facts(text, "7")["JobState"] == "COMPLETING"
    assert job_facts(text, "9") == {}


def test_a_request_of_refiner_outweighs_the_facts_of_slurm() -> None:
    def never(_command: Sequence[str]) -> str:
        raise AssertionError("Slurm need not be asked")

    asked = {"reason": "refiner cancel by ana", "failure": "cancelled"}
    expected = StopReason("cancelled", "refiner cancel by ana")
    assert why_stopped(job(0), signal.SIGTERM, asked, never) == expected


@pytest.mark.parametrize("command", [("false",), ("no-such-command",)])
def test_a_scheduler_that_does_not_answer_is_no_error(command: tuple[str, ...]) -> None:
    assert ask_scheduler(command) == ""


# ---------------------------------------------------------------- the worker's last word


@pytest.fixture
def run(workspace: Workspace, plan: Plan) -> Callable[[], AttemptRun]:
    stage = plan.by_name["data"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "local"))
    return lambda: AttemptRun(workspace, stage.id, 1, own_log=False)


def test_the_outcome_names_the_request(run: Callable[[], AttemptRun], workspace: Workspace) -> None:
    with run() as attempt:
        attempt.io.progress(Progress(4, 9, "train"))
        workspace.request_stop_of(attempt.stage_id, 1, "cancelled", "refiner cancel by ana")
        os.kill(os.getpid(), signal.SIGTERM)
        attempt.fail(Interrupted("stopped after step 4"))
    found = workspace.read_attempt(attempt.stage_id, 1)
    assert (found.outcome.failure, found.outcome.decision) == ("cancelled", "stop")
    assert found.outcome.step == 4
    assert "by ana: stopped after step 4" in found.outcome.message


def test_a_note_beside_the_attempt_stops_it_without_a_signal(
    run: Callable[[], AttemptRun], workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.attempt.stage_io.INTERVAL_S", 0.01)
    with run() as attempt:
        workspace.request_stop_of(attempt.stage_id, 1, "interrupted", "Ctrl-C")
        for _ in range(500):
            if attempt.io.should_stop():
                break
            threading.Event().wait(0.01)
        assert attempt.io.should_stop()
        found = attempt.fail(RuntimeError("a data worker was killed by signal: Terminated"))
    assert (found.failure, found.decision) == ("interrupted", "resume"), "no bug"
    assert "data worker" in found.message
