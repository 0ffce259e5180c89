"""The meaning of Slurm's states, reasons and log lines."""

from typing import Any

import pytest

from infra.slurm.states import (
    NEVER,
    STATES,
    JobFacts,
    end_of,
    facts_of_accounts,
    job_status_of,
    lost_end,
)

# Every state of Slurm 22.05 to 25.05 (`man squeue`, JOB STATE CODES; `man sacct`).
WAITS = """PENDING CONFIGURING POWER_UP_NODE SUSPENDED STOPPED COMPLETING STAGE_OUT REQUEUED
REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD"""
RUNS = "RUNNING RESIZING SIGNALING"
ENDED = """COMPLETED FAILED CANCELLED TIMEOUT DEADLINE NODE_FAIL BOOT_FAIL OUT_OF_MEMORY PREEMPTED
REVOKED"""
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks …"
TIME_LIMIT = (
    "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT"
)
PREEMPTION = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T12:00:00 DUE TO PREEMPTION"
NODE = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T12:00:00 DUE TO NODE FAILURE"
EXIT_3 = "subprocess.CalledProcessError: Command '['env']' returned non-zero exit status 3."
IMPORT = "ModuleNotFoundError: No module named 'x'\n" + EXIT_3.replace("3.", "1.")


def status(state: str, reason: str = "", **more: Any) -> Any:
    return job_status_of(JobFacts("7", state, reason, **more), True, lambda: "")


def test_live_and_running_states() -> None:
    waits, runs, ended = (text.split() for text in (WAITS, RUNS, ENDED))
    assert set(STATES) == {*waits, *runs, *ended}
    for state in (*waits, *runs, *ended, "A_STATE_OF_TOMORROW"):
        seen = status(state)
        assert seen.liveness == ("dead" if state in ended else "live"), state
        assert seen.running == (state in runs), state
        assert (seen.end is not None) == (state in ended), state


@pytest.mark.parametrize(
    ("job", "printed", "failure", "decision"),
    [
        ({"state": "CANCELLED"}, "", "cancelled", "stop"),
        ({"state": "TIMEOUT"}, "", "time_limit", "resume"),
        ({"state": "NODE_FAIL"}, "", "node_failure", "resume"),
        ({"state": "OUT_OF_MEMORY"}, "", "out_of_memory", "resume"),
        ({"state": "FAILED", "steps": {"0": "OUT_OF_MEMORY"}}, "", "out_of_memory", "resume"),
        ({"state": "PREEMPTED"}, "", "preempted", "resume"),
        ({"state": "FAILED", "exit_code": 1, "preempted": True}, EXIT_3, "preempted", "resume"),
        ({"state": "TIMEOUT", "preempted": True}, "", "time_limit", "resume"),
        ({"state": "REVOKED"}, "", "launch_failure", "resume"),
        ({"state": "FAILED", "signal": 53}, "", "launch_failure", "resume"),
        ({"state": "FAILED", "reason": "JobLaunchFailure", "signal": 9}, "", "killed", "resume"),
        ({"state": "FAILED", "reason": "NodeDown"}, "", "node_failure", "resume"),
        ({"state": "FAILED", "exit_code": 1}, "", "killed", "resume"),
        ({"state": "FAILED", "signal": 9, "reason": "RaisedSignal:9"}, "", "killed", "resume"),
        ({"state": "COMPLETED"}, "", "killed", "resume"),
        ({"state": "FAILED", "exit_code": 1}, EXIT_3, "bad_data", "stop"),
        ({"state": "FAILED", "exit_code": 1}, OOM, "out_of_memory", "resume"),
        ({"state": "FAILED", "exit_code": 1}, TIME_LIMIT, "time_limit", "resume"),
        (
            {"state": "FAILED", "exit_code": 1},
            "RuntimeError: Waited for 60 seconds but could not find submitted jobs in path:",
            "launch_failure",
            "resume",
        ),
    ],
)
def test_failure_classes_of_ends(job, printed, failure, decision) -> None:
    end = end_of(JobFacts("7", **job), True, printed)
    assert (end.failure, end.decision) == (failure, decision)


def test_a_job_whose_worker_never_began_failed_to_launch() -> None:
    job = JobFacts("7", "FAILED", "JobLaunchFailure", signal=9)
    assert end_of(job, False, "").failure == "launch_failure"


def test_an_import_error_is_a_final_bug() -> None:
    end = end_of(JobFacts("7", "FAILED", exit_code=1), False, IMPORT)
    assert (end.failure, end.decision) == ("bug", "stop")


@pytest.mark.parametrize(
    ("printed", "failure"),
    [
        ("", "killed"),
        (OOM, "out_of_memory"),
        (TIME_LIMIT, "time_limit"),
        (PREEMPTION, "preempted"),
        (NODE, "node_failure"),
        (f"{PREEMPTION}\n{TIME_LIMIT}", "time_limit"),  # a requeued job appends to its log
    ],
)
def test_a_forgotten_job_is_classified_by_its_output(printed: str, failure: str) -> None:
    assert lost_end("7", True, printed).failure == failure


def test_a_job_that_never_existed_is_submitted_again() -> None:
    assert lost_end(None, False, "").failure == "system_outage"


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("AssocGrpCPUMinutesLimit", "has used up its budget"),
        ("AssocGrpCPURunMinutesLimit", "never if this job alone requests more"),
        ("QOSMaxWallDurationPerJobLimit", "more than is allowed for one job"),
        ("QOSGrpNodeLimit", "is at its limit"),
        ("Priority", ""),
    ],
)
def test_limits_are_explained(reason: str, hint: str) -> None:
    said = status("PENDING", reason).reason
    assert said.startswith(reason)
    assert hint in said
    assert hint or said == reason


def test_a_held_job_says_who_may_release_it_and_what_never_passes_is_explained() -> None:
    for reason in ("launch failed requeued held", "launch_failed_requeued_held"):
        seen = status("PENDING", reason)
        assert (seen.liveness, seen.held, seen.running) == ("live", True, False)
    for reason in ("JobHeldUser", "JobHeldAdmin"):  # by a person
        seen = status("PENDING", reason)
        assert not seen.held
        assert "release" in seen.reason
    for reason in NEVER:
        seen = status("PENDING", f"{reason}, and more")
        assert (seen.liveness, seen.end) == ("live", None)
        assert seen.reason == f"{reason}: {NEVER[reason]}"


def test_rows_are_read_with_their_steps() -> None:
    rows = [
        {"id": "7_1", "state": "CANCELLED by 0", "exit_code": "0:15", "node": "n1", "name": "a"},
        {"id": "7_1.batch", "state": "CANCELLED", "exit_code": "0:15", "node": "n1", "name": "b"},
        {"id": "7_1.0", "state": "OUT_OF_ME+", "exit_code": "0:125", "node": "n1", "name": "c"},
    ]
    (job,) = facts_of_accounts(rows).values()
    assert (job.job_id, job.state, job.signal, job.by) == ("7_1", "CANCELLED", 15, "0")
    assert job.steps == {"batch": "CANCELLED", "0": "OUT_OF_ME"}
    assert job.as_text()["cancelled_by"] == "0"
