"""Removes what is in memory when the process that has started this one is gone, however it went.

In: ``python -I -S sweeper.py FOLDER``, in a session of its own, with a pipe as standard input that
the owner holds open. Out: the folder is gone once the pipe is closed, with the shared memory of
servers that it lists: memory that nobody would give back after a kill -9.

Nothing of ours is imported: it runs from its file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys

#: Where a system keeps shared memory (``shm_open``).
MEMORY = "/dev/shm"
#: Name of the list, a path a line.
SHARED = "shared-memory"


def main(folder: str) -> None:
    """Wait for the end of the owner, then remove the folder."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what is meant for the owner is not meant for us
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    remove(folder)


def remove(folder: str) -> None:
    """Remove a folder of our own, and before it the files that its list names.

    In memory everybody may make folders and files, of any name: nothing is done for one that
    another user has made or could have written into, and no list deletes anything but shared
    memory of our own.
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
    """True if this is a folder of this user, and of nobody else."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & 0o077


def is_own_file(path: str) -> bool:
    """True if this is a regular file of this user, and no link to one.

    Raises
    ------
    OSError
        There is none.
    """
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


if __name__ == "__main__":
    main(sys.argv[1])
