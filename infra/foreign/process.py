"""One run of another trainer as a process: started, read, asked to stop, never left behind.

In: a command and its environment. Out: its lines as they come, and its exit code.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from infra.process.child import ChildProcess

#: A line without an end is cut after this many bytes.
_LINE_LIMIT = 1 << 16
#: Pieces of output that wait to be taken. Who prints faster waits, as at any pipe.
_MOST_WAITING = 16
#: Seconds after which whoever takes lines may look at something else.
_TURN_S = 0.5
_LAST_WORDS_S = 5.0


class Line(NamedTuple):
    """What was printed; ``redrawn`` for a line that ends in a carriage return, as bars do."""

    text: str
    redrawn: bool = False


class TrainerProcess:
    """A started trainer; a context manager that leaves none of its processes behind."""

    def __init__(self, command: str, environment: Mapping[str, str], workdir: Path) -> None:
        self._waiting: queue.Queue[list[Line]] = queue.Queue(_MOST_WAITING)
        self._taken: deque[Line] = deque()
        self._left = threading.Event()
        self._child = ChildProcess(command, environment, self._read, workdir)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._left.set()

    @property
    def code(self) -> int | None:
        """Exit code, 128 + number for a signal; None while it runs."""
        return self._child.code

    def lines(self, timeout_s: float) -> Iterator[Line]:
        """What was printed since the last call, as far as it can be taken in half a second; waits
        up to ``timeout_s`` for the first line."""
        with contextlib.suppress(queue.Empty):
            if not self._taken:
                self._taken.extend(self._waiting.get(timeout=timeout_s))
            turn_ends = time.monotonic() + _TURN_S
            while True:
                while self._taken:
                    yield self._taken.popleft()
                    if time.monotonic() > turn_ends:
                        return
                self._taken.extend(self._waiting.get_nowait())

    def last_lines(self) -> Iterator[Line]:
        """What is left once it has ended."""
        give_up = time.monotonic() + _LAST_WORDS_S
        while not self._child.is_read and time.monotonic() < give_up:
            yield from self.lines(0.05)
        while self._taken or not self._waiting.empty():
            yield from self.lines(0.05)
            if not self._child.is_read:  # somebody whom nothing ends goes on printing
                return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        self._child.signal(number)

    def kill(self) -> None:
        """End it and all it has started, now."""
        self._child.end()

    def _read(self, output: IO[bytes]) -> None:
        rest = b""
        while chunk := os.read(output.fileno(), 1 << 16):
            *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
            *redrawn, rest = rest.split(b"\r")
            lines = [line for part in whole for line in _lines(part)]
            lines += [Line(_text(line), redrawn=True) for line in redrawn]
            if len(rest) > _LINE_LIMIT:
                lines += _lines(rest)
                rest = b""
            self._put(lines)
        if rest:
            self._put(_lines(rest))

    def _put(self, lines: list[Line]) -> None:
        """Hand lines over as soon as there is room for them; to nobody once nobody takes them."""
        put = not lines
        while not put and not self._left.is_set():
            with contextlib.suppress(queue.Full):
                self._waiting.put(lines, timeout=0.2)
                put = True


def _lines(text: bytes) -> list[Line]:
    *redrawn, last = text.split(b"\r")
    return [*(Line(_text(part), redrawn=True) for part in redrawn), Line(_text(last))]


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
