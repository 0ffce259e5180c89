"""Jobs: submit one, see whether it lives, stop it. Through submitit, with nothing of ours pickled.

In: a claimed attempt and how to run it. Out: a job that outlives whoever submitted it. What a job
runs is an argument list (``env … python -P -m flows.worker … STAGE ATTEMPT``); settings travel in
it, secrets only in the environment that the job inherits. Liveness is judged from processes, never
from submitit's own state, which forgets and caches.

Local jobs are submitted by a short-lived launcher in a session of its own
(:mod:`infra.launch_local`), because submitit's local executor puts its controller into the caller's
process group: Ctrl-C in a terminal would reach it, and it kills the job one second later.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from infra.processes import ProcessId
from infra.reconcile import Sight
from infra.workspace import Workspace
from refiner_core.contract.config import DispatchConfig, Resources
from refiner_core.contract.errors import StageFailed, UnsupportedError

log = logging.getLogger(__name__)

#: What a job runs; arguments follow: ``--workspace ROOT STAGE_ID ATTEMPT``.
WORKER = ("-m", "flows.worker")
_LAUNCH_TIMEOUT_S = 120.0
_LOCAL_TIMEOUT_MIN = 60 * 24 * 365  # a machine without a scheduler has no time limit
_PRINTED_TAIL = 20_000


@dataclass(frozen=True)
class JobRequest:
    """What to run for one attempt.

    ``comment`` is the attempt's unique mark; ``code`` the folder that the job imports our packages
    from (none: those of this process); ``threads`` the compute threads of one process.
    """

    stage_id: str
    attempt: int
    comment: str
    resources: Resources
    code: Path | None = None
    threads: int = 1


class Dispatcher(Protocol):
    """Where jobs run. Implementers: submitit here, a simulated world in tests."""

    executor: str

    def submit(self, request: JobRequest) -> str:
        """Start a job and record its id beside the attempt; returns the id.

        Raises
        ------
        UnsupportedError
            This machine cannot run such jobs.
        """
        ...

    def observe(self, stage_id: str, attempt: int) -> Sight:
        """Whether the job, or its worker, lives."""
        ...

    def printed(self, stage_id: str, attempt: int) -> str:
        """The end of what the job printed outside the worker's own log."""
        ...

    def stop(self, stage_id: str, attempt: int) -> bool:
        """Ask the worker to save and end. False: there is nothing to ask yet, or any more."""
        ...

    def kill(self, stage_id: str, attempt: int) -> None:
        """End the job and all it has started, now."""
        ...


def make_dispatcher(config: DispatchConfig, workspace: Workspace) -> SubmititDispatcher:
    """The dispatcher that the recipe names.

    Raises
    ------
    UnsupportedError
        ``dispatch.executor=slurm``, which this version cannot follow yet.
    """
    return SubmititDispatcher(workspace, config.executor)


