"""Each read of an orchestrator fails: no run ends, no job is submitted twice, nothing is recorded.

The rounds of a campaign, the loop of a sweep, and watchers. What fails once has no effect; what
fails for a while pauses the run with the reason, and then it continues.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.running.following import Follower
from infra.disk.manager import DiskEvent, DiskManager, DiskWatch
from infra.host import files as reading
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.orchestrator.orchestrator import Orchestrator
from infra.store import atomic
from infra.store.orchestrators import Lease, LeaseWatch, attempt_holder
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig
from refiner_core.contract.records import StageResult
from tests.support.command import wait_until
from tests.support.faulty_disk import FaultyDisk
from tests.support.faulty_reads import FaultyReads, Lasting
from tests.support.plans import OWNER, claim, small_plan
from tests.support.sweeping import TRAINED, Jobs, bench, small_sweep
from tests.support.thorough import share
from tests.unit.test_campaign_rounds import Cluster, campaign_of, events

UNANSWERED = ("ESTALE", "EIO", "EACCES", "EAGAIN")
ERRORS = ("ENOENT", *UNANSWERED)
PLAN = small_plan("data", "sft", poll_s=0.001, backoff_s=0.001)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0, 0.0))
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Prompt(Cluster):
    """A cluster whose jobs are done as soon as they are submitted, and whose own reads are sound:
    they are other processes'."""

    def __init__(self, workspace: Workspace, reads: FaultyReads) -> None:
        super().__init__(liveness="dead")
        self.workspace, self.reads = workspace, reads
        self.submitted: list[AttemptRef] = []

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        with self.reads.sound():
            for request in requests:
                self.submitted.append(request.ref)
                paths = self.workspace.layout.attempt(*request.ref)
                atomic.write_json(paths.job, {"job_id": str(len(self.submitted))})
                note = {"process": OWNER, "started_at": "2026-11-21T00:00:00+00:00"}
                self.workspace.start_attempt(*request.ref, note)
                made = StageResult(1, request.attempt, "output", (), {}, {}, 1.0, "then")
                self.workspace.publish_result(request.stage_id, made)
                self.workspace.close_attempt(*request.ref, outcome_of("none"), 1.0)
        return {}


def to_its_end(step: Callable[[], bool], reads: FaultyReads, met: Callable[[], bool]) -> None:
    """Make rounds; nothing fails any more once an outage was ``met``, or a while later."""
    rounds, deadline = 0, time.monotonic() + 120  # an outage pauses for half a minute at most
    while not step():
        rounds += 1
        if met() or rounds > 40:
            reads.fix()
        time.sleep(0.001)
        assert time.monotonic() < deadline, "it never ended"


# ---------------------------------------------------------------- campaigns


def rounds(
    folder: Path, at: int = 0, name: str = "ESTALE", lasting: Lasting = "once"
) -> tuple[Orchestrator, Prompt]:
    """A whole campaign of two stages in which read ``at`` fails."""
    workspace = Workspace.open(folder / "ws")
    reads = FaultyReads(folder, at, getattr(errno, name), lasting)
    cluster = Prompt(workspace, reads)
    campaign = campaign_of(workspace, PLAN, cluster)
    with FaultyDisk(folder).mounted(), reads.mounted():
        try:
            campaign.begin()
        except OSError:  # what cannot even be recorded is refused, and asked for again
            assert lasting == "from then on"
            reads.fix()
            campaign.begin()
        to_its_end(campaign.step, reads, lambda: any(m.outage.reason for m in campaign.members))
    return campaign, cluster


def check_campaign(campaign: Orchestrator, cluster: Prompt, *, undisturbed: bool) -> None:
    """All done, and each job submitted once."""
    assert {n: v.state for n, v in campaign.views().items()} == {"data": "done", "sft": "done"}
    assert [ref.stage_id for ref in cluster.submitted] == [s.id for s in PLAN.stages]
    for stage in PLAN.stages:
        record = campaign.workspace.read_record(stage.id)
        ends = [a.outcome.failure for a in record.attempts if a.outcome is not None]
        assert ends[-1] == "none"
        assert set(ends[:-1]) <= {"system_outage"}, "a claim that could not be submitted"
        assert not undisturbed or len(ends) == 1
    if undisturbed:
        assert events(campaign, "outage") == []


