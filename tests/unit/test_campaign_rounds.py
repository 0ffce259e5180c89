"""Rounds of an orchestrator: what follows from an observation, an outage and a cancel."""

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from flows.cli.status import closing_lines
from flows.running import cancelling
from flows.running.status import RunWatcher
from infra.host.processes import ProcessId, host_name
from infra.jobs.dispatch import LocalDispatcher, Router
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.orchestrator import executor as ending
from infra.orchestrator.orchestrator import Orchestrator
from infra.store import atomic
from infra.store.orchestrators import take_up, wanted_by_others
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import DiskConfig, PublishConfig
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, StageResult
from tests.support.command import wait_until
from tests.support.plans import (
    OWNER,
    SOURCES,
    claim,
    orchestrator_on,
    run_record,
    small_config,
    small_plan,
)
from tests.support.probing import ProbingKeeper


class Cluster:
    """Jobs whose statuses the test decides."""

    executor = "slurm"

    def __init__(self, **status: Any) -> None:
        self.liveness = JobStatus(**status)
        self.released: list[AttemptRef] = []

    def check(self, stage: PlannedStage) -> None:
        """It takes everything."""

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        return {}

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        return {a.ref: self.liveness for a in attempts}

    def stop(self, attempt: OpenAttempt) -> bool:
        return True

    def kill(self, attempt: OpenAttempt) -> bool:
        return True

    def release(self, attempt: OpenAttempt) -> None:
        self.released.append(attempt.ref)


def campaign_of(workspace: Workspace, plan: Plan, *dispatchers: Any, **more: Any) -> Orchestrator:
    router = Router({d.executor: d for d in dispatchers}, lambda _: dispatchers[0].executor)
    return orchestrator_on(plan, workspace, router, run=run_record(workspace, plan), **more)


def claimed(workspace: Workspace, plan: Plan) -> PlannedStage:
    """`data`, with an attempt that a call of another host has submitted to Slurm."""
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "slurm")) is not None
    return stage


def events(campaign: Orchestrator, name: str) -> list[dict[str, Any]]:
    path = campaign.workspace.layout.run(campaign.source.shown[0].run.run).events
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [e for e in found if e["event"] == name]


def test_a_claim_that_was_not_submitted_is_closed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full when it was submitted, and when that was to be noted."""
    plan, local = small_plan("data"), LocalDispatcher(workspace)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(local, "submit", lambda requests: {r.ref: full for r in requests})
    real, refused = workspace.void_attempt, [full]

    def void(*ref: Any) -> bool:
        if refused:
            raise refused.pop()
        return real(*ref)

    monkeypatch.setattr(workspace, "void_attempt", void)
    campaign = campaign_of(workspace, plan, local)
    campaign.begin()
    campaign.step()
    campaign.step()
    found = workspace.read_attempt(plan.by_name["data"].id, 1)
    assert found.outcome is not None, campaign.views()["data"]


def test_an_end_on_a_full_disk_keeps_its_class(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By when it can be written down there is room, and the scheduler has forgotten the job."""
    plan, full = small_plan("data", disk=DiskConfig(watch_s=0.0)), [True]
    stage = claimed(workspace, plan)
    workspace.start_attempt(stage.id, 1, {"process": OWNER})
    for name in ("close_attempt", "note_scheduler"):
        real = getattr(workspace, name)

        def write(*args: Any, real: Any = real) -> Any:
            if full:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            return real(*args)

        monkeypatch.setattr(workspace, name, write)
    disk_manager = ProbingKeeper(workspace)
    monkeypatch.setattr(
        disk_manager, "free_space", lambda *_: None if full else disk_manager.Nothing()
    )
    cluster = Cluster(liveness="dead", running=False, facts={"state": "FAILED"})
    campaign = campaign_of(workspace, plan, cluster, disk_manager=disk_manager)
    campaign.begin()
    for _ in range(5):
        campaign.step()
        assert campaign.views()["data"].state in ("running", "reattached", "paused")
    assert sum("cannot be recorded" in r.message for r in caplog.records) == 1
    full.clear()
    for _ in range(2):
        campaign.step()
    assert workspace.read_attempt(stage.id, 1).outcome.failure == "disk_full", "not killed"


def test_a_stage_says_why_its_job_cannot_be_seen(workspace: Workspace) -> None:
    """Its executor is not that of this call, or the scheduler does not answer."""
    plan = small_plan("data")
    claimed(workspace, plan)
    silent = Cluster(liveness="unknown", reason="Slurm has not said yet")
    for dispatcher, said in (
        (LocalDispatcher(workspace), "dispatch.executor=slurm"),
        (silent, "Slurm has not said yet"),
    ):
        campaign = campaign_of(workspace, plan, dispatcher)
        campaign.begin()
        campaign.step()
        view = campaign.views()["data"]
        assert not view.terminal
        assert said in view.message


