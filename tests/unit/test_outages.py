"""A file system or a scheduler that does not answer: the run waits, reports it once, continues."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.cli.status import closing_lines
from flows.running.status import RunWatcher
from infra.host.processes import ProcessId
from infra.jobs.dispatch import LocalDispatcher
from infra.jobs.dispatcher import AttemptRef, JobRequest
from infra.store import atomic
from infra.store.orchestrators import take_up
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.errors import SystemOutage
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from tests.support.command import wait_until
from tests.support.plans import OWNER, small_plan
from tests.support.quota import small_tmpfs
from tests.unit.test_campaign_rounds import Cluster, campaign_of, events

NUMBERS = (errno.ESTALE, errno.ENOENT, errno.EAGAIN)
RUNS = {"liveness": "live", "running": True, "state": "RUNNING"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "w")


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
    status = watcher.look()
    assert "Stale file handle" in status.outage
    assert any(status.outage in line for line in closing_lines(status, workspace))
    until(lambda: not campaign.step() and not watcher.look().outage)


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


@pytest.mark.slow
def test_read_only_files_end_nothing(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fail-over: nothing can be claimed, submitted, noted or closed."""
    plan = small_plan("data", backoff_s=0.0, poll_s=0.01)
    real, left = os.open, [8]
    local = Unwilling(workspace, OSError(), 0)

    def read_only(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT and left[0]:
            left[0] -= 1
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *args, **more)

    campaign = campaign_of(workspace, plan, local)
    campaign.start()
    monkeypatch.setattr(os, "open", read_only)
    until(lambda: not left[0] and campaign.views()["data"].job_id == "1", campaign.views())
    monkeypatch.undo()
    campaign.request_stop("the test is over")
    assert campaign.join()["data"].state == "interrupted"


@pytest.mark.quota
def test_a_lack_of_inodes_is_named(tmp_path: Path) -> None:
    plan = small_plan("data")
    with small_tmpfs(tmp_path / "t", mib=64, inodes=40) as folder:
        campaign = campaign_of(Workspace.open(folder / "w"), plan, Cluster(**RUNS))
        campaign.begin()
        with suppress(OSError):
            for number in range(40):
                (folder / str(number)).touch()
        campaign.step()
        campaign.step()
        view = campaign.views()["data"]
        assert view.state == "paused"
        assert "inode" in view.message
        assert "MiB are needed" not in view.message


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        SystemOutage("`sbatch` found no controller"),
    ],
)
def test_jobs_are_submitted_again_until_they_can_be(workspace: Workspace, error: Exception) -> None:
    """More often than any other class of failure may come, and with the reason."""
    plan = small_plan("data", backoff_s=0.0)
    local = Unwilling(workspace, error, 12)
    campaign = campaign_of(workspace, plan, local)
    campaign.start()
    until(lambda: not local.left and campaign.views()["data"].job_id == "1", campaign.views())
    record = workspace.read_record(plan.by_name["data"].id)
    ended = [a.outcome for a in record.attempts if a.outcome is not None]
    assert {o.failure for o in ended} == {"system_outage"}
    assert len(ended) == 12
    assert all(str(error) in o.message for o in ended)
    campaign.request_stop("the test is over")
    assert campaign.join()["data"].state == "interrupted"


def test_between_two_tries_a_stage_is_paused_with_the_reason(workspace: Workspace) -> None:
    error = SystemOutage("Unable to contact slurm controller")
    plan = small_plan("data", backoff_s=60.0)
    campaign = campaign_of(workspace, plan, Unwilling(workspace, error, 1))
    campaign.begin()
    campaign.step()
    campaign.step()
    view = campaign.views()["data"]
    assert view.state == "paused"
    assert "Unable to contact slurm controller" in view.message
