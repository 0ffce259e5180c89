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
import sys

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
    """Remove a folder, and before it the files that its list names."""
    with contextlib.suppress(OSError), open(os.path.join(folder, SHARED)) as file:  # noqa: PTH118, PTH123
        for line in file:
            with contextlib.suppress(OSError):
                os.unlink(line.rstrip("\n"))  # noqa: PTH108
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
