"""Processes in the background: one that works on a call, one that shows it in Prefect.

In: a recorded call. Out: a :class:`Detached`: who works on it (a process, or a small job of its
own), and where its output goes. What runs there is ``refiner resume RUN``: all that it needs stands
in the workspace, so a job that Slurm starts again simply goes on. It imports the run's snapshot of
the code, so that a checkout may be edited meanwhile. And :mod:`flows.attach` in a session of its
own, which follows the records by itself; the orchestrator neither waits for it nor ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from infra.host.processes import environment
from infra.jobs.protocol import job_settings, tail_of
from infra.prefect_server.server import passed_on, server_status, state_dir, terminal_link
from infra.store.orchestrators import orchestrator_of, require_idle
from infra.store.provenance import check_snapshot
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import RunRecord

Where = Literal["process", "job"]

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


def detach_run(
    run: RunRecord,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    where: Where = "process",
    use_server: bool = True,
    take_over: bool = False,
) -> Detached:
    """Leave a recorded run to the background, and come back as soon as it is worked on.

    Parameters
    ----------
    run
        What :func:`flows.api.begin_run` has recorded, or a run of the workspace.
    workspace
        The folder that it is recorded in.
    where
        A process on this machine, or a small Slurm job that may be started again.
    use_server
        As of :func:`flows.api.run_recipe`.
    take_over
        As of :func:`flows.api.resume_run`.

    Returns
    -------
    Detached
        Process or job, and its log; ``exit_code`` where it has ended already.

    Raises
    ------
    UnsupportedError
        There is no Slurm here to submit a job to.
    LaunchError
        Slurm refused the job.
    ConfigurationError
        Another process works on the run.
    """
    room = Workspace.open(workspace)
    dispatch = dict(run.config.get("dispatch") or {})
    return leave(room, run, where, dispatch, use_server=use_server, take_over=take_over)


def leave(
    room: Workspace,
    call: Recorded,
    where: Where,
    dispatch: Mapping[str, Any],
    *,
    use_server: bool,
    take_over: bool,
    past_canary: bool = False,
) -> Detached:
    """As :func:`detach_run`, of any call; ``dispatch`` says how jobs of it are submitted."""
    require_idle(room, call.run, regardless=take_over)
    options = ["--no-server"] * (not use_server) + ["--take-over"] * take_over
    options += ["--past-canary"] * past_canary
    if where == "job":
        return detach_as_job(room, call, dispatch, *options)
    return detach(room, call, *options)


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
            env=_detached_environment(),
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


def _detached_environment() -> dict[str, str]:
    """Less what is about a flow run that starts the process: it is no part of that."""
    return {k: v for k, v in environment().items() if not k.startswith("PREFECT__")}


def detach_as_job(
    workspace: Workspace, run: Recorded, config: Mapping[str, Any], *options: str
) -> Detached:
    """Submit the process as a small job that Slurm may start again.

    Raises
    ------
    UnsupportedError
        There is no Slurm here.
    LaunchError
        Slurm refused it.
    """
    from infra.slurm.profiles import load_profile
    from infra.slurm.submission import submit_orchestrator

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


_LOGS_KEPT = 20


class Says(Protocol):
    """What is asked of a console here."""

    def note(self, message: str) -> None:
        """Say something in between."""
        ...

    def warn(self, message: str) -> None:
        """Say something that is amiss, but stops nothing."""
        ...


def attach(workspace: Workspace, call: str, console: Says, stream: TextIO | None = None) -> None:
    """Let a process show the call, and say where. Does not wait.

    Parameters
    ----------
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    console
        Hears the link, or why there is none.
    stream
        Where it prints (default: standard error); the link holds the server's key on a terminal.
    """
    try:
        log = _log_of(call)
        read, write = os.pipe()
        with log.open("ab") as output:
            command = [sys.executable, "-P", "-m", "flows.attach"]
            subprocess.Popen(
                [*command, str(write), str(workspace.root), call],
                env=_attached_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write,),
                start_new_session=True,  # Ctrl-C in the terminal is for the orchestrator
            )
        os.close(write)
    except (OSError, RefinerError) as error:
        console.warn(f"The run is not shown in Prefect: {error}. Work goes on without it.")
        return
    listening = (read, log, console, stream or sys.stderr)
    threading.Thread(target=_listen, args=listening, daemon=True).start()


def _listen(read: int, log: Path, console: Says, stream: TextIO) -> None:
    with os.fdopen(read) as lines:
        for line in lines:
            message = json.loads(line)
            if gone := message.get("gone"):
                console.warn(f"{gone} Work goes on without it (see {log}).")
            elif info := server_status().info:
                path = f"/runs/flow-run/{message['flow_run']}"
                console.note(f"Prefect: {terminal_link(info, path, stream)}")


def _attached_environment() -> dict[str, str]:
    """Little of ours: the process needs no token."""
    root = str(Path(__file__).resolve().parents[2])
    env = passed_on(environment())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    return env | {"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore"}


def _log_of(call: str) -> Path:
    """Where its output goes; all but the newest such logs are deleted."""
    folder = state_dir() / "flow-runs"
    folder.mkdir(mode=0o700, exist_ok=True)
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[:-_LOGS_KEPT]:
        path.unlink(missing_ok=True)
    return folder / f"{call.replace(':', '-')}.log"
