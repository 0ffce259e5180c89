"""A stream that progress is shown on, which may go away at any time.

In: messages, and what is redrawn in place. Out: the same on a terminal or as plain lines; whoever
closes the terminal, or stops reading, takes nothing with them. :mod:`flows.running.console` draws
on it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from infra.host.terminal import printable

if TYPE_CHECKING:
    from rich.live import Live


class Screen:
    """Prints, safely from several threads. ``quiet`` leaves only warnings and what is printed
    regardless; ``clock`` is in seconds, monotonic."""

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._began = clock, clock()
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._lost = False
        self._fancy = not quiet and can_redraw(self._stream)

    def note(self, message: str) -> None:
        """Say something in between; left out when quiet."""
        if not self._quiet:
            self._print(message)

    def warn(self, message: str) -> None:
        """Say something that is amiss, but stops nothing."""
        self._print(f"warning: {message}")

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                with self._while_it_can_be_written():
                    live.stop()

    def _print(self, message: str) -> None:
        with self._lock, self._while_it_can_be_written():
            if self._lost:
                return
            if self._stream.isatty():
                message = printable(message)
            if self._live is not None:
                self._live.console.print(message, markup=False, highlight=False)
            else:
                print(message, file=self._stream, flush=True)

    @contextlib.contextmanager
    def _while_it_can_be_written(self) -> Iterator[None]:
        """A terminal that was closed, a pipe that nobody reads: the work goes on without."""
        try:
            yield
        except (OSError, ValueError):
            self._lost, self._live = True, None


def can_redraw(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which lines can be redrawn."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    return stream.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")
