"""Lowers the priority of a process for processor and disk.

    python -P give_way.py NICE COMMAND…      replaces itself by the command, at low priority

A job runs in a session of its own. Where Linux groups tasks by session (``sched_autogroup``), a
nice value counts inside its session only, so the session as a whole is lowered, too.

It imports no package of ours: it runs from its file, whatever code the job is pinned to.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import psutil

log = logging.getLogger(__name__)
_AUTOGROUP = Path("/proc/self/autogroup")
_LOWEST_OF_BEST_EFFORT = 7  # and not the idle class, in which a busy disk would starve an upload


def give_way(nice: int) -> None:
    """Lower the priority of this process and its children, for processor and disk.

    Anything that this system or user may not do is logged: the job runs all the same.
    """
    for lower in (os.nice, _lower_session, _lower_disk):
        try:
            lower(nice)
        except (OSError, ValueError, psutil.Error) as error:
            log.warning("the priority of this job could not be lowered fully: %s", error)


def _lower_session(nice: int) -> None:
    # Only in the job's own session: other processes are not to be slowed.
    if _AUTOGROUP.exists() and os.getsid(0) == os.getpid():
        _AUTOGROUP.write_text(str(nice))


def _lower_disk(_nice: int) -> None:
    if sys.platform == "linux":
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_OF_BEST_EFFORT)


if __name__ == "__main__":
    give_way(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
