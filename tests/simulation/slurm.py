"""A scheduler that does what Slurm does to jobs.

In: requests of dispatchers, weather. Out: processes on nodes, and what `squeue`, `sacct` and
`scontrol` would say of them. Jobs queue, run, are preempted with and without a goodbye, started
again under the same id, held, suspended, cancelled; nodes fail, and one may be bad for good; the
controller has outages, and a job that has ended is for a while in no list.
"""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.errors import LaunchError
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import FailureClass
from tests.simulation.weather import Weather
from tests.simulation.world import Process, World

if TYPE_CHECKING:
    from tests.simulation.invariants import Watch

NODES = ("n1", "n2", "n3")
_CLASSES: Mapping[str, FailureClass] = {
    "PREEMPTED": "preempted",
    "TIMEOUT": "time_limit",
    "NODE_FAIL": "node_failure",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
}


@dataclass
class SimJob:
    """One job, as the controller knows it."""

    id: str
    request: JobRequest
    state: str = "PENDING"
    reason: str = "Priority"
    node: str = ""
    held: bool = False
    restarts: int = 0
    process: Process | None = None
    exit_code: int | None = None
    ended_at: float | None = None
    trouble: str = ""  # what the worker is to run into at its next step
    warned: str = ""  # how it is about to end
    ends: list[str] = field(default_factory=list)  # of its earlier starts

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.ended_at is not None


