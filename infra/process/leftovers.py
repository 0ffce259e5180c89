"""What an earlier attempt's program has left on this host: found by a mark, and killed.

In: the folder of an attempt's output. Out: nothing of it runs any more. Children inherit the mark
in their environment; nobody else has it, and a process number alone could be another's by now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import psutil

log = logging.getLogger(__name__)
#: In the environment of every process of an attempt: the folder that it writes into.
MARK = "REFINER_OUTPUT"


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
