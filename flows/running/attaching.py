"""Starts the process that shows a call in Prefect, beside its orchestrator. No Prefect import.

In: a call that its orchestrator has begun to work on. Out: :mod:`flows.attach` in a session of its
own, which follows the records by itself; and its link, or why there is none, on the console. The
orchestrator neither waits for it nor ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Protocol, TextIO

from infra.host.environment import environment
from infra.prefect_server.opening import terminal_link
from infra.prefect_server.server import passed_on, server_status
from infra.prefect_server.state import state_dir
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

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
                env=_own_environment(),
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


def _own_environment() -> dict[str, str]:
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