class Cluster:
    """The controller, its nodes and its jobs."""

    def __init__(
        self, world: World, weather: Weather, ledger: Watch, work: Callable[[SimJob], int]
    ) -> None:
        self.world, self.weather, self.ledger, self._work = world, weather, ledger, work
        self.jobs: dict[str, SimJob] = {}  # by comment
        self.down = False
        self.bad = frozenset(NODES[: weather.bad_nodes])
        self._accepted: Counter[str] = Counter()
        if weather.outage_mean_s:
            self._plan_outage()

    # ------------------------------------------------------------ commands

    def accept(self, request: JobRequest) -> SimJob:
        """What `sbatch` does once the controller has it."""
        self._accepted[request.comment] += 1
        if self._accepted[request.comment] > 1:
            self.world.violated(f"{request.comment} was submitted twice")
        job = SimJob(str(1000 + len(self.jobs)), request)
        self.jobs[request.comment] = job
        self.world.tell(f"sbatch {job.id} for {request.stage_id} attempt {request.attempt}")
        self._queue(job, self.world.random.choice([1.0, 20.0, 400.0, 1500.0]))
        return job

    def cancel(self, job: SimJob) -> None:
        """What `scancel --signal=KILL` does."""
        if not job.over:
            self._end(job, "CANCELLED", requeue=False)

    def release(self, job: SimJob) -> None:
        """What `scontrol release` does."""
        if job.held:
            job.held = False
            self._queue(job, 20.0)

    def visible_end(self, job: SimJob) -> bool:
        """Whether the accounting knows how the job ended."""
        if job.ended_at is None:
            return False
        return self.world.now >= job.ended_at + self.weather.accounting_lag_s

    def clear_up(self) -> None:
        """The faults stop; outages end."""
        self.weather.clear_up()
        self.down = False

    def answer(self, command: Sequence[str]) -> str:
        """What `scontrol show job` or `sacct` prints for a job that asks about itself."""
        process = self.world.current
        if self.down or process is None or process.lost or not isinstance(process.job, SimJob):
            return ""
        job = process.job
        if command[0] == "sacct":
            return "".join(f"{state}\n" for state in job.ends)
        warned = {"PREEMPTED": "PreemptTime=now", "TIMEOUT": "TimeLimit=1:00:00 RunTime=0:59:50"}
        state = "CANCELLED" if job.warned == "CANCELLED" else job.state
        more = warned.get(job.warned, "PreemptTime=None")
        return f"JobId={job.id} JobState={state} Restarts={job.restarts} {more}\n"

    # ------------------------------------------------------------ the life of a job

    def _queue(self, job: SimJob, delay_s: float) -> None:
        job.state, restarts = "PENDING", job.restarts
        job.process, job.node = None, ""

        def start() -> None:
            if job.state == "PENDING" and not job.held and job.restarts == restarts:
                self._start(job)

        self.world.at(delay_s, start)

    def _start(self, job: SimJob) -> None:
        world = self.world
        free = [n for n in NODES if n not in job.request.avoid] or list(NODES)
        if self.down:
            self._queue(job, 60.0)
            return
        if world.chance(self.weather.held):
            job.held, job.reason = True, "launch failed requeued held"
            world.tell(f"job {job.id}: {job.reason}")
            self.ledger.setback(job.request.stage_id, "held")
            return
        job.state, job.reason, job.exit_code = "RUNNING", "", None
        job.warned = job.trouble = ""
        job.node = world.random.choice(free)
        name = f"job{job.id}.{job.restarts}"
        process = world.spawn(name, job.node, lambda: self._run(job))
        if world.chance(self.weather.worker_dies):
            process.dies_at = world.random.randint(1, 250)
        job.process, process.job = process, job
        process.at_end.append(lambda: self._process_ended(job, process))
        world.tell(f"job {job.id} starts on {job.node} (restart {job.restarts})")
        self._plan_fault(job)

    def _run(self, job: SimJob) -> None:
        process = self.world.current
        code = self._work(job)
        if job.process is process:
            job.exit_code = code

    def _process_ended(self, job: SimJob, process: Process) -> None:
        if job.process is not process or job.over or job.state == "PENDING":
            return
        if job.exit_code != 0:
            self.ledger.setback(job.request.stage_id, f"exit code {job.exit_code}")
        self._end(job, "COMPLETED" if job.exit_code == 0 else "FAILED", requeue=False)

    def _end(self, job: SimJob, state: str, requeue: bool) -> None:
        process, self_made = job.process, state in ("COMPLETED", "FAILED")
        if process is not None and not process.lost and not self_made:
            self.world.kill(process)
        self.world.tell(f"job {job.id}: {state}{', requeued' if requeue else ''}")
        if requeue:
            job.restarts += 1
            job.ends.append(state)
            job.reason = "BeginTime"
            self._queue(job, 120.0)
            return
        job.state, job.ended_at = state, self.world.now

    # ------------------------------------------------------------ faults

    def _plan_fault(self, job: SimJob) -> None:
        weather, world, restarts = self.weather, self.world, job.restarts
        if job.node in self.bad:
            delay_s, name = 200.0 * world.random.random(), "node fails"
        elif weather.faults:
            delay_s = world.random.expovariate(1 / weather.fault_mean_s)
            names, weights = list(weather.faults), list(weather.faults.values())
            name = world.random.choices(names, weights)[0]
        else:
            return

        def strike() -> None:
            bad = job.node in self.bad
            runs = job.restarts == restarts and job.state == "RUNNING" and not job.over
            # Who preempts, limits times and hears of scancel is the controller.
            heard = not self.down or name not in ("preempt", "time limit", "scancel")
            if runs and heard and (bad or not weather.clear):
                self._strike(job, name)

        world.at(delay_s, strike)

    def _strike(self, job: SimJob, name: str) -> None:
        world, process = self.world, job.process
        assert process is not None
        world.tell(f"job {job.id}: {name}")
        self.ledger.setback(job.request.stage_id, name)
        requeue = world.chance(self.weather.requeue)
        if name in ("preempt", "time limit", "scancel"):
            state = {"preempt": "PREEMPTED", "time limit": "TIMEOUT"}.get(name, "CANCELLED")
            if name == "scancel":
                self.ledger.scancelled(job.request.stage_id, job.request.attempt)
            self._warn(job, state, requeue and name == "preempt")
        elif name in ("preempt silently", "requeue overlaps"):
            if name == "requeue overlaps":
                self._abandon(process, 200.0)
            self._end(job, "PREEMPTED", requeue or name == "requeue overlaps")
        elif name == "node fails":
            if world.chance(0.5):
                self._abandon(process, 4000.0)
            self._end(job, "NODE_FAIL", requeue)
        elif name == "out of memory":
            self._end(job, "OUT_OF_MEMORY", requeue=False)
        elif name == "crash":
            world.kill(process)
        elif name == "hang":
            world.freeze(process, frozen=True)
        elif name == "suspend":
            self._suspend(job, process)
        else:
            job.trouble = name

    def _warn(self, job: SimJob, state: str, requeue: bool) -> None:
        """SIGTERM, and after a grace SIGKILL."""
        process, restarts = job.process, job.restarts
        # A process that is asked to end and does so ends as what it was asked for.
        job.warned = state
        process.at_end.insert(0, lambda: finish())
        process.tell(signal.SIGTERM)

        def finish() -> None:
            if job.restarts == restarts and job.state == "RUNNING" and not job.over:
                done = job.exit_code == 0
                self._end(job, "COMPLETED" if done else state, requeue and not done)

        self.world.at(self.world.random.choice([10.0, 60.0, 300.0]), finish)

    def _abandon(self, process: Process, for_s: float) -> None:
        """The process is out of sight, but continues for a while."""
        process.lost = True
        self.world.at(self.world.random.random() * for_s, lambda: self.world.kill(process))

    def _suspend(self, job: SimJob, process: Process) -> None:
        job.state = "SUSPENDED"
        self.world.freeze(process, frozen=True)

        def resume() -> None:
            if job.state == "SUSPENDED" and job.process is process:
                job.state = "RUNNING"
                self.world.freeze(process, frozen=False)

        self.world.at(self.world.random.random() * 3000.0, resume)

    def _plan_outage(self) -> None:
        mean_s = self.weather.outage_mean_s

        def begin() -> None:
            if self.weather.clear:
                return
            self.down = True
            self.world.tell("the controller is down")
            self.world.at(self.world.random.random() * self.weather.outage_s, end)

        def end() -> None:
            self.down = False
            self.world.tell("the controller answers again")
            if not self.weather.clear:
                self._plan_outage()

        self.world.at(self.world.random.expovariate(1 / mean_s), begin)


