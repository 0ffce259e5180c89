"""A process that gives way to others, for processor and disk.

    python -P give_way.py NICE COMMAND…      becomes the command, and gives way

A job runs in a session of its own. Where Linux groups tasks by session (``sched_autogroup``), a
nice value counts inside its session only, so the session as a whole is lowered, too.

Nothing of ours is imported: it runs from its file, whatever code the job is pinned to.
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
    """Lower the priority of this process and of all that it starts, for processor and disk.

    What this system or user may not do is told in the log, and nothing worse: a job that is not
    lowered is still a job.
    """
    for lower in (os.nice, _lower_session, _lower_disk):
        try:
            lower(nice)
        except (OSError, ValueError, psutil.Error) as error:
            log.warning("this job gives way less than it should: %s", error)


def _lower_session(nice: int) -> None:
    # Only in a session of one's own: another's other processes are nobody's to slow.
    if _AUTOGROUP.exists() and os.getsid(0) == os.getpid():
        _AUTOGROUP.write_text(str(nice))


def _lower_disk(_nice: int) -> None:
    if sys.platform == "linux":
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, _LOWEST_OF_BEST_EFFORT)


if __name__ == "__main__":
    give_way(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
