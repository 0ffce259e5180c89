"""The process between a worker and its program, which never outlives the worker.

In: ``python -P watchdog.py COMMAND``, started in a session of its own with a pipe as standard input
that the worker holds open. Out: the command's exit code (128 + signal for a signal). When the pipe
closes (the worker is gone, by kill -9 or with its node's memory), all processes of the command are
killed. When the command ends, its remaining processes get a moment and are then killed; after a
request to stop, as long as they take to save.

``python -P watchdog.py --sweep FOLDER`` runs nothing: once the pipe is closed, it removes the
folder and the servers' shared memory listed in it, which would remain after a kill -9.

It imports no package of ours: it runs from its file, whatever the program's environment is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time

#: The system's folder of shared memory (``shm_open``), and the name of its list, a path per line.
MEMORY, SHARED = "/dev/shm", "shared-memory"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds that background processes get when the command has ended by itself.
_LINGER_S = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(command: str) -> int:
    """Run the command; returns its exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopt orphans, so that none is lost
    asked: list[int] = []
    for number in _STOP_SIGNALS:  # a handler, not SIG_IGN, which would be inherited
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


def sweep(folder: str) -> int:
    """Wait for the end of the owner, then remove the folder; returns 0."""
    for number in _STOP_SIGNALS:  # signals are meant for the owner
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    remove(folder)
    return 0


def remove(folder: str) -> None:
    """Remove a folder of our own, after the files in its list.

    Anyone can create folders and files of any name in shared memory: a folder that another user
    created or could have written to is left alone, and a list deletes nothing but our own shared
    memory.
    """
    if not is_private(folder):
        return
    with contextlib.suppress(OSError), open(os.path.join(folder, SHARED)) as file:  # noqa: PTH118, PTH123
        for line in file:
            path = line.rstrip("\n")
            with contextlib.suppress(OSError):
                if os.path.dirname(path) == MEMORY and is_own_file(path):  # noqa: PTH120
                    os.unlink(path)  # noqa: PTH108
    shutil.rmtree(folder, ignore_errors=True)


def is_private(folder: str) -> bool:
    """True if this is a folder of this user, closed to all others."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & 0o077


def is_own_file(path: str) -> bool:
    """True if this is a regular file of this user, and not a link.

    Raises
    ------
    OSError
        There is none.
    """
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
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
    """Wait a moment for the end of the pipe; nothing is ever written into it."""
    ready, _, _ = select.select([descriptor], [], [], 0.1)
    return bool(ready) and os.read(descriptor, 1) == b""


def _kill_all() -> None:
    """Kill every descendant, repeated until none is left: orphans of the killed become ours."""
    deadline = time.monotonic() + 30
    while _has_children() and time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        _reap()


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - only a list of numbers is needed
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
    sys.exit(sweep(sys.argv[2]) if sys.argv[1] == "--sweep" else main(sys.argv[1]))
