"""Process that shows a terminal's call in Prefect: ``flows.attach FD WORKSPACE CALL``.

In: a recorded run or sweep with an orchestrator. Out: a flow run that follows its event log
(:mod:`flows.flow_runs`), as from a deployment; on the file descriptor ``FD`` one line of JSON per
message for the orchestrator (``flow_run``, ``gone``). Prefect's own output goes to standard error,
which is a log file.

Nothing waits for it. It finds or starts the server, and only then imports Prefect. It ends with the
call, or when a server that it cannot restart is gone. After the death of its own server it starts
again with the next one, and the flow run catches up; one that was stopped (`refiner server stop`)
it does not start, but waits for somebody who does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from infra.host.processes import ProcessId, environment
from infra.prefect_server import ServerInfo, http_status, usable_server, was_stopped
from infra.store.layout import is_sweep
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

_SERVER_WAIT_S = 120.0
#: Time for Prefect to send pending data after the end of the call, seconds.
_LATEST_S = 120.0
_LOOK_EVERY_S = 2.0
#: Consecutive requests without an answer after which a server is gone; a busy one may miss a few.
_MISSES = 5
#: Maximum number of restarts of our own server.
_TRIES = 2
_TRIED = "REFINER_ATTACH_TRIED"


class _Attach:
    """Shows one call.

    Parameters
    ----------
    output
        File descriptor for messages to the orchestrator.
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    """

    def __init__(self, output: int, workspace: str, call: str) -> None:
        self._output, self._call = output, call
        self._space = Workspace.read_only(workspace)
        self._over = threading.Event()

    def run(self) -> int:
        """Follow the call to its end; an exit code."""
        try:
            server = usable_server(_SERVER_WAIT_S)
        except RefinerError as error:
            self._tell(gone=str(error))
            return 3
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        try:
            self._follow()
        except Exception as error:  # whatever Prefect raises; the work continues
            traceback.print_exc()
            if not _answers(server):
                self._begin_again(server)
            self._tell(gone=f"{(str(error) or type(error).__name__).splitlines()[0]}.")
            return 1
        finally:
            self._over.set()
        late = threading.Timer(_LATEST_S, os._exit, (5,))
        late.daemon = True
        late.start()
        return 0

    def _follow(self) -> None:
        from prefect.exceptions import Pause  # Prefect reads its settings when it is imported
        from prefect.flow_engine import run_flow

        from flows.flow_runs import started_in_terminal
        from flows.pipeline import pipeline
        from flows.sweep import sweep
        from flows.terminal_runs import flow_run_of

        flow = sweep if is_sweep(self._call) else pipeline
        parameters = self._parameters()
        found, followed = flow_run_of(flow, parameters)
        self._tell(flow_run=str(found.id))
        if not followed:
            with started_in_terminal(), contextlib.suppress(Pause):
                run_flow(flow, flow_run=found, parameters=parameters, return_type="state")

    def _parameters(self) -> dict[str, Any]:
        """Parameters of the flow run, so that a retry of it continues the call."""
        root = str(self._space.root)
        if is_sweep(self._call):
            record = read_sweep(self._space, self._call.partition(":")[2])
            which = {"sweep": record.name, "run": record.name}
            return {**which, "workspace": root, "folder": record.folder}
        run = self._space.read_run(self._call)
        folder = str(run.provenance.get("folder") or Path.cwd())
        what = {"recipe": run.recipe, "overrides": list(run.overrides)}
        return {**what, "run": run.run, "workspace": root, "folder": folder}

    # ------------------------------------------------------------ the server

    def _watch(self, server: ServerInfo) -> None:
        """Start again when the server is gone: Prefect's client would retry for minutes."""
        process = ProcessId.of(server.pid) if server.ours else None
        misses = 0
        while misses < _MISSES and (process is None or process.alive):
            if self._over.wait(_LOOK_EVERY_S):
                return
            misses = 0 if _answers(server) else misses + 1
        self._begin_again(server)

    def _begin_again(self, server: ServerInfo) -> NoReturn:
        stopped = server.ours and was_stopped()
        tried = int(environment().get(_TRIED, "0")) + (not stopped)
        if stopped or tried == 1:
            what = "was stopped" if stopped else "is gone"
            self._tell(gone=f"Prefect's server at {server.url} {what}.")
        if server.ours and tried >= _TRIES:
            os._exit(4)
        while (was_stopped() if server.ours else not _answers(server)) and self._works():
            time.sleep(_LOOK_EVERY_S)
        if server.ours and was_stopped():
            os._exit(4)
        for name in server.client_env():  # the next server has others
            os.environ.pop(name, None)
        os.environ[_TRIED] = str(tried)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "flows.attach", *sys.argv[1:]])

    def _works(self) -> bool:
        """True if the call has an orchestrator, or its records cannot be read."""
        try:
            return orchestrator_of(self._space, self._call).works
        except (OSError, RefinerError):
            return True

    def _tell(self, **message: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the orchestrator has ended
            os.write(self._output, f"{json.dumps(message)}\n".encode())


def _answers(server: ServerInfo) -> bool:
    """True if it answers, if only to request a key."""
    return isinstance(http_status(f"{server.api_url}/health"), int)


if __name__ == "__main__":
    sys.exit(_Attach(int(sys.argv[1]), sys.argv[2], sys.argv[3]).run())
