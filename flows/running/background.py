"""Background processes: one that works on a call, one that shows it in Prefect.

In: a recorded call. Out: a :class:`BackgroundProcess`: the process or small Slurm job that works on
it, and its log. It runs ``refiner resume RUN`` with the run's snapshot of the code: the workspace
has all that it needs, so a restarted Slurm job continues, and the checkout may be edited meanwhile.
:mod:`flows.attach` follows the records in a session of its own; the orchestrator neither waits for
it nor ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from flows.running.console import Console
from flows.running.foreground import LaunchOptions
from infra.host.processes import environment, start_apart
from infra.jobs.dispatcher import job_settings, tail_of
from infra.prefect_server import passed_on, server_status, state_dir, terminal_link
from infra.store.orchestrators import orchestrator_of, require_idle
from infra.store.provenance import check_snapshot
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import RunRecord

Where = Literal["process", "job"]

_POLL_S = 0.05
#: Imports on a cold network file system are slow.
_BEGIN_WAIT_S = 120.0


@dataclass(frozen=True)
class BackgroundProcess:
    """Process or job that works on a run now.

    ``exit_code`` is set if the process has already ended; ``message`` is its output.
    """

    run: str
    log: Path
    pid: int = 0
    job: str = ""
    exit_code: int | None = None
    message: str = ""

    @property
    def failed(self) -> bool:
        """True if it ended before it began to work."""
        return bool(self.exit_code)


def detach_run(
    run: RunRecord,
    workspace: str | Path = RecipeConfig.workspace,
    *,
    where: Where = "process",
    use_server: bool = True,
    take_over: bool = False,
) -> BackgroundProcess:
    """Continue a recorded run in the background; return once it is being worked on.

    Parameters
    ----------
    run
        From :func:`flows.api.begin_run`, or a run of the workspace.
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
    BackgroundProcess
        Process or job, and its log; ``exit_code`` if it has already ended.

    Raises
    ------
    UnsupportedError
        There is no Slurm here to submit a job to.
    LaunchError
        Slurm refused the job.
    ConfigurationError
        Another process is working on the run.
    """
    ws = Workspace.open(workspace)
    profile = (run.config.get("dispatch") or {}).get("profile")
    return leave(
        ws, run.run, run.code, where, profile, LaunchOptions(use_server, take_over=take_over)
    )


def leave(
    ws: Workspace, call: str, code: str, where: Where, profile: str | None, launch: LaunchOptions
) -> BackgroundProcess:
    """As :func:`detach_run`, for any call: its id, the id of its code snapshot, and the profile for
    a Slurm job."""
    require_idle(ws, call, regardless=launch.take_over)
    options = ["--no-server"] * (not launch.use_server) + ["--take-over"] * launch.take_over
    options += ["--past-canary"] * launch.past_canary
    if where == "process":
        return detach(ws, call, code, *options)
    from infra.slurm.profiles import load_profile
    from infra.slurm.submission import submit_orchestrator

    folder = ws.layout.run(call).job_folder
    job = submit_orchestrator(
        _resume_command(ws, call, code, "--as-job", *options),
        load_profile(profile),
        folder,
        name=f"refiner-{call.replace(':', '-')}",
    )
    return BackgroundProcess(call, folder / f"{job}_0_log.out", job=job)


def detach(workspace: Workspace, call: str, code: str, *options: str) -> BackgroundProcess:
    """Start the process, and wait until it works on the call or has ended.

    It has its own session and no terminal, so closing a terminal does not reach it.

    Raises
    ------
    WorkspaceError
        The code differs from the pinned snapshot.
    """
    paths = workspace.layout.run(call)
    before = orchestrator_of(workspace, call).turn
    with paths.log.open("ab") as output:
        begins_at = output.tell()
        # Without the settings of the flow run that starts the process.
        env = {k: v for k, v in environment().items() if not k.startswith("PREFECT__")}
        process = start_apart(_resume_command(workspace, call, code, *options), output, env)
    deadline = time.monotonic() + _BEGIN_WAIT_S
    while time.monotonic() < deadline:
        ended = process.poll()
        who = orchestrator_of(workspace, call)
        began = who.turn > before and paths.orchestrator.exists()
        if ended is not None:
            new = 0 if began else paths.log.stat().st_size - begins_at  # without earlier output
            said = tail_of([paths.log], min(new, 4000)).strip() if new > 0 else ""
            return BackgroundProcess(call, paths.log, process.pid, exit_code=ended, message=said)
        if began:
            return BackgroundProcess(call, paths.log, process.pid)
        time.sleep(_POLL_S)
    return BackgroundProcess(
        call, paths.log, process.pid, message="it has not begun yet; see its log"
    )


def _resume_command(workspace: Workspace, call: str, code: str, *options: str) -> list[str]:
    """The command line that works on a recorded call with its pinned code."""
    snapshot = workspace.layout.code / code if code else None
    if snapshot is not None and snapshot.is_dir():
        check_snapshot(workspace, snapshot)
    else:
        snapshot = None  # the process that takes it up checks
    settings = job_settings(1, snapshot)
    del settings["OMP_NUM_THREADS"], settings["OMP_WAIT_POLICY"]  # jobs set their own
    return [
        *("env", *(f"{k}={v}" for k, v in settings.items())),
        *(sys.executable, "-P", "-m", "flows.cli.main", "resume", call),
        *(f"workspace={workspace.root}", *options),
    ]


_LOGS_KEPT = 20


def attach(workspace: Workspace, call: str, console: Console, stream: TextIO | None = None) -> None:
    """Start a process that shows the call, and print its link. Does not wait.

    Parameters
    ----------
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    console
        Receives the link, or the reason why there is none.
    stream
        Output stream (default: standard error); on a terminal the link holds the server's key.
    """
    try:
        log = _log_of(call)
        read, write = os.pipe()
        with log.open("ab") as output:
            command = [sys.executable, "-P", "-m", "flows.attach", str(write)]
            words = [*command, str(workspace.root), call]
            start_apart(words, output, _attached_environment(), pass_fds=(write,))
        os.close(write)
    except (OSError, RefinerError) as error:
        console.warn(f"The run is not shown in Prefect: {error}. Work continues without it.")
        return
    listening = (read, log, console, stream or sys.stderr)
    threading.Thread(target=_listen, args=listening, daemon=True).start()


def _listen(read: int, log: Path, console: Console, stream: TextIO) -> None:
    with os.fdopen(read) as lines:
        for line in lines:
            message = json.loads(line)
            if gone := message.get("gone"):
                console.warn(f"{gone} Work continues without it (see {log}).")
            elif info := server_status().info:
                path = f"/runs/flow-run/{message['flow_run']}"
                console.note(f"Prefect: {terminal_link(info, path, stream)}")


def _attached_environment() -> dict[str, str]:
    """A minimal environment: the process needs no token."""
    root = str(Path(__file__).resolve().parents[2])
    env = passed_on(environment())
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    return env | {"OMP_NUM_THREADS": "1", "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore"}


def _log_of(call: str) -> Path:
    """Log of the process; all but the newest logs are deleted."""
    folder = state_dir() / "flow-runs"
    folder.mkdir(mode=0o700, exist_ok=True)
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[:-_LOGS_KEPT]:
        path.unlink(missing_ok=True)
    return folder / f"{call.replace(':', '-')}.log"
