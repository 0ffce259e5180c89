"""The process between a worker and a program that it starts, which never outlives the worker.

In: ``python -P minder.py COMMAND``, started in a session of its own with a pipe as standard input
that the worker holds open. Out: the command's exit code (128 + signal for a signal). When the pipe
closes (the worker is gone, by kill -9 or with its node's memory) everything that the command has
started is killed. When the command ends, what it left running is given a moment and then killed;
after a request to stop, as long as it takes to save.

Nothing of ours is imported: it runs from its file, whatever the program's environment is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds that background processes get when the command has ended by itself.
_LINGER_S = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(command: str) -> int:
    """Run the command; returns its exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become ours, so that none is lost from sight
    asked: list[int] = []
    for number in _STOP_SIGNALS:  # a handler, not SIG_IGN: that would be inherited
        signal.signal(number, lambda n, _frame: asked.append(n))
    child = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    code, ended_at = None, 0.0
    while True:
        ended = _reap()
        if child.pid in ended:
            code, ended_at = ended[child.pid], time.monotonic()
        if code is not None and not _has_children():
            return code
        overdue = code is not None and not asked and time.monotonic() - ended_at > _LINGER_S
        if overdue or _is_closed(sys.stdin.fileno()):
            _kill_all()
            return 137 if code is None else code


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that has started it is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap() -> dict[int, int]:
    """Exit codes of all children that have ended, by process."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = code if code >= 0 else 128 - code


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _is_closed(descriptor: int) -> bool:
    """Wait a moment for the pipe; nobody ever writes into it, so what comes is its end."""
    ready, _, _ = select.select([descriptor], [], [], 0.1)
    return bool(ready) and os.read(descriptor, 1) == b""


def _kill_all() -> None:
    """Kill every descendant, again until none is left: orphans of the killed come to us."""
    deadline = time.monotonic() + 30
    while _has_children() and time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap()


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a list of numbers, nothing else is needed
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", encoding="latin-1") as file:  # noqa: PTH123
                    parent = int(file.read().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
