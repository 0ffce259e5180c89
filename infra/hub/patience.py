"""How long trouble with the Hub is borne, and how it is waited for.

In: the number of failures in a row, what the Hub asks for, when the trouble began. Out: a wait, or
the word that patience is over. The limit holds for all waits of a publication together, and waits
of several threads at the same time count once, so that an attempt ends within a known time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from infra.hub.errors import stopped

FIRST_S, LONGEST_S = 0.25, 30.0
#: A stop is noticed within this time, however long the wait.
_SLICE_S = 0.2


class Patience:
    """What is left of ``limit_s`` seconds.

    Attributes
    ----------
    borne_s
        Seconds of trouble so far: waits, and requests that failed in the end.
    """

    def __init__(
        self,
        limit_s: float,
        should_stop: Callable[[], bool] = lambda: False,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.limit_s, self.borne_s = limit_s, 0.0
        self._should_stop, self._clock, self._sleep, self._draw = should_stop, clock, sleep, draw
        self._until = clock()
        self._lock = threading.Lock()

    def now(self) -> float:
        """The clock that ``since`` of :meth:`wait` is read from."""
        return self._clock()

    def check(self) -> None:
        """Raise :class:`Interrupted` if a stop was asked for."""
        if self._should_stop():
            raise stopped()

    def wait(self, failures: int, asked_s: float | None, since: float) -> bool:
        """Wait after the ``failures``-th failure in a row of a request begun at ``since``.

        ``asked_s`` is what the Hub wants; without it waits grow from :data:`FIRST_S` by a factor of
        2 up to :data:`LONGEST_S`, each times something between 0.5 and 1.5. False means that this
        would take longer than is left; then nothing was waited for.
        """
        backoff = min(FIRST_S * 2 ** min(failures - 1, 16), LONGEST_S) * (0.5 + self._draw())
        now = self._clock()
        end = now + (backoff if asked_s is None else asked_s)
        with self._lock:
            added = max(0.0, end - max(since, self._until))
            if self.borne_s + added > self.limit_s:
                return False
            self.borne_s += added
            self._until = max(self._until, end)
        while (left := end - self._clock()) > 0:
            self.check()
            self._sleep(min(left, _SLICE_S))
        self.check()
        return True
