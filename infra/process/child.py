"""A program as a child process: started under a watchdog, read, and ended with all its processes.

In: a shell text and an environment. Out: its output, as bytes from a thread, and its exit code.
When this process is gone, by kill -9 or with its node, the watchdog kills everything that the
program has started.

Processes of an earlier attempt's program that are left on this host are found by a mark, and
killed. Children inherit the mark in their environment, and no other process has it; a process
number alone could be another's by now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import psutil

from infra.process import watchdog

log = logging.getLogger(__name__)
_LAST_WORDS_S, _GONE_S, _END_S = 5.0, 30.0, 60.0


class ChildProcess:
    """A started program, in a session of its own.

    Parameters
    ----------
    command
        Shell text for ``/bin/sh -c``.
    environment
        The complete environment: nothing else is inherited.
    read
        Called with its output in a thread; returns at the end of it.
    cwd
        Working directory.
    """

    def __init__(
        self,
        command: str,
        environment: Mapping[str, str],
        read: Callable[[IO[bytes]], None],
        cwd: Path | None = None,
    ) -> None:
        # -I and -S: the settings are the program's, and must not change its watchdog.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), command],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        output = self._process.stdout

        def read_all() -> None:
            with output:
                read(output)

        self._reader = threading.Thread(target=read_all, name="child-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the watchdog, whose session and process group are the program's."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, 128 + number for a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def is_read(self) -> bool:
        """Tell whether all output was read."""
        return not self._reader.is_alive()

    def wait_read(self) -> None:
        """Wait a moment for the rest of the output."""
        self._reader.join(_LAST_WORDS_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def end(self, grace_s: float = 0.0) -> None:
        """End it and all its processes: now, or after SIGTERM and a grace period."""
        process = self._process
        if grace_s > 0 and process.poll() is None:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the watchdog notices that, and kills the rest
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning("the processes of %s do not end", process.pid)
            self.signal(signal.SIGKILL)


#: Variable in every process of an attempt: its output folder.
MARK = "REFINER_OUTPUT"


def kill_stale_processes(output: Path) -> int:
    """Kill leftovers of an earlier attempt's trainer on this host; returns their number.

    They have the mark in their environment (``output``, or a folder in it), which children inherit
    and no other process has: a process number alone could be another's by now.
    """
    deadline, killed = time.monotonic() + _GONE_S, 0
    while left := marked_processes(output):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[p.pid for p in left]} of an earlier trainer remain")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed += 1
        time.sleep(0.05)
    if killed:
        log.warning("killed %d processes left by an earlier attempt's trainer", killed)
    return killed


def marked_processes(output: Path) -> list[psutil.Process]:
    """Live processes of this host with the mark, except this one."""
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

    A process that renames itself (vLLM's engines do) writes its name over the beginning of its
    environment and fills up with zeros, at which `psutil` stops reading.
    """
    name = f"{MARK}=".encode()
    for setting in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
        if setting.startswith(name):
            return os.fsdecode(setting.removeprefix(name))
    return None
