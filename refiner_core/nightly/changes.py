"""Change or noise, and whose change: the nights of one series, read in order.

In: :class:`Point` values of a series and of the canary under the same protocol and metric. Out:
:class:`Change` values, each told once.

A *level* is what later nights are held against: at first the first night. A night counts where its
difference from the level, paired on prompts, is beyond three errors (:mod:`.compare`) and not
smaller than what matters. Where two of the last three nights count, in the same direction, that is
a change, and the mean of these nights is the new level; should it lead back to the level before, or
past it, it is a *recovery*. What follows is held against the new level, so one change is told once.

Whose it is, is said by the canary, between the same nights:

======================  =========================================================================
the canary has moved    cause
======================  =========================================================================
no                      ``model``: other weights
as much                 ``drift`` of judge or machines; told once, as a change of the canary
less, more, otherwise   ``unclear``: it has drifted, and what is left is not to be told apart
was not measured        ``unclear``
======================  =========================================================================

A repeated number (same weights, same protocol) counts in every night in which it stands, though it
was measured once: what persists is the state of the model, and what guards against chance is the
three errors.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from refiner_core.nightly.compare import (
    BEYOND,
    CLAIMED,
    MOVED,
    Noise,
    Shift,
    Values,
    apart,
    compare,
    mean_of,
    night_noise,
    shift_of,
)
from refiner_core.nightly.values import When

Cause = Literal["model", "drift", "unclear"]
#: So many of so many nights have to count.
NEEDED, OF = 2, 3


@dataclass(frozen=True)
class Point:
    """One night of a series.

    ``measured_in`` is the night whose conditions the values were made under (the same one in which
    a repeated number was measured), ``facts`` what may have changed beside the weights.
    """

    night: str
    measured_in: str
    digest: str
    values: Values
    facts: Mapping[str, str] = field(default_factory=dict)


class Counted(NamedTuple):
    """One night held against its level; ``direction`` is 0 where it does not count."""

    night: str
    shift: Shift | None
    direction: int


@dataclass(frozen=True)
class Change:
    """What has changed, once.

    Attributes
    ----------
    kind
        ``recovery`` where a series is back at the level before its last change, or past it.
    direction
        1 up, -1 down.
    night, nights, since
        In which night it was sure; the nights that counted; the night of the level before.
    shift
        From the level before to the new one.
    canary
        By how much the canary has moved between the same nights; None where it was not measured.
    facts
        What has changed beside the weights: name -> (before, now).
    weights
        Whether they have.
    """

    kind: Literal["change", "recovery"]
    cause: Cause
    direction: int
    night: str
    nights: tuple[str, ...]
    since: str
    shift: Shift
    canary: Shift | None
    facts: Mapping[str, tuple[str, str]]
    weights: bool

    def id_in(self, series: str) -> str:
        """The same for everybody who reads the same nights."""
        text = f"{series}|{self.kind}|{self.direction}|{self.nights[0]}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Judged(NamedTuple):
    """A series read to its end."""

    changes: tuple[Change, ...]
    nights: tuple[Counted, ...]
    noise: Noise


@dataclass(frozen=True)
class _Level:
    values: Values
    nights: tuple[Point, ...]

    @property
    def last(self) -> Point:
        return self.nights[-1]


def read_series(
    points: Sequence[Point], canary: Sequence[Point] | None, *, smallest: float = 0.0
) -> Judged:
    """Read a series from its first night to its last.

    Parameters
    ----------
    points
        In order of nights, of one checkpoint, protocol and metric.
    canary
        The canary's points of the same protocol and metric; None if this is the canary.
    smallest
        Differences below it do not count, in units of the metric.
    """
    reader = _Reader(points, canary, smallest)
    for point in points[1:]:
        reader.read(point)
    return Judged(tuple(reader.changes), tuple(reader.nights), reader.noise_at(math.inf))


class _Reader:
    """The state between two nights."""

    def __init__(
        self, points: Sequence[Point], canary: Sequence[Point] | None, smallest: float
    ) -> None:
        self.is_canary, self.smallest = canary is None, smallest
        frozen = list(points if canary is None else canary)
        self.canary = {p.night: p for p in frozen}
        self._means = [p.values.mean for p in frozen]
        self._places = {p.night: i for i, p in enumerate(frozen)}
        self._order = [p.night for p in frozen]
        self.before: _Level | None = None
        self.changes: list[Change] = []
        self.nights: list[Counted] = []
        self.recent: deque[tuple[int, Point]] = deque(maxlen=OF)
        if points:
            self.level = _Level(points[0].values, (points[0],))
            self.nights.append(Counted(points[0].night, None, 0))

    def noise_at(self, night: str | float) -> Noise:
        """The canary's spread by its nights up to ``night``."""
        if isinstance(night, float):
            return night_noise(self._means)
        if (place := self._places.get(night)) is not None:
            return night_noise(self._means[: place + 1])
        return night_noise([m for n, m in zip(self._order, self._means, strict=True) if n <= night])

    def read(self, point: Point) -> None:
        noise = self.noise_at(point.night)
        shift = compare(point.values, self.level.values, noise)
        counts = shift.beyond(BEYOND) and abs(shift.difference) >= self.smallest
        direction = shift.direction if counts else 0
        self.nights.append(Counted(point.night, shift, direction))
        self.recent.append((direction, point))
        agreeing = [p for d, p in self.recent if d == direction]
        if direction and len(agreeing) >= NEEDED:
            self._change(direction, agreeing, noise)

    def _change(self, direction: int, agreeing: Sequence[Point], noise: Noise) -> None:
        new = _Level(mean_of([p.values for p in agreeing]), tuple(agreeing))
        old, last = self.level, agreeing[-1]
        shift = compare(new.values, old.values, noise)
        canary = None if self.is_canary else self._canary_between(new, old, noise)
        cause: Cause = "drift" if self.is_canary else self._cause(new, old, canary, noise)
        back = self._is_back(new, direction, noise)
        self.changes.append(
            Change(
                kind="recovery" if back else "change",
                cause=cause,
                direction=direction,
                night=last.night,
                nights=tuple(p.night for p in agreeing),
                since=old.last.night,
                shift=shift,
                canary=canary,
                facts=facts_between(old.last.facts, last.facts),
                weights=old.last.digest != last.digest,
            )
        )
        self.before, self.level = old, new
        self.recent.clear()

    def _is_back(self, new: _Level, direction: int, noise: Noise) -> bool:
        """Whether the series is at the level before its last change again, or past it."""
        if self.before is None or self.changes[-1].direction == direction:
            return False
        left = compare(new.values, self.before.values, noise)
        return not left.beyond(MOVED) or left.direction == direction

    def _canary_at(self, level: _Level) -> Values | None:
        """The canary in the nights in which a level was measured."""
        nights = dict.fromkeys(p.measured_in for p in level.nights)
        there = [self.canary[n].values for n in nights if n in self.canary]
        return mean_of(there) if there else None

    def _canary_between(self, new: _Level, old: _Level, noise: Noise) -> Shift | None:
        now, then = self._canary_at(new), self._canary_at(old)
        return None if now is None or then is None else compare(now, then, noise)

    def _cause(self, new: _Level, old: _Level, canary: Shift | None, noise: Noise) -> Cause:
        now, then = self._canary_at(new), self._canary_at(old)
        if canary is None or now is None or then is None:
            return "unclear"
        # Nights of both: the model's two and the canary's two.
        rest = shift_of(apart(new.values, old.values, now, then), noise, nights=4)
        if canary.beyond(MOVED):
            return "unclear" if rest.beyond(MOVED) else "drift"
        return "model" if rest.beyond(CLAIMED) else "unclear"


def facts_between(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that are not what they were: name -> (before, now)."""
    names = sorted({*then, *now})
    return {n: (then.get(n, ""), now.get(n, "")) for n in names if then.get(n) != now.get(n)}


def worth_telling(changes: Sequence[Change], when: When, *, canary: bool) -> list[Change]:
    """Those changes that somebody is to hear of: drift from the canary's series alone, others in
    the direction that matters, and recoveries from what was told."""
    told: list[Change] = []
    open_ = False
    for change in changes:
        matters = canary or when == "any" or (when == "rise") == (change.direction > 0)
        ours = canary or change.cause != "drift"
        if (change.kind == "recovery" and open_) or (change.kind == "change" and matters and ours):
            told.append(change)
        if ours:
            open_ = change.kind == "change" and matters
    return told