class SubmititDispatcher:
    """Jobs of this machine, through submitit's local executor."""

    def __init__(
        self,
        workspace: Workspace,
        executor: str = "local",
        worker: Sequence[str] = WORKER,
        python: str = sys.executable,
    ) -> None:
        if executor != "local":
            missing = "" if shutil.which("sbatch") else " and this machine has no `sbatch`"
            raise UnsupportedError(
                f"dispatch.executor is {executor!r}, which this version does not run{missing}",
                expected="dispatch.executor=local",
                fix="set dispatch.executor=local",
            )
        self.workspace, self.executor = workspace, executor
        self.worker, self.python = tuple(worker), python

    # ------------------------------------------------------------ submitting

    def submit(self, request: JobRequest) -> str:
        """Start the job; see :class:`Dispatcher`."""
        folder = self.workspace.layout.attempt(request.stage_id, request.attempt).submitit
        folder.mkdir(parents=True, exist_ok=True)
        return self._submit_local(request, self.command(request), folder)

    def command(self, request: JobRequest) -> list[str]:
        """The job's argument list."""
        settings = job_settings(request.threads, request.code)
        return [
            *("env", *(f"{k}={v}" for k, v in settings.items())),
            *(self.python, "-P", *self.worker),
            *("--workspace", str(self.workspace.root), request.stage_id, str(request.attempt)),
        ]

    def _submit_local(self, request: JobRequest, command: list[str], folder: Path) -> str:
        order = {
            "command": command,
            "folder": str(folder),
            "job_file": str(self.workspace.layout.attempt(request.stage_id, request.attempt).job),
            "comment": request.comment,
            "parameters": {
                "timeout_min": _LOCAL_TIMEOUT_MIN,
                "gpus_per_node": request.resources.gpus,
                **_visible_gpus(),
            },
        }
        output = folder / "launcher.log"
        with output.open("ab") as printed:
            done = subprocess.run(
                [self.python, "-P", "-m", "infra.launch_local", json.dumps(order)],
                env={**os.environ, **job_settings(request.threads, request.code)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                timeout=_LAUNCH_TIMEOUT_S,
                check=False,
            )
        job = self.workspace.read_control(Path(str(order["job_file"])))
        if job is None:
            raise StageFailed(
                f"The job of {request.stage_id} could not be submitted (exit code "
                f"{done.returncode}): {_tail(output).strip()[-600:]}",
                fix=f"look at {output}",
            )
        return str(job["job_id"])

    # ------------------------------------------------------------ looking and stopping

    def observe(self, stage_id: str, attempt: int) -> Sight:
        """``live`` while the job's controller or the worker runs on this host, ``dead`` when it is
        certain that neither does, else ``unknown`` (another host, or not submitted yet)."""
        known = self._processes(stage_id, attempt)
        if any(p.alive for p in known):
            return "live"
        return "dead" if known and all(p.here for p in known) else "unknown"

    def printed(self, stage_id: str, attempt: int) -> str:
        """The end of submitit's error log and of the launcher's."""
        folder = self.workspace.layout.attempt(stage_id, attempt).submitit
        files = sorted(folder.glob("*_log.err")) or sorted(folder.glob("launcher.log"))
        return "\n".join(_tail(f) for f in files)

    def stop(self, stage_id: str, attempt: int) -> bool:
        """SIGTERM to the worker alone: submitit's processes would swallow or kill, not save."""
        worker = self._process(stage_id, attempt, "started")
        return worker is not None and worker.terminate()

    def kill(self, stage_id: str, attempt: int) -> None:
        """SIGKILL to the job's process group."""
        for process in self._processes(stage_id, attempt):
            if process.here:
                process.kill_group()

    def _processes(self, stage_id: str, attempt: int) -> list[ProcessId]:
        found = (self._process(stage_id, attempt, name) for name in ("started", "job"))
        return [p for p in found if p is not None]

    def _process(self, stage_id: str, attempt: int, name: str) -> ProcessId | None:
        path = getattr(self.workspace.layout.attempt(stage_id, attempt), name)
        process = (self.workspace.read_control(path) or {}).get("process")
        return None if process is None else ProcessId.parse(process)


def job_settings(threads: int, code: Path | None) -> dict[str, str]:
    """Settings of a job's environment. No secrets: they are visible in its command."""
    settings = {
        # A user's own `infra` folder in the working directory must not shadow ours.
        "PYTHONSAFEPATH": "1",
        # Part of what is computed (`model.cpu_threads`), so the caller's own setting is overruled.
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # Bars that redraw themselves are rubble in a log.
        "TQDM_DISABLE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    path = os.environ.get("PYTHONPATH", "")
    if code is not None:
        settings["PYTHONPATH"] = os.pathsep.join(p for p in (str(code), path) if p)
    elif not path:
        settings["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    return settings


def _visible_gpus() -> Mapping[str, Any]:
    """Keep to the GPUs that the caller may use; submitit counts from 0 otherwise."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = given.split(",") if given else []
    if numbers and all(n.strip().isdigit() for n in numbers):
        return {"visible_gpus": [int(n) for n in numbers]}
    return {}


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _PRINTED_TAIL))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
