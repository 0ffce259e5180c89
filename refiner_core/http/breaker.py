"""Whether a server is asked: a circuit breaker as a pure state machine.

In: how calls and probes ended, and a clock. Out: its state.

::

    closed ──enough distinct calls in a row failed──> open ──cool-down──> probing ─alive─> half_open
      ^                                                ^──────────dead─────┘                 │
      └──a call is answered──────────────────────────── or lost again: open, for longer <────┘

Distinct calls, because an item that no server can answer comes again and again: a few of them do
not make a server bad.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from typing import Literal

State = Literal["closed", "open", "probing", "half_open"]


class Trouble(Enum):
    """What a call says about its server."""

    #: It answered.
    NONE = "none"
    #: It asked for patience (408, 429): neither well nor ill.
    BUSY = "busy"
    #: It is there and does not work: 500, time-out.
    SICK = "sick"
    #: It is not there: connection lost or refused, 502, 503, 504.
    GONE = "gone"


class Breaker:
    """Opens when ``threshold`` distinct calls have failed with no answer between.

    It is probed at once when it opens, then after ``first_cooldown_s``, which doubles up to
    ``longest_cooldown_s`` with each probe or trial that finds nobody.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        threshold: int = 5,
        first_cooldown_s: float = 0.5,
        longest_cooldown_s: float = 30.0,
    ) -> None:
        self.state: State = "closed"
        self._clock = clock
        self._threshold = threshold
        self._first_s, self._longest_s = first_cooldown_s, longest_cooldown_s
        self._failing: set[Hashable] = set()
        self._in_vain = 0
        self._probe_at = 0.0

    def note(self, call: Hashable, trouble: Trouble) -> None:
        """A call has ended."""
        if trouble is Trouble.BUSY:
            return
        if trouble is Trouble.NONE:
            self.state, self._in_vain = "closed", 0
            self._failing.clear()
        elif self.state == "half_open" and trouble is Trouble.GONE:
            self._in_vain += 1
            self.open()
        elif self.state in ("closed", "half_open"):
            self._failing.add(call)
            if len(self._failing) >= self._threshold:
                self.open()

    def open(self) -> None:
        """Ask it no more until a probe has found it."""
        wait_s = self._first_s * 2.0 ** (min(self._in_vain, 60) - 1) if self._in_vain else 0.0
        self.state, self._probe_at = "open", self._clock() + min(self._longest_s, wait_s)
        self._failing.clear()

    def hurry(self) -> None:
        """If it is open, probe it at once: somebody asks anew."""
        if self.state == "open":
            self._in_vain = 0
            self.open()

    def take_probe(self) -> bool:
        """Whether a probe is due; the caller then makes one and tells :meth:`probed`."""
        if self.state != "open" or self._clock() < self._probe_at:
            return False
        self.state = "probing"
        return True

    def probed(self, alive: bool) -> None:
        """What the probe has found. Nothing, where a call was answered in the meantime."""
        if self.state != "probing":
            return
        if alive:
            self.state = "half_open"
        else:
            self._in_vain += 1
            self.open()
