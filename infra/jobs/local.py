"""Jobs of this machine, through submitit's local executor.

In: requests, open attempts. Out: processes that outlive the orchestrator. Liveness is judged from
processes, never from submitit's own state, which forgets and caches.

Jobs are submitted by a short-lived launcher in a session of its own (:mod:`infra.launch_local`),
because submitit's local executor puts its controller into the caller's process group: Ctrl-C in a
terminal would reach it, and it kills the job one second later.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.host.environment import environment
from infra.host.processes import ProcessId
from infra.jobs.failures import classify_silent_end
from infra.jobs.protocol import AttemptRef, JobRequest, JobSight, OpenAttempt, Sight
from infra.jobs.worker_command import WorkerCommand, job_settings, tail_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import StageFailed
from refiner_core.contract.plan import PlannedStage

_LAUNCH_TIMEOUT_S = 120.0
_TIMEOUT_MIN = 60 * 24 * 365  # a machine without a scheduler has no time limit


class LocalDispatcher:
    """Runs jobs as processes of this host; see :class:`~infra.jobs.protocol.Dispatcher`."""

    executor = "local"

    def __init__(self, workspace: Workspace, worker: WorkerCommand | None = None) -> None:
        self.workspace = workspace
        self.worker = worker or WorkerCommand(workspace.root)

    # ------------------------------------------------------------ submitting

    def check(self, stage: PlannedStage) -> None:
        """This machine is asked for what it has when the job runs."""

    def submit(self, requests: Sequence[JobRequest]) -> dict[AttemptRef, Exception]:
        """Start each job; what went wrong, by attempt."""
        failed: dict[AttemptRef, Exception] = {}
        for request in requests:
            try:
                self._submit(request)
            except Exception as error:  # one job's trouble is told with it, not with the others
                failed[request.ref] = error
        return failed

    def _submit(self, request: JobRequest) -> None:
        paths = self.workspace.layout.attempt(request.stage_id, request.attempt)
        paths.submitit.mkdir(exist_ok=True)
        order = {
            "command": self.worker.arguments(request),
            "folder": str(paths.submitit),
            "job_file": str(paths.job),
            "comment": request.comment,
            "nice": request.nice,
            "parameters": {
                "timeout_min": _TIMEOUT_MIN,
                "gpus_per_node": request.resources.gpus,
                **_visible_gpus(),
            },
        }
        output = paths.submitit / "launcher.log"
        with output.open("ab") as printed:
            done = subprocess.run(
                [self.worker.python, "-P", "-m", "infra.launch_local", json.dumps(order)],
                env={**environment(), **job_settings(request.threads, request.code)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                timeout=_LAUNCH_TIMEOUT_S,
                check=False,
            )
        if self.workspace.read_control(paths.job) is None:
            raise StageFailed(
                f"The job of {request.stage_id} could not be submitted (exit code "
                f"{done.returncode}): {tail_of([output]).strip()[-600:]}",
                expected="an exit code of 0 and a job",
                fix=f"see {output} for the whole message, mend what it names, and run the same "
                "command again",
            )

    # ------------------------------------------------------------ looking and stopping

    def look(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobSight]:
        """``live`` while the job's controller or the worker runs on this host, ``dead`` when it is
        certain that neither does, else ``unknown`` (another host, or not submitted yet)."""
        return {a.ref: self._look_at(a) for a in attempts}

    def _look_at(self, attempt: OpenAttempt) -> JobSight:
        sight = self._sight(attempt)
        here = ProcessId.parse(attempt.attempt.owner).here
        if sight != "dead":
            return JobSight(sight, local=here)
        started = attempt.started is not None and not attempt.started.get("void")
        end = classify_silent_end(started, self._printed(attempt.ref))
        return JobSight(sight, local=here, end=end)

    def _sight(self, attempt: OpenAttempt) -> Sight:
        known = self._processes(attempt)
        if any(p.alive for p in known):
            return "live"
        return "dead" if known and all(p.here for p in known) else "unknown"

    def _printed(self, ref: AttemptRef) -> str:
        """The end of submitit's error log, or of the launcher's."""
        folder = self.workspace.layout.attempt(*ref).submitit
        return tail_of(sorted(folder.glob("*_log.err")) or sorted(folder.glob("launcher.log")))

    def stop(self, attempt: OpenAttempt) -> bool:
        """SIGTERM to the worker alone: submitit's processes would swallow or kill, not save."""
        worker = self._worker(attempt)
        return worker is not None and worker.terminate()

    def kill(self, attempt: OpenAttempt) -> bool:
        """SIGKILL to the job's process group. True also for one of another host, which nobody here
        can reach: its fence must do."""
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


def _visible_gpus() -> Mapping[str, Any]:
    """Keep to the GPUs that the caller may use; submitit counts from 0 otherwise."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = given.split(",") if given else []
    if numbers and all(n.strip().isdigit() for n in numbers):
        return {"visible_gpus": [int(n) for n in numbers]}
    return {}
