"""The attempt's log of what another trainer prints: bounded, and never a reason to stop.

In: lines. Out: the same on standard output, as long as they are not more than a log should hold;
then only the newest wait until some go in again, and how many were left out is said. Lines that do
not go in because the disk is full wait in the same way.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable

#: Bytes that go in at once, and bytes for each second besides (700 MB a day).
_AT_ONCE, _EACH_S = 16 << 20, 8 << 10
_MOST_WAITING = 400


class TrainerLog:
    """Lines on their way to the log. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._waiting: deque[str] = deque()
        self._left_out = self._written = 0

    def write(self, text: str) -> None:
        """Take a line."""
        self._waiting.append(text)
        if len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._left_out += 1
        self.flush()

    def flush(self, *, last: bool = False) -> None:
        """Write what waits, as far as it goes in; the ``last`` lines go in always."""
        while self._waiting and (last or self._written < self._allowed()):
            line = f"{self._waiting[0]}\n"
            if self._left_out:
                line = f"[{self._left_out:,} lines are left out here]\n{line}"
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError:  # a full disk; they wait
                return
            self._written += len(line)
            self._left_out = 0
            self._waiting.popleft()

    def _allowed(self) -> float:
        return _AT_ONCE + _EACH_S * (self._clock() - self._began)
