"""Outages: what an orchestrator does while a file system, a scheduler or a service does not answer.

In: the error that ended a round; records of attempts that ended in an outage. Out: when the next
round, or the next attempt, is due (pauses double), and one event when an outage of rounds begins
and one when it is over, however long it lasts. Nothing follows from a question that was not
answered; what is no outage is raised as ever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from infra.jobs.failures import CLASSES, is_outage, without_progress
from infra.jobs.protocol import AttemptRef
from infra.orchestrator.timeline import first_line
from refiner_core.contract.records import FailureClass, StageRecord

#: The longest pause between two rounds, and between two attempts, seconds. The scheduler or the
#: file system is back for all at once, so that is looked at more often.
_LONGEST_S = 30.0
_LONGEST_BETWEEN_S: dict[FailureClass, float] = {"system_outage": 300.0}
_ELSE_S = 900.0
_TRIES, _BETWEEN_S = 5, 0.2
T = TypeVar("T")
K = TypeVar("K")


class Outage:
    """The outage that lasts now, if any, as its rounds meet it.

    Parameters
    ----------
    poll_s
        The first pause, seconds.
    clock, note
        Seconds (monotonic), and where events go.
    """

    def __init__(
        self, poll_s: float, clock: Callable[[], float], note: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._poll_s, self._clock, self._note = poll_s, clock, note
        self.reason = ""
        self.since = 0.0
        self._rounds = 0
        self._due = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds until the next round is due; 0 without an outage."""
        return max(0.0, self._due - self._clock()) if self._rounds else 0.0

    def met(self, error: Exception) -> None:
        """A round has failed by it; raises what is no outage."""
        if not is_outage(error):
            raise error
        now = self._clock()
        if not self._rounds:
            self.since, self.reason = now, first_line(str(error), 300)
            self._note({"event": "outage", "reason": self.reason})
        self._due = now + min(self._poll_s * 2**self._rounds, _LONGEST_S)
        self._rounds = min(self._rounds + 1, 16)

    def is_over(self) -> None:
        """A round went through."""
        if self._rounds:
            waited_s = round(self._clock() - self.since, 1)
            self._note({"event": "back", "reason": self.reason, "waited_s": waited_s})
        self.reason, self._rounds = "", 0


class Backoff:
    """Remembers until when stages pause whose last attempt ended in a way that time may mend."""

    def __init__(self, first_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._clock = first_s, clock
        self._ready_at: dict[AttemptRef, float] = {}

    def not_before(
        self, records: Mapping[str, StageRecord], ended_before: Mapping[str, int]
    ) -> dict[str, float]:
        """Stage id -> when it may go on; attempts up to ``ended_before`` are another call's."""
        found: dict[str, float] = {}
        for stage_id, record in records.items():
            last = record.attempts[-1] if record.attempts else None
            if record.result is not None or last is None or last.outcome is None:
                continue
            failure = last.outcome.failure
            if last.number <= ended_before.get(stage_id, 0):
                continue
            count = without_progress(record.attempts, failure)
            if failure == "disk_full":
                count -= 1  # room has been looked for; only a second one in a row is strange
            elif CLASSES[failure].remedy != "pause, then resume":
                continue
            if count < 1:
                continue
            longest_s = _LONGEST_BETWEEN_S.get(failure, _ELSE_S)
            pause_s = min(self._first_s * 2 ** min(count - 1, 16), longest_s)
            ready = self._ready_at.setdefault(
                AttemptRef(stage_id, last.number), self._clock() + pause_s
            )
            found[stage_id] = ready
        return found


class Trouble(dict[K, Exception]):
    """Errors by what they came from: each of several actions is tried whatever the others meet."""

    @contextlib.contextmanager
    def at(self, *keys: K) -> Iterator[None]:
        """What goes wrong in the block is the trouble of these; the first error counts."""
        try:
            yield
        except Exception as error:
            for key in keys:
                self.setdefault(key, error)

    def raise_first(self) -> None:
        """Raise the first of them, if there is any."""
        for error in self.values():
            raise error


def with_patience(action: Callable[[], T]) -> T:
    """What ``action`` returns, tried again for a second: for what has no round yet."""
    for _ in range(_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if not is_outage(error) or getattr(error, "resumable", False):
                raise
        time.sleep(_BETWEEN_S)
    return action()
