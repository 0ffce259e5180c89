"""The process that shows a terminal's call in Prefect: ``flows.attach FD WORKSPACE CALL``.

In: a recorded run or sweep that an orchestrator works on. Out: a flow run that follows its event
log (:mod:`flows.flow_runs`), the same as from a deployment; to the file descriptor ``FD`` one line
of JSON for each thing that the orchestrator may want to say (``flow_run``, ``gone``). Prefect's own
chatter goes to standard error, which is a log file.

Nobody waits for it. It finds or starts the server, and only then imports Prefect. It leaves when
the call is over, or when a server that it cannot bring back is gone; where a server died, it begins
anew with the next one, and the flow run catches up.
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
from infra.prefect_server import ServerInfo, http_status, usable_server
from infra.store.layout import is_sweep
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError

_SERVER_WAIT_S = 120.0
#: After the call is over Prefect may take this long to send what is on its way.
_LATEST_S = 120.0
_LOOK_EVERY_S = 2.0
#: Looks in a row without an answer before a server counts as gone; a busy one may miss a few.
_MISSES = 5
#: A server of ours is started again this often.
_TRIES = 2
_TRIED = "REFINER_ATTACH_TRIED"


class _Attach:
    """Shows one call.

    Parameters
    ----------
    output
        File descriptor for what the orchestrator is told.
    workspace, call
        A run's id, or :func:`infra.store.layout.sweep_call`.
    """

    def __init__(self, output: int, workspace: str, call: str) -> None:
        self._output, self._call = output, call
        self._room = Workspace.read_only(workspace)
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
        except Exception as error:  # whatever Prefect raises; the work goes on
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

        from flows.flow_runs import begun_in_terminal
        from flows.pipeline import pipeline
        from flows.sweep import sweep
        from flows.terminal_runs import flow_run_of

        flow = sweep if is_sweep(self._call) else pipeline
        parameters = self._parameters()
        found, followed = flow_run_of(flow, parameters)
        self._tell(flow_run=str(found.id))
        if not followed:
            with begun_in_terminal(), contextlib.suppress(Pause):
                run_flow(flow, flow_run=found, parameters=parameters, return_type="state")

    def _parameters(self) -> dict[str, Any]:
        """Of the flow run, so that a retry of it goes on with the call."""
        root = str(self._room.root)
        if is_sweep(self._call):
            record = read_sweep(self._room, self._call.partition(":")[2])
            which = {"sweep": record.name, "run": record.name}
            return {**which, "workspace": root, "folder": record.folder}
        run = self._room.read_run(self._call)
        folder = str(run.provenance.get("folder") or Path.cwd())
        what = {"recipe": run.recipe, "overrides": list(run.overrides)}
        return {**what, "run": run.run, "workspace": root, "folder": folder}

    # ------------------------------------------------------------ the server

    def _watch(self, server: ServerInfo) -> None:
        """Begin anew when the server is gone: Prefect's client would try on for minutes."""
        process = ProcessId.of(server.pid) if server.ours else None
        misses = 0
        while misses < _MISSES and (process is None or process.alive):
            if self._over.wait(_LOOK_EVERY_S):
                return
            misses = 0 if _answers(server) else misses + 1
        self._begin_again(server)

    def _begin_again(self, server: ServerInfo) -> NoReturn:
        tried = int(environment().get(_TRIED, "0")) + 1
        if tried == 1:
            self._tell(gone=f"Prefect's server at {server.url} is gone.")
        if server.ours and tried >= _TRIES:
            os._exit(4)
        while (
            not server.ours
            and orchestrator_of(self._room, self._call).works
            and not _answers(server)
        ):
            time.sleep(_LOOK_EVERY_S)
        for name in server.client_env():  # the next one is another
            os.environ.pop(name, None)
        os.environ[_TRIED] = str(tried)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", "flows.attach", *sys.argv[1:]])

    def _tell(self, **message: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has left; then nobody needs to know
            os.write(self._output, f"{json.dumps(message)}\n".encode())


def _answers(server: ServerInfo) -> bool:
    """True if it answers, if only to say that it wants a key."""
    return isinstance(http_status(f"{server.api_url}/health"), int)


if __name__ == "__main__":
    sys.exit(_Attach(int(sys.argv[1]), sys.argv[2], sys.argv[3]).run())
