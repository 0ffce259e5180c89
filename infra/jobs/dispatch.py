"""Dispatching of jobs: as processes of this machine, or through the dispatcher of a stage's job.

In: a recipe's ``dispatch`` section. Out: a :class:`Router`: this machine alone, or this machine for
the stages that the cluster's profile keeps here (CPU stages, stages that need the network) and
Slurm for the rest. An attempt records the executor that it was submitted by, so later observers ask
the right one.

Jobs of this machine are processes in sessions of their own: workers outlive the orchestrator, since
neither Ctrl-C in its terminal nor its end reaches them. Liveness is judged from processes. If the
orchestrator is killed before it has recorded a job, the next one gives the attempt up, and the
worker, which has to take the attempt first, finds that and exits. Jobs that only move bytes, or
evaluate while training continues, give way to the trainer (:mod:`infra.jobs.niceness`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from refiner_core.contract.errors import RefinerError, StageFailed
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage


class LocalDispatcher:
    """Runs jobs as processes of this host; see :class:`~infra.jobs.dispatcher.Dispatcher`."""

    executor = "local"

    def __init__(self, workspace: Workspace, worker: WorkerCommand | None = None) -> None:
        self.workspace = workspace
        self.worker = worker or WorkerCommand(workspace.root)
        self._children: dict[AttemptRef, subprocess.Popen[bytes]] = {}
        self._codes: dict[AttemptRef, int] = {}

    # ------------------------------------------------------------ submitting

    def check(self, stage: PlannedStage) -> None:
        """Accept any stage: a lack of resources shows when the job runs."""

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
        visible = {"CUDA_VISIBLE_DEVICES": _visible_gpus(request.resources.gpus)}
        with paths.printed.open("ab") as printed:
            worker = start_apart(command, printed, {**environment(), **settings, **visible})
        self._children[request.ref] = worker
        note = {"job_id": str(worker.pid), "executor": "local", "comment": request.comment}
        atomic.write_json(paths.job, {**note, "process": str(ProcessId.of(worker.pid))})

    # ------------------------------------------------------------ observing and stopping

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
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


def _visible_gpus(count: int) -> str:
    """The first of the GPUs that the caller may use.

    Raises
    ------
    StageFailed
        There are fewer.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",")] if given else list(map(str, range(count)))
    if len(names) < count:
        raise StageFailed(
            f"{count} GPUs are requested, but CUDA_VISIBLE_DEVICES names {len(names)}",
            expected="as many as the stage's `resources.gpus`",
            fix="request fewer, or give this process more",
        )
    return ",".join(names[:count])


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
    """

    dispatchers: Mapping[str, Dispatcher]
    executor_for: Callable[[PlannedStage], str]
    missing: str = ""

    def check(self, stages: Iterable[PlannedStage]) -> None:
        """Refuse stages that can never run on their executor; errors as in the dispatchers."""
        for stage in stages:
            self.dispatchers[self.executor_for(stage)].check(stage)

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        """All attempts, with one query per dispatcher. Jobs of an executor that this call does not
        have are ``unknown``."""
        seen: dict[AttemptRef, JobStatus] = {}
        for executor in dict.fromkeys(a.attempt.executor for a in attempts):
            members = [a for a in attempts if a.attempt.executor == executor]
            reason = f"its state is visible only to calls with dispatch.executor={executor}"
            if self.missing:
                reason = f"its state is not visible from here: {self.missing}"
            if executor in self.dispatchers:
                seen |= self.dispatchers[executor].look(members)
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
    local = LocalDispatcher(workspace)
    if config.executor == "local":
        return Router({"local": local}, lambda _: "local")
    from infra.slurm.dispatcher import SlurmDispatcher
    from infra.slurm.profiles import load_profile

    profile = load_profile(config.profile)
    slurm = SlurmDispatcher(
        workspace, profile, scheduler_poll_s=config.scheduler_poll_s, adopt=adopt
    )
    return Router({"local": local, "slurm": slurm}, profile.executor_for)


def read_only_router(config: DispatchConfig, workspace: Workspace) -> Router:
    """Like :func:`make_router`, for read-only callers (plan, status): never refuses. If Slurm does
    not answer, its jobs are ``unknown``."""
    try:
        return make_router(config, workspace, adopt=False)
    except RefinerError as error:
        local = LocalDispatcher(workspace)
        return Router({"local": local}, lambda _: config.executor, missing=str(error))
