"""The orchestrator's side of messages: recorded, and handed to a courier. Never waits for one.

In: messages. Out: their records in the workspace, lines to the courier's process. What goes wrong
here is said once and changes nothing about the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from flows.notifying.courier import END_LINE, Route, message_line, recorded, route_line
from flows.notifying.message import Message
from infra.host.environment import environment
from infra.store.notices import Notices
from refiner_core.contract.alarms import alarms_of
from refiner_core.contract.errors import RefinerError

log = logging.getLogger(__name__)
#: How long the end of a run waits for its last messages to go out.
CATCH_UP_S = 10.0
_POLL_S = 0.05
#: The ends of a call: told only where it was not over at once (`notify.after_min`).
_ENDS = ("finished", "failed", "stopped")


class Teller:
    """Records messages and has them delivered.

    Parameters
    ----------
    route, notices
        Where they go, and where they are recorded.
    age_s
        How long ago the call was begun.
    say
        Hears what people should know of messages that have not gone out.
    """

    def __init__(
        self,
        route: Route,
        notices: Notices,
        age_s: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._route, self._notices, self._age_s, self._say = route, notices, age_s, say
        self._process: subprocess.Popen[str] | None = None
        self._keys: list[str] = []

    def begin(self) -> None:
        """Start the courier."""
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "flows.notifying.courier"],
                env={**environment(), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a traceback may hold an address
                text=True,
                start_new_session=True,  # Ctrl-C in the terminal is for the orchestrator
            )
        except OSError as error:
            self._say(f"nobody will be told of this run: {error.strerror or error}")
            return
        self._write(route_line(self._route))

    @property
    def quiet(self) -> bool:
        """Whether it is too early to tell anybody of anything."""
        return self._age_s() < 60.0 * self._route.notify.after_min

    def tell(self, message: Message, *, silent: bool = False) -> None:
        """Record that something has happened, and have it told if that is wanted."""
        wanted = message.kind in self._route.notify.on and not silent
        if message.kind in _ENDS and self.quiet:
            wanted = False
        value = recorded(message, self._route, quiet=not wanted)
        try:
            new = self._notices.record(message.key, value)
        except (OSError, RefinerError) as error:  # a full disk may be what it is about
            log.warning("that %s cannot be recorded: %s", message.title, error)
            new = True
        if new and wanted:
            self._keys.append(message.key)
            self._write(message_line(message))

    def close(self) -> None:
        """No more comes. Wait a while until all has gone out, then leave it to the courier."""
        process = self._process
        if process is None:
            return
        self._write(END_LINE)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + CATCH_UP_S
        while process.poll() is None and time.monotonic() < deadline and self._on_their_way():
            time.sleep(_POLL_S)
        if failed := self._failures():
            self._say(f"{failed} (refiner notify test finds out why)")
        elif self._on_their_way() and process.poll() is None:
            self._say(
                f"A message is still on its way; process {process.pid} goes on with it for up to "
                "two minutes. The results are not affected."
            )
        elif self._on_their_way():
            self._say("A message did not go out; `refiner status` says which.")

    def _on_their_way(self) -> bool:
        names = [alarm.name for alarm in alarms_of(self._route.notify)]
        return any(not self._notices.delivered(key, name) for key in self._keys for name in names)

    def _failures(self) -> str:
        try:
            found = {
                f"{channel}: {why}"
                for key in self._keys
                for channel, why in self._notices.failures(key).items()
            }
        except (OSError, RefinerError):
            log.warning("what became of messages cannot be read", exc_info=True)
            return ""
        return f"A message has not gone out yet by {'; by '.join(sorted(found))}" if found else ""

    def _write(self, line: str) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:  # it is gone; what is recorded is told by the next one
            log.warning("the courier of messages is gone: %s", error)
            self._process = None
