"""Queries of a scheduler, the meaning of its states, and the profiles of clusters."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from infra.slurm.profiles import JobPlacement, Profile, list_profiles, load_profile
from infra.slurm.scheduler import (
    LONGEST_PAUSE_S,
    Answer,
    JobQuery,
    Row,
    SchedulerView,
    SlurmUnavailable,
)
from infra.slurm.states import (
    NEVER,
    STATES,
    JobFacts,
    end_of,
    facts_of_accounts,
    job_status_of,
    lost_end,
)
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import ConfigurationError, UnsupportedError
from tests.support.plans import small_plan


@dataclass
class Scheduler:
    """Says what it is told to, and keeps count."""

    live: dict[str, dict[str, str]] = field(default_factory=dict)
    remembered: dict[str, dict[str, str]] = field(default_factory=dict)
    recorded: list[Row] = field(default_factory=list)
    accounting: bool = True
    away: bool = False
    asked: list[str] = field(default_factory=list)

    def queue(self, users: Iterable[str]) -> list[Row]:
        self._count("queue")
        return [{"id": i, "user": "0", "name": f"name-{i}", **job} for i, job in self.live.items()]

    def shown(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row]:
        self._count("shown")
        rows = [
            {"id": i, "user": "0", "name": f"name-{i}", **j} for i, j in self.remembered.items()
        ]
        return [r for r in rows if r["id"] in ids or r["name"] in names]

    def accounts(self, ids: Sequence[str], names: Sequence[str] = ()) -> list[Row] | None:
        self._count("accounts")
        if not self.accounting:
            return None
        recorded = [{"user": "0", **r} for r in self.recorded]
        wanted = [r for r in recorded if r["id"].partition(".")[0] in ids]
        return [*wanted, *(r for r in recorded if r["name"] in names)]

    def cancel(self, job_id: str) -> None: ...

    def signal(self, job_id: str, name: str) -> bool:
        return True

    def release(self, job_id: str) -> None: ...

    def _count(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise SlurmUnavailable(f"{what} gave no answer")


class World:
    """A view, its scheduler, and a clock that is set by hand."""

    def __init__(self, poll_s: float = 10.0) -> None:
        self.now, self.scheduler = 0.0, Scheduler()
        self.view = SchedulerView(
            self.scheduler, poll_s, patience=(3, 15.0), clock=lambda: self.now
        )

    def observe(self, *wanted: JobQuery, after_s: float = 10.0) -> list[Answer]:
        self.now += after_s
        answers = self.view.observe(wanted)
        return [answers[w.key] for w in wanted]


def job(number: str | None, name: str = "", task: int | None = None) -> JobQuery:
    return JobQuery(number, name or f"name-{number}", task, "0")


def state(answer: Answer) -> str:
    return answer.state if isinstance(answer, JobFacts) else answer or "unknown"


@pytest.fixture
def world() -> World:
    return World()


def test_a_thousand_jobs_cost_one_query_per_poll(world: World) -> None:
    wanted = [job(str(n)) for n in range(1000)]
    world.scheduler.live = {str(n): {"state": "RUNNING"} for n in range(1000)}
    for _ in range(100):  # half a second apart: five polls
        answers = world.observe(*wanted, after_s=0.5)
    assert {state(a) for a in answers} == {"RUNNING"}
    assert world.scheduler.asked == ["queue"] * 5


def test_a_job_just_submitted_is_live_until_the_next_answer(world: World) -> None:
    world.scheduler.live = {"1": {"state": "RUNNING"}}
    world.observe(job("1"))
    world.view.submitted("2", "name-2")
    assert state(world.observe(job("2"), after_s=0.1)[0]) == "PENDING"
    world.scheduler.live["2"] = {"state": "RUNNING"}
    assert state(world.observe(job("2"))[0]) == "RUNNING"


def test_an_ended_job_is_asked_for_once(world: World) -> None:
    world.scheduler.remembered = {"1": {"state": "FAILED", "exit_code": "3:0"}}
    world.scheduler.recorded = [
        {"id": "1", "state": "FAILED", "name": "name-1"},
        {"id": "1.0", "state": "OUT_OF_MEMORY", "name": "env"},
    ]
    (answer,) = world.observe(job("1"))
    assert (answer.exit_code, answer.out_of_memory) == (3, True)
    world.observe(job("1"))
    world.observe(job("1"))
    assert world.scheduler.asked == ["queue", "shown", "accounts", "queue", "queue"]


def test_a_job_requeued_by_hand_is_live_again(world: World) -> None:
    world.scheduler.remembered = {"1": {"state": "FAILED"}}
    assert state(world.observe(job("1"))[0]) == "FAILED"
    world.scheduler.live = {"1": {"state": "PENDING"}}
    assert state(world.observe(job("1"))[0]) == "PENDING"
    world.scheduler.live, world.scheduler.remembered = {}, {"1": {"state": "COMPLETED"}}
    assert state(world.observe(job("1"))[0]) == "COMPLETED"


def test_an_unknown_job_is_lost_after_several_answers(world: World) -> None:
    assert [state(world.observe(job("1"))[0]) for _ in range(3)] == ["unknown", "unknown", "lost"]


def test_answers_in_quick_succession_do_not_make_it_lost() -> None:
    world = World(poll_s=1.0)
    assert {state(world.observe(job("1"), after_s=1.0)[0]) for _ in range(15)} == {"unknown"}
    assert state(world.observe(job("1"), after_s=1.0)[0]) == "lost"


def test_late_accounting_of_a_lost_job_is_ignored(world: World) -> None:
    world.scheduler.recorded = [{"id": "1", "state": "RUNNING", "name": "name-1"}]
    assert state(world.observe(job("1"))[0]) == "unknown"
    world.scheduler.recorded = [{"id": "1", "state": "TIMEOUT", "name": "name-1"}]
    assert state(world.observe(job("1"))[0]) == "TIMEOUT"


def test_the_controllers_memory_replaces_accounting(world: World) -> None:
    world.scheduler.accounting = False
    world.scheduler.remembered = {"1": {"state": "NODE_FAIL"}}
    assert state(world.observe(job("1"))[0]) == "NODE_FAIL"
    world.observe(job("1"), job("2"))
    world.observe(job("1"), job("2"))
    assert world.scheduler.asked.count("accounts") == 1  # it is off, and not asked every time


def test_an_absent_scheduler_is_polled_less(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.scheduler.live = {"1": {"state": "RUNNING"}}
    world.scheduler.remembered = {"2": {"state": "COMPLETED"}}
    world.observe(job("1"), job("2"))
    world.scheduler.away, world.scheduler.live = True, {}
    world.scheduler.asked.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(600):
            one, two = world.observe(job("1"), job("2"), after_s=1.0)
            if world.scheduler.asked:
                assert (state(one), state(two)) == ("unknown", "COMPLETED")
    assert len(caplog.records) == 1
    assert len(world.scheduler.asked) <= 4 + 600 / LONGEST_PAUSE_S
    world.scheduler.away, world.scheduler.live = False, {"1": {"state": "RUNNING"}}
    assert state(world.observe(job("1"), after_s=LONGEST_PAUSE_S)[0]) == "RUNNING"


def test_a_job_without_id_is_found_by_its_name(world: World) -> None:
    world.scheduler.live = {
        "7": {"state": "RUNNING", "name": "refiner-x"},
        "8_0": {"state": "PENDING", "name": "refiner-array"},
        "8_1": {"state": "RUNNING", "name": "refiner-array"},
    }
    one, task = world.observe(job(None, "refiner-x"), job(None, "refiner-array", 1))
    assert (one.job_id, task.job_id) == ("7", "8_1")


@pytest.mark.parametrize("accounting", [True, False])
def test_an_ended_job_is_found_by_its_name(world: World, accounting: bool) -> None:
    row = {"state": "COMPLETED", "name": "refiner-x"}
    world.scheduler.accounting = accounting
    if accounting:
        world.scheduler.recorded = [{"id": "7", **row}]
    else:
        world.scheduler.remembered = {"7": row}
    (answer,) = world.observe(job(None, "refiner-x"))
    assert (answer.job_id, answer.state) == ("7", "COMPLETED")


# ---------------------------------------------------------------- states and reasons


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


# ---------------------------------------------------------------- profiles


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_shipped_profile_loads_and_says_what_it_is_for() -> None:
    found = list_profiles()
    assert {"default", "gres", "container", "preemptible"} <= set(found)
    assert all(len(d) > 40 for d in found.values())


def test_a_file_is_a_profile_too(tmp_path: Path) -> None:
    text = "partition: gpu\naccount: 12345\nexclude: [n7, n8]\nmodules: [cuda/12.8]\n"
    text += "sbatch: {mail-type: FAIL, exclusive: true, mem: null}\ncpu: {partition: cpu}\n"
    profile = load_profile(write(tmp_path, text))
    assert (profile.name, profile.account, profile.exclude) == ("mine", "12345", ("n7", "n8"))
    assert profile.sbatch == {"mail-type": "FAIL", "exclusive": True, "mem": None}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partitions: gpu", "Did you mean 'partition'"),
        ("gpu_option: gpu-per-node", "gpus-per-node"),
        ("max_time_min: long", "a valid integer"),
        ("sbatch: {job-name: x}", "job-name"),
        ("sbatch: {signal: USR1@60}", "signal_lead_s"),
        ("env: {HF_TOKEN: hf_x}", "secret"),
        ("setup: ['export WANDB_API_KEY=abc']", "secret"),
        ("- a list", "mapping"),
    ],
)
def test_wrong_profiles_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_profile(write(tmp_path, text))
    assert says in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'default'"):
        load_profile("defualt")


def test_cpu_stages_go_where_the_profile_says() -> None:
    stage = small_plan("data").by_name["data"]
    gpu = replace(stage, resources=Resources(gpus=1))
    online = replace(stage, needs_network=True)
    here, there = Profile(), Profile(cpu_stages="slurm")
    assert (here.executor_for(stage), here.executor_for(gpu)) == ("local", "slurm")
    assert (there.executor_for(stage), there.executor_for(online)) == ("slurm", "local")
    assert replace(there, network=True).executor_for(online) == "slurm"


def test_cpu_jobs_have_their_own_partition() -> None:
    cpu = JobPlacement(partition="cpu", max_time_min=60, sbatch={"mem": None})
    profile = Profile(
        partition="gpu", account="a", max_time_min=600, sbatch={"mail-type": "FAIL"}, cpu=cpu
    )
    place = profile.place_for(Resources())
    assert (place.partition, place.account, place.max_time_min) == ("cpu", "a", 60)
    assert place.sbatch == {"mail-type": "FAIL", "mem": None}
    assert profile.place_for(Resources(gpus=1)).partition == "gpu"


def test_impossible_jobs_are_refused_before_submission() -> None:
    profile = Profile(name="x", max_time_min=60, max_gpus=4)
    profile.check(Resources(time_limit_min=60, gpus=4), "sft")
    with pytest.raises(ConfigurationError, match="time_limit_min=60"):
        profile.check(Resources(time_limit_min=61), "sft")
    with pytest.raises(ConfigurationError, match="gpus=4"):
        profile.check(Resources(gpus=8), "sft")
    with pytest.raises(UnsupportedError, match="internet"):
        profile.check(Resources(), "publish", needs_network=True)


@pytest.mark.parametrize(
    ("limit_min", "save_s", "lead_s"),
    [(60, 0, 120), (60, 10, 120), (600, 300, 630), (20, 3000, 600), (1, 0, 30)],
)
def test_the_warning_leaves_time_for_a_save(limit_min: int, save_s: float, lead_s: int) -> None:
    assert Profile().lead_s(Resources(time_limit_min=limit_min), save_s) == lead_s
