"""Leaves a run to a process in the background, or to a small job of its own.

In: a recorded call. Out: a :class:`Detached`: who works on it, and where its output goes. What runs
there is ``refiner resume RUN``: all that it needs stands in the workspace, so a job that Slurm
starts again simply goes on. It imports the run's snapshot of the code, so that a checkout may be
edited meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from infra.host.environment import environment
from infra.jobs.worker_command import job_settings, tail_of
from infra.store.orchestrators import orchestrator_of
from infra.store.snapshot import check_snapshot
from infra.store.workspace import Workspace

_POLL_S = 0.05
#: Imports on a cold network file system take their time.
_BEGIN_WAIT_S = 120.0


class Recorded(Protocol):
    """What is asked of a call here: a run's record, or a :class:`Call`."""

    @property
    def run(self) -> str:
        """Its id."""
        ...

    @property
    def code(self) -> str:
        """Id of the snapshot that it is worked on with."""
        ...


class Call(NamedTuple):
    """A call that is no run: work on a sweep (:func:`infra.store.layout.sweep_call`)."""

    run: str
    code: str


@dataclass(frozen=True)
class Detached:
    """Who works on a run now.

    ``exit_code`` is that of a process that has ended already; ``message`` is what it said.
    """

    run: str
    log: Path
    pid: int = 0
    job: str = ""
    exit_code: int | None = None
    message: str = ""

    @property
    def failed(self) -> bool:
        """Whether it ended before it had begun to work."""
        return bool(self.exit_code)


def resume_command(workspace: Workspace, run: Recorded, *options: str) -> list[str]:
    """The command line that works on a recorded run, with the code that it was begun with.

    Raises
    ------
    WorkspaceError
        That code is not what was pinned.
    """
    code = workspace.layout.code / run.code if run.code else None
    if code is not None and code.is_dir():
        check_snapshot(workspace, code)
    else:
        code = None  # whoever takes the run up sees whether it still has it
    settings = job_settings(1, code)
    del settings["OMP_NUM_THREADS"], settings["OMP_WAIT_POLICY"]  # jobs say it for themselves
    return [
        *("env", *(f"{k}={v}" for k, v in settings.items())),
        *(sys.executable, "-P", "-m", "flows.cli.main", "resume", run.run),
        *(f"workspace={workspace.root}", *options),
    ]


def detach(workspace: Workspace, run: Recorded, *options: str) -> Detached:
    """Start the process, and wait until it works on the run, or has ended.

    It has a session of its own and no terminal, so that closing one does not reach it.
    """
    log = workspace.layout.run(run.run).log
    before = orchestrator_of(workspace, run.run).turn
    with log.open("ab") as output:
        begins_at = output.tell()
        process = subprocess.Popen(
            resume_command(workspace, run, *options),
            env=_own_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline = time.monotonic() + _BEGIN_WAIT_S
    while time.monotonic() < deadline:
        code = process.poll()
        who = orchestrator_of(workspace, run.run)
        began = who.turn > before and workspace.layout.run(run.run).orchestrator.exists()
        if code is not None:
            said = "" if began else _said(log, begins_at)
            return Detached(run.run, log, process.pid, exit_code=code, message=said)
        if began:
            return Detached(run.run, log, process.pid)
        time.sleep(_POLL_S)
    return Detached(run.run, log, process.pid, message="it has not begun yet; see its log")


def _own_environment() -> dict[str, str]:
    """Less what is about a flow run that starts the process: it is no part of that."""
    return {k: v for k, v in environment().items() if not k.startswith("PREFECT__")}


def detach_as_job(
    workspace: Workspace, run: Recorded, config: dict[str, Any], *options: str
) -> Detached:
    """Submit the process as a small job that Slurm may start again.

    Raises
    ------
    UnsupportedError
        There is no Slurm here.
    LaunchError
        Slurm refused it.
    """
    from infra.slurm.orchestrator import submit_orchestrator
    from infra.slurm.profiles import load_profile

    paths = workspace.layout.run(run.run)
    profile = load_profile(config.get("profile"))
    command = resume_command(workspace, run, "--as-job", *options)
    job = submit_orchestrator(
        command, profile, paths.job_folder, name=f"refiner-{run.run.replace(':', '-')}"
    )
    return Detached(run.run, paths.job_folder / f"{job}_0_log.out", job=job)


def _said(log: Path, begins_at: int) -> str:
    """What the process printed, less what an earlier one had."""
    new = log.stat().st_size - begins_at
    return tail_of([log], min(new, 4000)).strip() if new > 0 else ""
