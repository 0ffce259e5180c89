"""Position of this process in its training, for an observer in another thread.

In: the training's phases, forward passes and collectives, as they begin. Out: :data:`PULSE`, a few
numbers of this process, from which a stalled stage names the rank that lags. It costs an addition
per forward pass and per collective; nothing is written here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

#: Number of last collectives that are kept: more than those of one phase of a step.
_RECENT = 48
#: Most collectives that are compared with earlier ones.
_CONTEXT = 6


class Pulse:
    """Counts of one process.

    Attributes
    ----------
    step, phase
        As last reported: finished steps, and the part of the next one.
    visits
        Phases that have begun.
    calls
        Collectives that the main thread has entered.
    inside
        Name of the collective that it waits in; empty outside of one.
    moved
        Forward passes, updates and finished collectives.
    nccl
        Whether this process communicates by NCCL.
    recent
        Names of the last collectives, oldest first.
    """

    def __init__(self) -> None:
        self.step, self.phase = 0, ""
        self.calls = self.moved = self.visits = 0
        self.inside, self.nccl = "", False
        self.recent: deque[str] = deque(maxlen=_RECENT)

    def at(self, step: int, phase: str) -> None:
        """Note the position in the training."""
        self.visits += (step, phase) != (self.step, self.phase)
        self.step, self.phase = step, phase

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Around a collective of the main thread; one inside another is part of it."""
        if self.inside:
            yield
            return
        self.recent.append(name)
        self.calls += 1
        self.inside = name
        try:
            yield
        finally:
            self.inside = ""
            self.moved += 1

    def to_json(self) -> dict[str, Any]:
        """The counts as a JSON value."""
        names = ("step", "phase", "visits", "calls", "inside", "moved")
        return {**{name: getattr(self, name) for name in names}, "recent": list(self.recent)}


def is_usual(names: Sequence[str]) -> bool:
    """Tell whether the last collective has followed the ones before it earlier, too. After one that
    was left out it has not."""
    for length in range(min(_CONTEXT, len(names) - 1), 0, -1):
        context = list(names[-1 - length : -1])
        starts = range(len(names) - 1 - length)
        followed = {names[i + length] for i in starts if list(names[i : i + length]) == context}
        if followed:
            return names[-1] in followed
    return True


#: Of this process.
PULSE = Pulse()
