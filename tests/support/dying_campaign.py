"""An orchestrator that kills itself (SIGKILL) at its so-many-th operation that matters.

    python dying_campaign.py NUMBER WORKSPACE [stage …]

Counted are the moments before and after each file that is put into place and each job that is
submitted, so that all numbers together are all the points at which an orchestrator can die.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import run_campaign

_OPERATIONS = ((os, "link"), (Path, "rename"), (Path, "replace"), (subprocess, "Popen"))


def die_at(number: int) -> None:
    """Arrange for the end."""
    count = itertools.count(1)

    def moment() -> None:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            moment()
            result = real(*args, **named)
            moment()
            return result

        return call

    for owner, name in _OPERATIONS:
        setattr(owner, name, counted(getattr(owner, name)))


if __name__ == "__main__":
    die_at(int(sys.argv.pop(1)))
    run_campaign.main()