class SimSlurm:
    """One orchestrator's dispatcher; see :class:`~infra.jobs.dispatcher.Dispatcher` for the
    methods."""

    executor = "slurm"

    def __init__(self, cluster: Cluster, workspace: Workspace) -> None:
        self.cluster, self.workspace = cluster, workspace
        self._missed: dict[AttemptRef, float] = {}
        self._ended_by_us: set[str] = set()

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        """`sbatch` for each, and its id noted."""
        failed: dict[AttemptRef, Exception] = {}
        cluster, world = self.cluster, self.cluster.world
        for request in requests:
            world.point("sbatch")
            if cluster.down or world.chance(cluster.weather.sbatch_fails):
                cluster.ledger.setback(request.stage_id, "sbatch")
                if world.chance(cluster.weather.reply_lost):
                    # Nobody knows whether it was taken: it is looked for by its name.
                    if not cluster.down:
                        cluster.accept(request)
                    continue
                failed[request.ref] = LaunchError("sbatch refused")
                continue
            job = cluster.accept(request)
            world.point("after sbatch")
            try:
                self._note(request.ref, job, request.comment)
            except OSError as error:
                failed[request.ref] = error
        return failed

    def _note(self, ref: AttemptRef, job: SimJob, comment: str) -> None:
        path = self.workspace.layout.attempt(*ref).job
        atomic.write_json(path, {"job_id": job.id, "comment": comment})

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """What one query says of them all."""
        world = self.cluster.world
        world.point("squeue")
        if self.cluster.down:
            return {a.ref: JobStatus("unknown") for a in attempts}
        seen = {a.ref: self._query(a) for a in attempts}
        world.point("after squeue")  # what it said may be old by the time it is used
        return seen

    def _query(self, attempt: OpenAttempt) -> JobStatus:
        cluster, ref = self.cluster, attempt.ref
        job = cluster.jobs.get(attempt.attempt.comment)
        if job is None:  # not there yet, or never
            since = self._missed.setdefault(ref, cluster.world.now)
            patient = cluster.world.now - since <= cluster.weather.accounting_lag_s + 60.0
            return JobStatus("unknown") if patient else JobStatus("dead", running=False)
        if attempt.attempt.job_id is None:
            with contextlib.suppress(OSError):
                self._note(ref, job, attempt.attempt.comment)
        if not job.over:
            running = job.state == "RUNNING"
            return JobStatus("live", running, False, job.state, job.reason, job.held, node=job.node)
        if not cluster.visible_end(job):
            return JobStatus("unknown")
        failure = _CLASSES.get(job.state)
        end = None if failure is None else outcome_of(failure, f"Slurm: {job.state}")
        if job.id in self._ended_by_us and end is not None:
            end = outcome_of("killed", "refiner has ended the job")
        facts = {"state": job.state, "node": job.node}
        return JobStatus("dead", False, state=job.state, end=end, facts=facts, node=job.node)

    def stop(self, attempt: OpenAttempt) -> bool:
        """SIGTERM to the worker."""
        self.cluster.world.point("scancel --signal=TERM")
        job = self._job(attempt)
        if job is None or job.process is None or not job.process.alive:
            return False
        job.process.tell(signal.SIGTERM)
        return True

    def kill(self, attempt: OpenAttempt) -> bool:
        """The job is over, if the order gets through."""
        self.cluster.world.point("scancel")
        if job := self._job(attempt):
            self._ended_by_us.add(job.id)
            self.cluster.cancel(job)
            return True
        return self.cluster.jobs.get(attempt.attempt.comment) is None

    def check(self, stage: PlannedStage) -> None:
        """It takes everything."""

    def release(self, attempt: OpenAttempt) -> None:
        """A held job may start."""
        self.cluster.world.point("scontrol release")
        if job := self._job(attempt):
            self.cluster.release(job)

    def _job(self, attempt: OpenAttempt) -> SimJob | None:
        return None if self.cluster.down else self.cluster.jobs.get(attempt.attempt.comment)
