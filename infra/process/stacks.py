"""Stacks of running Python processes of this node, without their help.

In: processes that have called :func:`offer_stacks`. Out: the stack of every thread, as
``faulthandler`` prints it. A signal asks for it, and the answer goes to a file without a name,
which the asking process reads through ``/proc``: nothing is written to a disk, and a process that
is stuck in C code answers, too. With py-spy on the path its dump, which shows the arguments of C
code's callers, is added.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from infra.host.processes import run_program

#: No scheduler or library uses it: SIGUSR1 and SIGUSR2 are requests to stop.
_NUMBER = signal.SIGRTMIN + 7
_NAME = "refiner-stacks"
_WAIT_S = 3.0
_PY_SPY_S = 10.0
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
#: Files whose functions only wait for something that their caller wants.
_WAITS = ("/threading.py", "/selectors.py", "/socket.py", "/queue.py", "/subprocess.py")
_COLLECTIVES = ("distributed_c10d", "torch/distributed/", "deepspeed/comm", "c10d_logger")


def offer_stacks() -> None:
    """Let processes of this user ask for this one's stacks."""
    number = os.memfd_create(_NAME)
    faulthandler.register(_NUMBER, file=number, all_threads=True)


def was_asked() -> bool:
    """Tell whether this process's stacks were asked for."""
    return any(path.stat().st_size for path in _answers(os.getpid()))


def stacks_of(pids: Iterable[int]) -> dict[int, str]:
    """Stacks by process; a process that offers none, or is gone, is missing. This process needs
    no offer."""
    asked: dict[int, tuple[Path, int]] = {}
    found: dict[int, str] = {}
    for pid in pids:
        if pid == os.getpid():  # a handler here would read frames while they run
            found[pid] = _own_stacks()
            continue
        for path in _answers(pid):
            with contextlib.suppress(OSError):
                asked[pid] = (path, path.stat().st_size)
                os.kill(pid, _NUMBER)
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and any(not _answered(*a) for a in asked.values()):
        time.sleep(0.05)
    time.sleep(0.2)  # the rest of the last answer
    for pid, (path, before) in asked.items():
        with contextlib.suppress(OSError):
            if text := path.read_bytes()[before:].decode(errors="replace"):
                found[pid] = text + _py_spy(pid)
    return found


def _own_stacks() -> str:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _answered(path: Path, before: int) -> bool:
    try:
        return path.stat().st_size > before
    except OSError:
        return True  # it is gone


def _answers(pid: int) -> list[Path]:
    """The file of a process's answers; empty if it offers none."""
    folder = Path(f"/proc/{pid}/fd")
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                    found.append(path)
    return found[:1]


def _py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = run_program([program, "dump", "--pid", str(pid)], _PY_SPY_S)
    except Exception as error:  # an addition: whatever it says, the stacks above are complete
        return f"(py-spy: {error})\n"
    return f"\npy-spy dump:\n{done.stdout or done.stderr}"


def main_frames(stacks: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of the main thread, innermost first."""
    threads = stacks.partition("\npy-spy dump:")[0].split("\n\n")
    main = threads[-1]  # faulthandler prints the main thread last
    found = (_FRAME.match(line) for line in main.splitlines())
    return [(m["file"], int(m["line"]), m["function"]) for m in found if m]


def in_collective(stacks: str) -> bool:
    """Tell whether the main thread is in a collective of torch or DeepSpeed."""
    return any(part in file for file, _, _ in main_frames(stacks)[:8] for part in _COLLECTIVES)


def place_of(stacks: str) -> str:
    """``function (file:line)``: what the main thread does; empty if unknown."""
    frames = main_frames(stacks)
    own = [frame for frame in frames if not any(part in frame[0] for part in _WAITS)]
    for file, line, function in (own or frames)[:1]:
        return f"{function} ({Path(file).name}:{line})"
    return ""