def test_the_workers_own_outcome_counts_first(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last word arrives between the look and the closing."""
    plan = small_plan("data")
    stage = claimed(workspace, plan)
    workspace.start_attempt(stage.id, 1, {"process": str(ProcessId.of())})
    campaign = campaign_of(workspace, plan, Cluster(liveness="dead", running=False))
    real = workspace.close_attempt

    def close(*args: Any) -> bool:
        real(stage.id, 1, outcome_of("judge_outage", "the worker's own word"))
        return real(*args)

    monkeypatch.setattr(workspace, "close_attempt", close)
    campaign.begin()
    campaign.step()
    assert events(campaign, "closed") == []


def test_a_broken_call_has_ended(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may live on, in a notebook or a longer script."""
    plan = small_plan("data")
    claim(workspace, plan, "data")
    campaign = campaign_of(workspace, plan, Cluster(liveness="live"))
    campaign.begin()

    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(campaign._actor, "stop_jobs", broken)
    campaign._thread.start()
    with pytest.raises(RuntimeError, match="broken"):
        campaign.join()
    assert workspace.read_orchestrator(campaign.source.shown[0].run.run)["state"] == "ended"


def test_evaluations_during_training_give_way(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("data", "grpo", "evaluate", "publish")
    grpo = replace(config.grpo, num_training_steps=2, save_freq=1)
    publish = PublishConfig(which="every-save")
    plan = make_plan(replace(config, publish=publish, grpo=grpo), SOURCES)
    evaluations = ("evaluate-base", "evaluate-grpo-step1")
    for stage in plan.stages:
        if stage.name not in evaluations and stage.kind in ("data", "grpo", "export"):
            claim(workspace, plan, stage.name)
            made = StageResult(1, 1, "output", (), {}, {}, 1.0, "then")
            workspace.publish_result(stage.id, made)
    submitted: dict[str, int] = {}

    def submit(requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        submitted.update({r.stage_id: r.nice for r in requests})
        return {}

    cluster = Cluster(liveness="live")
    monkeypatch.setattr(cluster, "submit", submit)
    campaign = campaign_of(workspace, plan, cluster)
    campaign.begin()
    campaign.step()
    nices = [submitted[plan.by_name[name].id] for name in evaluations]
    assert nices == [0, config.dispatch.nice]
    assert config.dispatch.nice > 0


# ---------------------------------------------------------------- cancelling


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


# ---------------------------------------------------------------- outages


NUMBERS = (errno.ESTALE, errno.ENOENT, errno.EAGAIN)
RUNS = {"liveness": "live", "running": True, "state": "RUNNING"}


@contextmanager
def unlistable(folder: str, times: int, number: int = errno.ESTALE) -> Iterator[list[int]]:
    """Listing a folder of that name fails so often."""
    real, left = os.listdir, [times]

    def listdir(path: Any = ".") -> list[str]:
        if str(path).endswith(f"/{folder}") and left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    os.listdir = listdir
    try:
        yield left
    finally:
        os.listdir = real


def begun(workspace: Workspace, plan: Plan, owner: str = OWNER) -> PlannedStage:
    """A stage that a job works on, by default one of another host's call."""
    stage = plan.by_name["data"]
    assert workspace.claim_attempt(stage, plan.config, {}, StageClaim(owner, "slurm")) is not None
    atomic.write_json(workspace.layout.attempt(stage.id, 1).job, {"job_id": "7"})
    workspace.start_attempt(stage.id, 1, {"process": OWNER, "started_at": "2026-11-21T00:00:00"})
    return stage


def ended(workspace: Workspace, stage: PlannedStage) -> list[bool]:
    """Whether each attempt of a stage has an outcome."""
    record = workspace.read_record(stage.id)
    return [a.outcome is not None for a in record.attempts]


def until(said: Callable[[], bool], what: object = "") -> None:
    wait_until(said, str(what))


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: errno.errorcode[n])
def test_failing_listings_are_an_outage_reported_once(workspace: Workspace, number: int) -> None:
    plan = small_plan("data")
    stage = begun(workspace, plan)
    campaign = campaign_of(workspace, plan, Cluster(**RUNS))
    begins_in_it = number == errno.EAGAIN
    if not begins_in_it:
        campaign.start()
    with unlistable("attempts", 10**9, number) as left:
        if begins_in_it:
            campaign.start()
        until(lambda: bool(events(campaign, "outage")))
        assert campaign.views()["data"].state == "paused"
        left[0] = 0
        until(lambda: campaign.views()["data"].state == "reattached")
        until(lambda: bool(events(campaign, "back")))
    assert len(events(campaign, "outage")) == len(events(campaign, "back")) == 1
    assert stage.id in events(campaign, "outage")[0]["reason"]
    states = [e["state"] for e in events(campaign, "stage")]
    assert states[-2:] == ["paused", "reattached"]
    assert ended(workspace, stage) == [False]
    campaign.request_stop("the test is over")


def test_a_lasting_outage_is_shown_and_ctrl_c_still_ends_the_call(workspace: Workspace) -> None:
    plan = small_plan("data", grace_s=0.2)
    begun(workspace, plan, str(ProcessId.of()))
    cluster = Cluster(**RUNS)
    asked: list[AttemptRef] = []
    cluster.stop = lambda attempt: not asked.append(attempt.ref)
    campaign = campaign_of(workspace, plan, cluster)
    campaign.start()
    with unlistable("attempts", 10**9):
        until(lambda: campaign.views()["data"].state == "paused")
        assert "Stale file handle" in campaign.views()["data"].message
        campaign.request_stop("Ctrl-C")
        view = campaign.join()["data"]
    assert asked, "the job that is known is asked to save and end all the same"
    assert (view.state, view.exit_code) == ("interrupted", 6)
    assert "Stale file handle" in view.message
    said = workspace.read_orchestrator(campaign.source.shown[0].run.run)
    assert (said["state"], said["exit_code"]) == ("ended", 6)


def test_status_shows_an_outage(workspace: Workspace) -> None:
    plan = small_plan("data")
    begun(workspace, plan)
    campaign = campaign_of(workspace, plan, Cluster(**RUNS))
    take_up(workspace, campaign.source.shown[0].run.run)
    campaign.begin()
    watcher = RunWatcher(workspace, campaign.source.shown[0].run, ask=False)
    with unlistable("attempts", 10**9):
        campaign.step()
    status = watcher.observe()
    assert "Stale file handle" in status.outage
    assert any(status.outage in line for line in closing_lines(status, workspace))
    until(lambda: not campaign.step() and not watcher.observe().outage)


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_clock_steps_are_ignored(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """Neither a process, nor a heartbeat, nor a lease is judged by the time of day."""
    plan = small_plan("data", heartbeat_timeout_s=600.0, hung_after_s=600.0)
    local = Unwilling(workspace, OSError(), 0)
    campaign = campaign_of(workspace, plan, local)
    campaign.begin()
    campaign.step()
    campaign.step()
    assert campaign.views()["data"].job_id == "1"
    real, boot = time.time, psutil._pslinux.boot_time
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: boot() + step_s)
    for _ in range(3):
        campaign.step()
        other = campaign_of(workspace, plan, LocalDispatcher(workspace))
        other.begin()
        other.step()
    assert ended(workspace, plan.by_name["data"]) == [False]
    campaign.request_stop("the test is over")
    until(campaign.step)


def test_an_empty_mount_is_an_outage(workspace: Workspace) -> None:
    """A mount that has gone shows an empty folder: nothing is begun anew in it."""
    plan = small_plan("data")
    begun(workspace, plan)
    campaign = campaign_of(workspace, plan, Cluster(**RUNS))
    campaign.begin()
    stages = workspace.layout.stages
    stages.rename(stages.with_name("elsewhere"))
    campaign.step()
    assert campaign.views()["data"].state == "paused"
    assert not stages.exists()
    stages.with_name("elsewhere").rename(stages)
    until(lambda: not campaign.step() and campaign.views()["data"].state == "reattached")


def test_a_live_worker_is_not_lost_though_slurm_forgot_its_job(workspace: Workspace) -> None:
    """A controller that came back without its state: no second job is put beside the first."""
    plan, clock = small_plan("data", backoff_s=0.0), [0.0]
    stage = begun(workspace, plan)
    cluster = Cluster(liveness="dead", running=False, state="unknown to Slurm", lost=True)
    campaign = campaign_of(workspace, plan, cluster, clock=lambda: clock[0])
    heartbeat = workspace.layout.attempt(stage.id, 1).heartbeat
    campaign.begin()
    for beat in range(20):
        clock[0] += 60.0
        atomic.write_json(heartbeat, {"counter": beat})
        campaign.step()
        assert "unknown to Slurm" in campaign.views()["data"].message
    assert workspace.layout.stage(stage.id).attempt_numbers() == [1]
    for _ in range(4):  # it is silent from now on
        clock[0] += 60.0
        campaign.step()
    assert ended(workspace, stage)[0]


class Unwilling(LocalDispatcher):
    """Cannot start a process for a while."""

    def __init__(self, workspace: Workspace, error: Exception, times: int) -> None:
        super().__init__(workspace)
        self.error, self.left = error, times

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        if self.left:
            self.left -= 1
            return {r.ref: self.error for r in requests}
        for request in requests:
            paths = self.workspace.layout.attempt(*request.ref)
            process = subprocess.Popen(["sleep", "60"], start_new_session=True)
            job = {"job_id": "1", "process": str(ProcessId.of(process.pid))}
            atomic.write_json(paths.job, job)
        return {}
