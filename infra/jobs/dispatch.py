"""Dispatching of jobs: as processes of this machine, or through the dispatcher of a stage's job.

In: a recipe's ``dispatch`` section. Out: a :class:`Router`: this machine alone, or this machine for
the stages that the cluster's profile keeps here (CPU stages, stages that need the network) and
Slurm for the rest. An attempt records the executor that it was submitted by, so later observers ask
the right one.

Jobs of this machine are processes in sessions of their own: workers outlive the orchestrator, since
neither Ctrl-C in its terminal nor its end reaches them. Liveness is judged from processes. If the
orchestrator is killed before it has recorded a job, the next one gives the attempt up, and the
worker, which has to take the attempt first, finds that and exits. Jobs that only move bytes, or
evaluate while training continues, give way to the trainer (:mod:`infra.jobs.niceness`). Each sees
its own GPUs alone, which no other job of the machine has (:mod:`infra.host.gpus`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.host.gpus import ORDER_OF_GPUS, VISIBLE, GpuPool, gpus_here, too_many_gpus
from infra.host.processes import ProcessId, environment, start_apart
from infra.jobs import niceness
from infra.jobs.dispatcher import (
    AttemptRef,
    Dispatcher,
    JobRequest,
    JobStatus,
    Liveness,
    OpenAttempt,
    WorkerCommand,
    job_settings,
    tail_of,
)
from infra.jobs.failures import classify_silent_end
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.errors import LaunchError, RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.services import is_service


class LocalDispatcher:
    """Runs jobs as processes of this host; see :class:`~infra.jobs.dispatcher.Dispatcher`.

    ``gpus`` are held for jobs before they are submitted.
    """

    executor = "local"

    def __init__(
        self,
        workspace: Workspace,
        worker: WorkerCommand | None = None,
        gpus: GpuPool | None = None,
    ) -> None:
        self.workspace = workspace
        self.worker = worker or WorkerCommand(workspace.root)
        self.gpus = gpus or GpuPool()
        self._children: dict[AttemptRef, subprocess.Popen[bytes]] = {}
        self._codes: dict[AttemptRef, int] = {}

    # ------------------------------------------------------------ submitting

    def check(self, stage: PlannedStage) -> None:
        """Accept any stage: a lack of memory or disk shows when the job runs."""

    def check_gpus(self, stage: PlannedStage, services: Sequence[PlannedStage]) -> None:
        """Refuse a stage that needs more GPUs, with its services, than this machine has.

        Raises
        ------
        UnsupportedError
            Names both numbers.
        """
        if stage.resources.gpus and self.workspace.read_result(stage.id) is None:
            asked = {one.name: one.resources.gpus for one in (stage, *services)}
            if refusal := too_many_gpus(asked, len(gpus_here())):
                raise refusal

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        """Start each job; errors by attempt."""
        failed: dict[AttemptRef, Exception] = {}
        for request in requests:
            try:
                self._submit(request)
            except Exception as error:  # reported with this job, not with the others
                failed[request.ref] = error
        return failed

    def _submit(self, request: JobRequest) -> None:
        paths = self.workspace.layout.attempt(request.stage_id, request.attempt)
        command = self.worker.arguments(request)
        if request.nice:
            command = [self.worker.python, "-P", niceness.__file__, str(request.nice), *command]
        settings = job_settings(request.threads, request.code)
        try:
            visible = self._visible_gpus(request)
            leases = self.gpus.descriptors(request.stage_id)
            with paths.printed.open("ab") as printed:
                env = {**environment(), **settings, **visible}
                worker = start_apart(command, printed, env, pass_fds=leases)
        finally:  # the job has them now
            self.gpus.release(request.stage_id)
        self._children[request.ref] = worker
        note = {"job_id": str(worker.pid), "executor": "local", "comment": request.comment}
        atomic.write_json(paths.job, {**note, "process": str(ProcessId.of(worker.pid))})

    def _visible_gpus(self, request: JobRequest) -> dict[str, str]:
        """Settings that show a job its own GPUs alone.

        Raises
        ------
        LaunchError
            Other jobs have taken them.
        """
        count, stage_id = request.resources.gpus, request.stage_id
        names = self.gpus.names(stage_id)
        if len(names) != count and not self.gpus.share({stage_id: count}):
            raise LaunchError(
                f"{count} GPUs are needed, and of this machine's {len(gpus_here())} too few are "
                f"free: {self.gpus.available().users or 'there are no more'}",
                expected="as many as the stage's `resources.gpus`",
                fix="request fewer, or wait for the others",
            )
        visible = {VISIBLE: ",".join(self.gpus.names(stage_id))}
        counted = count and VISIBLE not in os.environ and ORDER_OF_GPUS not in os.environ
        return visible | ({ORDER_OF_GPUS: "PCI_BUS_ID"} if counted else {})

    # ------------------------------------------------------------ observing and stopping

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """``live`` while the worker runs on this host, ``dead`` when it is certain that it does
        not, else ``unknown`` (another host, or not submitted yet)."""
        statuses: dict[AttemptRef, Liveness] = {}
        for attempt in attempts:
            known = self._processes(attempt)
            gone = bool(known) and all(p.here and not p.alive for p in known)
            lives = any(p.alive for p in known)
            statuses[attempt.ref] = "live" if lives else "dead" if gone else "unknown"
        # Last, so that the exit code of every job seen dead is known.
        for ref, child in tuple(self._children.items()):
            if (code := child.poll()) is not None:
                self._codes[ref] = code
                del self._children[ref]
        return {a.ref: self._query(a, statuses[a.ref]) for a in attempts}

    def _query(self, attempt: OpenAttempt, status: Liveness) -> JobStatus:
        here = ProcessId.parse(attempt.attempt.owner).here
        if status != "dead":
            return JobStatus(status, local=here)
        code = max(0, self._codes.get(attempt.ref, 0))  # below 0: by a signal
        # What the worker printed last; earlier versions started it through submitit.
        paths = self.workspace.layout.attempt(*attempt.ref)
        printed = tail_of([paths.printed]) or tail_of(sorted(paths.submitit.glob("*_log.err")))
        return JobStatus(status, local=here, end=classify_silent_end(attempt.begun, printed, code))

    def stop(self, attempt: OpenAttempt) -> bool:
        """SIGTERM to the worker alone, so that it can save."""
        worker = self._worker(attempt)
        return worker is not None and worker.terminate()

    def kill(self, attempt: OpenAttempt) -> bool:
        """SIGKILL to the job's process group. True also for a job of another host, which cannot be
        reached from here: its fence protects the workspace."""
        for process in self._processes(attempt):
            if process.here:
                process.kill_group()
        return True

    def release(self, attempt: OpenAttempt) -> None:
        """Nothing holds a local job back."""

    def _processes(self, attempt: OpenAttempt) -> list[ProcessId]:
        found = (self._worker(attempt), self._process(attempt.ref, "job"))
        return [p for p in found if p is not None]

    def _worker(self, attempt: OpenAttempt) -> ProcessId | None:
        known = (attempt.started or {}).get("process")
        return ProcessId.parse(known) if known else self._process(attempt.ref, "started")

    def _process(self, ref: AttemptRef, name: str) -> ProcessId | None:
        path: Path = getattr(self.workspace.layout.attempt(*ref), name)
        process = (self.workspace.read_control(path) or {}).get("process")
        return None if process is None else ProcessId.parse(process)


_KINDS = ("fetch", "export", "publish", "card")


def gives_way(plan: Plan, stage: PlannedStage) -> bool:
    """Tell whether a stage's job gives way: it only moves bytes, or it evaluates a checkpoint that
    was exported during training."""
    if stage.kind in _KINDS:
        return True
    source = plan.by_name.get(stage.inputs.get("weights", ""))
    return stage.kind == "evaluate" and source is not None and source.kind == "export"


@dataclass
class Router:
    """Several dispatchers as one; see :class:`~infra.jobs.dispatcher.Dispatcher` for the methods.

    Parameters
    ----------
    dispatchers
        By executor name.
    executor_for
        The executor of the next attempt at a stage.
    missing
        Reason why a configured dispatcher is not available; empty if all are.
    gpus
        GPUs of this machine that this process holds for local jobs.
    """

    dispatchers: Mapping[str, Dispatcher]
    executor_for: Callable[[PlannedStage], str]
    missing: str = ""
    gpus: GpuPool = field(default_factory=GpuPool)

    def check(self, stages: Iterable[PlannedStage]) -> None:
        """Refuse stages that can never run on their executor; errors as in the dispatchers."""
        stages = list(stages)
        services = {name: s for s in stages if is_service(s.id) for name in (s.name, s.id)}
        for stage in stages:
            dispatcher = self.dispatchers[self.executor_for(stage)]
            dispatcher.check(stage)
            if isinstance(dispatcher, LocalDispatcher):
                used = [services[name] for name in stage.after if name in services]
                here = [s for s in used if self.executor_for(s) == dispatcher.executor]
                dispatcher.check_gpus(stage, here)

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """All attempts, with one query per dispatcher. Jobs of an executor that this call does not
        have are ``unknown``."""
        seen: dict[AttemptRef, JobStatus] = {}
        for executor in dict.fromkeys(a.attempt.executor for a in attempts):
            members = [a for a in attempts if a.attempt.executor == executor]
            reason = f"its state is visible only to calls with dispatch.executor={executor}"
            if self.missing:
                reason = f"its state is not visible from here: {self.missing}"
            if executor in self.dispatchers:
                seen |= self.dispatchers[executor].observe(members)
            else:
                seen |= {a.ref: JobStatus("unknown", reason=reason) for a in members}
        return seen

    def stop(self, attempt: OpenAttempt) -> bool:
        """Ask the worker to save and end; False if it could not be asked."""
        found = self.dispatchers.get(attempt.attempt.executor)
        return found is not None and found.stop(attempt)

    def kill(self, attempt: OpenAttempt) -> bool:
        """End the job and all it has started; False if the order did not get through."""
        found = self.dispatchers.get(attempt.attempt.executor)
        return found is None or found.kill(attempt)

    def release(self, attempt: OpenAttempt) -> None:
        """Let a held job start again."""
        if found := self.dispatchers.get(attempt.attempt.executor):
            found.release(attempt)


def make_router(config: DispatchConfig, workspace: Workspace, *, adopt: bool = True) -> Router:
    """The dispatchers that a recipe names. ``adopt=False``: read only.

    Raises
    ------
    UnsupportedError
        ``dispatch.executor=slurm`` on a machine without Slurm's commands.
    ConfigurationError
        The profile cannot be read.
    """
    gpus = GpuPool()
    local = LocalDispatcher(workspace, gpus=gpus)
    if config.executor == "local":
        return Router({"local": local}, lambda _: "local", gpus=gpus)
    from infra.slurm.dispatcher import SlurmDispatcher
    from infra.slurm.profiles import load_profile

    profile = load_profile(config.profile)
    slurm = SlurmDispatcher(
        workspace, profile, scheduler_poll_s=config.scheduler_poll_s, adopt=adopt
    )
    return Router({"local": local, "slurm": slurm}, profile.executor_for, gpus=gpus)


def read_only_router(config: DispatchConfig, workspace: Workspace) -> Router:
    """Like :func:`make_router`, for read-only callers (plan, status): never refuses. If Slurm does
    not answer, its jobs are ``unknown``."""
    try:
        return make_router(config, workspace, adopt=False)
    except RefinerError as error:
        local = LocalDispatcher(workspace)
        return Router({"local": local}, lambda _: config.executor, missing=str(error))
