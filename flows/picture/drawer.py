"""The process that draws a campaign in Prefect: ``python -m flows.picture.drawer``.

In: the orchestrator's lines on standard input (:mod:`flows.picture.feed`). Out: a flow run on the
Prefect server (:mod:`flows.picture.flow`); on standard output one line of JSON for each thing that
the orchestrator may want to say (``server``, ``flow_run``, ``gone``). Prefect's own chatter goes to
standard error, which is a log file.

It reads its input from the first moment on, so that the orchestrator never waits for it, finds or
starts the server, and only then imports Prefect. It leaves when the picture is complete, when the
server is gone, or two minutes after the run has ended. When the orchestrator dies (input closed
without an end, or its process gone) the stages that had not ended are shown as Crashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import IO

from flows.picture.feed import Drawing, Feed, read_header
from infra.host.processes import ProcessId
from infra.prefect_server.server import ServerError, ServerInfo, ensure_server

#: Exit codes, for the orchestrator.
DRAWN, FAILED, NO_SERVER, SERVER_GONE, LATE = 0, 1, 3, 4, 5
_SERVER_WAIT_S = 120.0
_LATEST_S = 120.0
_LOOK_EVERY_S = 2.0
#: Looks in a row without an answer before a server counts as gone; a busy one may miss a few.
_MISSES = 5

Tell = Callable[..., None]


def main() -> int:
    """Draw what standard input tells."""
    tell = _teller()
    drawing = read_header(sys.stdin.readline())
    feed = Feed(drawing)
    _in_background(lambda: feed.read(sys.stdin))
    _in_background(lambda: _watch_owner(drawing.owner, feed))
    _in_background(lambda: _leave_late(feed))
    try:
        server = ensure_server(_SERVER_WAIT_S)
    except ServerError as error:
        tell(gone=str(error))
        return NO_SERVER
    tell(server=server.url)
    _in_background(lambda: _watch_server(server, tell))
    os.environ.update(server.client_env())
    try:
        _draw(drawing, feed, tell)
    except Exception as error:  # whatever Prefect raises; the orchestrator warns and works on
        traceback.print_exc()
        tell(gone=f"{str(error).splitlines()[0] if str(error) else type(error).__name__}.")
        return FAILED
    return DRAWN


def _draw(drawing: Drawing, feed: Feed, tell: Tell) -> None:
    from flows.picture.flow import draw
    from flows.picture.leftovers import (
        close_leftovers,  # Prefect reads its settings when it is imported
    )

    close_leftovers(drawing)
    draw(drawing, feed, lambda flow_run: tell(flow_run=flow_run))


def _teller() -> Tell:
    """A function that writes to the orchestrator; all other output goes to standard error."""
    stream: IO[str] = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(**message: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has left; then nobody needs to know
            stream.write(json.dumps(message) + "\n")
            stream.flush()

    return tell


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _watch_owner(owner: str, feed: Feed) -> None:
    """The input may stay open in a child of a dead orchestrator, so look at the process too."""
    process = ProcessId.parse(owner)
    while not feed.ended.wait(_LOOK_EVERY_S):
        if process.here and not process.alive:
            feed.close(lost=True)


def _leave_late(feed: Feed) -> None:
    feed.ended.wait()
    time.sleep(_LATEST_S)
    _leave(LATE)


def _watch_server(server: ServerInfo, tell: Tell) -> None:
    """Leave when the server is gone: Prefect's client would try on for minutes."""
    process = ProcessId.of(server.pid) if server.ours else None
    misses = 0
    while misses < _MISSES and (process is None or process.alive):
        time.sleep(_LOOK_EVERY_S)
        misses = 0 if _answers(f"{server.api_url}/health") else misses + 1
    tell(gone=f"Prefect's server at {server.url} is gone.")
    _leave(SERVER_GONE)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:  # it answers, if only to say that it wants a key
        return True
    except (urllib.error.URLError, OSError):
        return False


def _leave(code: int) -> None:
    """End at once. Prefect's threads would be waited for otherwise, and they wait for a server."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