@pytest.fixture(scope="module")
def reads_of_rounds(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many reads a campaign makes."""
    campaign, cluster = rounds(tmp_path_factory.mktemp("sound"))
    check_campaign(campaign, cluster, undisturbed=True)
    count = len(cluster.reads.operations)
    assert count > 60
    return count


def disturbed(tmp_path: Path, at: int, name: str, lasting: Lasting) -> str:
    """What was wrong with the campaign in which this read failed; empty: nothing."""
    operation = ""
    try:
        campaign, cluster = rounds(tmp_path / name / lasting / str(at), at, name, lasting)
        operation = (cluster.reads.operations + [""] * at)[at - 1]
        check_campaign(campaign, cluster, undisturbed=lasting == "once")
    except Exception as error:
        return f"{name} at {at} {operation} {lasting}: {error!r}"[:400]
    return ""


@pytest.mark.slow
def test_every_read_of_a_campaign_may_fail_once(tmp_path: Path, reads_of_rounds: int) -> None:
    found = [
        disturbed(tmp_path, at, name or UNANSWERED[at % 4], "once")
        for part, name in enumerate(("ENOENT", ""))
        for at in share(reads_of_rounds, 3, part)
    ]
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.slow
def test_a_campaign_waits_while_nothing_can_be_read(tmp_path: Path, reads_of_rounds: int) -> None:
    every = share(reads_of_rounds, 4)
    found = [disturbed(tmp_path, at, ERRORS[at % 5], "from then on") for at in every]
    assert not any(found), "\n".join(filter(None, found))


# ---------------------------------------------------------------- sweeps


class SoundJobs(Jobs):
    """Jobs whose own reads are sound: they are other processes'."""

    reads: FaultyReads

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        with self.reads.sound():
            return super().submit(requests)

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        with self.reads.sound():
            return super().observe(attempts)


SWEEP = small_sweep("data", "sft", "grpo", seeds=(1,))


def swept(
    folder: Path, at: int = 0, name: str = "ESTALE", lasting: Lasting = "once"
) -> tuple[dict[str, str], SoundJobs]:
    """How the trials of a sweep end in which read ``at`` fails."""
    workspace = Workspace.open(folder / "ws")
    jobs = SoundJobs(workspace, SWEEP, {"grpo": TRAINED, "sft": TRAINED})
    jobs.reads = FaultyReads(folder, at, getattr(errno, name), lasting)
    told = bench(workspace, SWEEP, jobs=jobs)
    told.admission.canary = None
    with FaultyDisk(folder).mounted(), jobs.reads.mounted():
        told.orchestrator.begin()
        to_its_end(told.orchestrator.step, jobs.reads, lambda: False)
    return told.states(), jobs


def sweep_with(tmp_path: Path, at: int, name: str, lasting: Lasting) -> str:
    """What was wrong with the sweep in which this read failed; empty: nothing."""
    operation = ""
    try:
        states, jobs = swept(tmp_path / name / lasting / str(at), at, name, lasting)
        operation = (jobs.reads.operations + [""] * at)[at - 1]
        assert set(states.values()) == {"done"}, states
        assert len(jobs.begun) == len(set(jobs.begun)) == 4, jobs.begun
    except Exception as error:
        return f"{name} at {at} {operation} {lasting}: {error!r}"[:400]
    return ""


@pytest.mark.slow
def test_reads_of_a_sweep_may_fail_once_and_for_a_while(tmp_path: Path) -> None:
    states, jobs = swept(tmp_path / "sound")
    assert set(states.values()) == {"done"}
    every = range(1, len(jobs.reads.operations) + 1)
    chosen = sorted(random.Random(17).sample(every, 8))
    found = [sweep_with(tmp_path, at, ERRORS[at % 5], "once") for at in chosen]
    found += [sweep_with(tmp_path, at, "EIO", "from then on") for at in chosen[::2]]
    assert not any(found), "\n".join(filter(None, found))


# ---------------------------------------------------------------- those who only watch


def each_may_fail_once(folder: Path, watch: Callable[[], Any], expected: Any) -> None:
    """Whichever of its reads fails once, a watcher sees what there is."""
    reads = FaultyReads(folder)
    with reads.mounted():
        assert watch() == expected
    for name in ERRORS:
        for at in range(1, len(reads.operations) + 1):
            faulty = FaultyReads(folder, at, getattr(errno, name))
            with faulty.mounted():
                assert watch() == expected, f"{name} at {faulty.operations[at - 1]}"


def test_a_lease_is_not_void_because_it_could_not_be_read(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    plan = small_plan("data")
    holder = attempt_holder(claim(workspace, plan, "data").id, 1)
    Lease(workspace.layout.service("serve-1"), holder).renew()
    each_may_fail_once(tmp_path, LeaseWatch(workspace, "serve-1").observe, [holder])


def test_a_follower_gets_every_event_whichever_read_fails(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    log = workspace.layout.run("r").events
    log.parent.mkdir()
    log.write_text('{"event": "short"}\n{"event": "room"}\n')

    def observe() -> Any:
        follower = Follower(workspace, "r", {})
        follower.observe()
        return [event["event"] for event in follower.new_events()]

    each_may_fail_once(tmp_path, observe, ["short", "room"])


def test_the_watch_of_the_disk_survives_failing_reads(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path / "ws")
    config = DiskConfig(probe="statvfs", watch_s=0.001)
    reads = FaultyReads(tmp_path, 1, errno.EIO, "from then on", thread="disk watch")
    told: list[DiskEvent] = []
    needs = [0]
    with reads.mounted(), DiskWatch(DiskManager(workspace, config), lambda: needs[0], told.append):
        wait_until(lambda: len(reads.operations) > 20, "reads")
        reads.fix()
        needs[0] = 1 << 60
        wait_until(lambda: any(event.kind == "short" for event in told), "a shortage")
