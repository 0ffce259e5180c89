"""One run of another trainer as a process: started, read, asked to stop, never left behind.

In: a command and its environment. Out: its lines as they come, and its exit code. It runs under
:mod:`infra.foreign.minder`, which kills it when this process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from infra.foreign import minder
from infra.foreign.calling import MARK

log = logging.getLogger(__name__)

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
        # -I and -S: the settings are the trainer's, and must not change what minds it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(minder.__file__)), command],
            env=dict(environment),
            cwd=workdir,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="trainer-output", daemon=True)
        self._reader.start()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._left.set()

    @property
    def code(self) -> int | None:
        """Exit code, 128 + number for a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

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
        while self._reader.is_alive() and time.monotonic() < give_up:
            yield from self.lines(0.05)
        while self._taken or not self._waiting.empty():
            yield from self.lines(0.05)
            if self._reader.is_alive():  # somebody whom nothing ends goes on printing
                return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and all it has started, now."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the minder hears that
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            log.warning("the trainer's processes do not end (%s)", self._process.pid)
            self.signal(signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
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


def kill_leftovers(output: Path, patience_s: float = 30.0) -> int:
    """Kill what an earlier attempt's trainer has left on this host; returns how many processes.

    They are known by the mark in their environment (``output``, or a folder in it), which children
    inherit and nobody else has: a process number alone could be another's by now.
    """
    deadline, killed = time.monotonic() + patience_s, 0
    while left := marked_processes(output):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[p.pid for p in left]} of an earlier trainer stay")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed += 1
        time.sleep(0.05)
    if killed:
        log.warning("killed %d processes that an earlier attempt's trainer had left", killed)
    return killed


def marked_processes(output: Path) -> list[psutil.Process]:
    """Processes of this host that live and have the mark, but for this one."""
    found, marks = [], (str(output), f"{output}{os.sep}")
    for process in psutil.process_iter():
        try:
            mark = mark_of(process)
            if (
                mark is not None
                and process.pid != os.getpid()
                and (mark == marks[0] or mark.startswith(marks[1]))
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):  # gone, or another user's
            continue
    return found


def mark_of(process: psutil.Process) -> str | None:
    """The mark in a process's environment; None without one.

    A process that gives itself a name (vLLM's engines do) writes it over the beginning of its
    environment and fills up with zeros, at which `psutil` stops reading.
    """
    environment = Path("/proc", str(process.pid), "environ")
    if not environment.parent.parent.joinpath("self").exists():  # no such file system here
        known: str | None = process.environ().get(MARK)
        return known
    name = f"{MARK}=".encode()
    for setting in environment.read_bytes().split(b"\0"):
        if setting.startswith(name):
            return os.fsdecode(setting.removeprefix(name))
    return None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
