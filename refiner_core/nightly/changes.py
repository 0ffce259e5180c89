"""Detection of changes, and their causes, from the nights of one series in order.

In: :class:`NightPoint` values of a series and of the canary under the same protocol and metric.
Out: :class:`Change` values, each reported once.

Later nights are compared with a *level*: initially the first night. A night counts if its
difference from the level, paired on prompts, is beyond three errors (see below) and not
smaller than the relevant minimum. If two of the last three nights count, in the same direction,
that is a change, and the mean of these nights is the new level; if it returns to the previous
level, or past it, it is a *recovery*. Later nights are compared with the new level, so a change
is reported once.

The canary, between the same nights, shows the cause:

======================  =========================================================================
the canary has moved    cause
======================  =========================================================================
no                      ``model``: other weights
as much                 ``drift`` of judge or machines; reported once, as a change of the canary
less, more, otherwise   ``unclear``: it drifted, and the rest cannot be separated
was not measured        ``unclear``
======================  =========================================================================

A repeated number (same weights, same protocol) counts in every night that has it, though it
was measured once: the state of the model persists, and the three errors guard against chance.

The prompts are the same every night, so their difficulty cancels out: per prompt, now minus
then, and a t interval over prompts (:class:`NightShift`). This misses effects that move all prompts
at once (a server under load, other batches). The canary shows them: its weights never change, so
the spread of its own nights is pure noise. It is estimated from *successive* nights (their median
absolute difference), so that one real shift of the canary does not count as spread. A difference
must exceed both, and a spread known from few nights must be exceeded by far: at first only large
changes count.

Another protocol is another series: their numbers are never compared. The text of alerts is made
here, too (:func:`alert_of`).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.records import picked, to_json
from refiner_core.evaluation.statistics import by_prompt
from refiner_core.nightly.definition import Alerts, NightRow, When

Floats = npt.NDArray[np.float64]
#: In units of the error: beyond it a night counts; a claim about weights needs ``CLAIMED`` beyond
#: the canary's shift; below ``MOVED`` a shift does not count as a move.
BEYOND, CLAIMED, MOVED = 3.0, 2.5, 2.0
#: Median of |N(0, 2 s^2)|, in units of s.
_MEDIAN_DIFFERENCE = 0.9538725524
#: Successive differences per degree of freedom: their median has 37 % of the
#: efficiency of a standard deviation, and neighbours share a night.
_STEPS_A_DEGREE = 2


class Values(NamedTuple):
    """Means per prompt; ``prompts`` are their ids, in the same order as ``values``."""

    prompts: tuple[str, ...]
    values: Floats

    @classmethod
    def of(cls, prompts: Sequence[str], values: Sequence[float]) -> Values:
        """From plain lists, in any order."""
        ordered = sorted(zip(prompts, values, strict=True))
        return cls(tuple(p for p, _ in ordered), np.array([v for _, v in ordered], dtype=float))

    @property
    def mean(self) -> float:
        """Over prompts."""
        return float(self.values.mean()) if len(self.values) else math.nan


class NightNoise(NamedTuple):
    """Spread of one night's mean beyond that over prompts, and its precision."""

    spread: float = 0.0
    freedom: int = 1


class NightShift(NamedTuple):
    """Now minus then over ``n`` common prompts.

    ``error`` of the mean over prompts, and ``noise`` of the included nights.
    """

    difference: float
    error: float
    n: int
    noise: NightNoise = NightNoise()

    def beyond(self, sigmas: float) -> bool:
        """True if it exceeds ``sigmas`` errors of both kinds, at the tails of t distributions:
        few prompts, or few nights, require more."""
        return self.n > 1 and abs(self.difference) > self.margin(sigmas)

    def margin(self, sigmas: float) -> float:
        """The threshold that it must exceed."""
        prompts = critical(sigmas, max(self.n, 2) - 1) * self.error
        if self.noise.spread == 0:
            return prompts
        return max(prompts, critical(sigmas, self.noise.freedom) * self.noise.spread)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval over prompts."""
        half = critical(1.959964, max(self.n, 2) - 1) * self.error
        return self.difference - half, self.difference + half

    @property
    def direction(self) -> int:
        """1 up, -1 down, 0."""
        return (self.difference > 0) - (self.difference < 0)


_NONE = NightNoise()


def compare(now: Values, then: Values, noise: NightNoise = _NONE) -> NightShift:
    """Now minus then on the common prompts; ``noise`` is that of one night."""
    _, (new, old) = _paired(now, then)
    return shift_of(new - old, noise)


def shift_of(differences: Floats, noise: NightNoise = _NONE, nights: int = 2) -> NightShift:
    """The mean of differences per prompt; ``nights`` is the number of nights whose noise it has."""
    n = len(differences)
    if n < 2:
        return NightShift(float(differences.sum()), math.inf, n, noise)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    whole = NightNoise(math.sqrt(nights) * noise.spread, noise.freedom)
    return NightShift(float(differences.mean()), error, n, whole)


def apart(now: Values, then: Values, canary_now: Values, canary_then: Values) -> Floats:
    """Per prompt, the model's shift minus the canary's between the same nights."""
    _, (new, old, after, before) = _paired(now, then, canary_now, canary_then)
    return (new - old) - (after - before)


def night_noise(means: Sequence[float]) -> NightNoise:
    """Spread of one night's mean, from the canary's nights so far, in order."""
    if len(means) < 2:
        return _NONE
    steps = np.abs(np.diff(np.asarray(means, dtype=float)))
    freedom = 1 + len(steps) // _STEPS_A_DEGREE
    return NightNoise(float(np.median(steps)) / _MEDIAN_DIFFERENCE, freedom)


def mean_of(nights: Sequence[Values]) -> Values:
    """Means per prompt over several nights, on the common prompts."""
    prompts, values = _paired(*nights)
    return Values(prompts, np.mean(values, axis=0))


@functools.cache
def critical(sigmas: float, freedom: int) -> float:
    """The t quantile with the same tail probability as ``sigmas`` of a normal distribution."""
    from scipy.stats import norm, t

    return float(t.isf(norm.sf(sigmas), freedom))


def per_prompt(rows: Sequence[Mapping[str, Any]], metric: str) -> Values:
    """Means per prompt of a metric in per-sample rows; prompts without one are dropped."""
    found = by_prompt(rows, metric)
    return Values.of(list(found), [sum(v) / len(v) for v in found.values()])


def _paired(*nights: Values) -> tuple[tuple[str, ...], list[Floats]]:
    """The common prompts of all nights, and each night's values of them."""
    first = nights[0].prompts
    if all(night.prompts == first for night in nights):
        return first, [night.values for night in nights]
    tables = [dict(zip(night.prompts, night.values, strict=True)) for night in nights]
    common = tuple(p for p in first if all(p in table for table in tables))
    return common, [np.array([table[p] for p in common], dtype=float) for table in tables]


Cause = Literal["model", "drift", "unclear"]
#: Required number of counting nights, out of the last nights.
NEEDED, OF = 2, 3


@dataclass(frozen=True)
class NightPoint:
    """One night of a series.

    ``measured_in`` is the night whose conditions the values were made under (for a repeated
    number, the night of its measurement), ``facts`` may have changed beside the weights.
    """

    night: str
    measured_in: str
    digest: str
    values: Values
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One change of a series, reported once.

    Attributes
    ----------
    kind
        ``recovery`` if a series is back at the level before its last change, or past it.
    direction
        1 up, -1 down.
    night, nights, since
        The night of its detection; the nights that counted; the night of the level before.
    shift
        From the level before to the new one.
    canary
        The canary's shift between the same nights; None if it was not measured.
    facts
        Changes beside the weights: name -> (before, now).
    weights
        Whether the weights changed.
    """

    kind: Literal["change", "recovery"]
    cause: Cause
    direction: int
    night: str
    nights: tuple[str, ...]
    since: str
    shift: NightShift
    canary: NightShift | None
    facts: Mapping[str, tuple[str, str]]
    weights: bool

    def id_in(self, series: str) -> str:
        """An id that is equal for all readers of the same nights."""
        text = f"{series}|{self.kind}|{self.direction}|{self.nights[0]}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Level(NamedTuple):
    values: Values
    nights: tuple[NightPoint, ...]


def read_series(
    points: Sequence[NightPoint], canary: Sequence[NightPoint] | None, *, smallest: float = 0.0
) -> tuple[tuple[Change, ...], NightNoise]:
    """Changes of a series, from its first night to its last, and the canary's noise.

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
    return tuple(reader.changes), night_noise(list(reader.means.values()))


class _Reader:
    """State of the reader between two nights."""

    def __init__(
        self, points: Sequence[NightPoint], canary: Sequence[NightPoint] | None, smallest: float
    ) -> None:
        self.is_canary, self.smallest = canary is None, smallest
        frozen = points if canary is None else canary
        self.canary = {p.night: p.values for p in frozen}
        self.means = {night: values.mean for night, values in self.canary.items()}
        self.before: _Level | None = None
        self.changes: list[Change] = []
        self.recent: deque[tuple[int, NightPoint]] = deque(maxlen=OF)
        if points:
            self.level = _Level(points[0].values, (points[0],))

    def read(self, point: NightPoint) -> None:
        noise = night_noise([m for night, m in self.means.items() if night <= point.night])
        shift = compare(point.values, self.level.values, noise)
        counts = shift.beyond(BEYOND) and abs(shift.difference) >= self.smallest
        direction = shift.direction if counts else 0
        self.recent.append((direction, point))
        agreeing = [p for d, p in self.recent if d == direction]
        if direction and len(agreeing) >= NEEDED:
            self._change(direction, agreeing, noise)

    def _change(self, direction: int, agreeing: Sequence[NightPoint], noise: NightNoise) -> None:
        new = _Level(mean_of([p.values for p in agreeing]), tuple(agreeing))
        old, last = self.level, agreeing[-1]
        then = old.nights[-1]
        shift = compare(new.values, old.values, noise)
        cause, canary = self._cause(new, old, noise)
        back = self._is_back(new, direction, noise)
        self.changes.append(
            Change(
                kind="recovery" if back else "change",
                cause=cause,
                direction=direction,
                night=last.night,
                nights=tuple(p.night for p in agreeing),
                since=then.night,
                shift=shift,
                canary=canary,
                facts=moved(then.facts, last.facts),
                weights=then.digest != last.digest,
            )
        )
        self.before, self.level = old, new
        self.recent.clear()

    def _is_back(self, new: _Level, direction: int, noise: NightNoise) -> bool:
        """True if the series is back at the level before its last change, or past it."""
        if self.before is None or self.changes[-1].direction == direction:
            return False
        left = compare(new.values, self.before.values, noise)
        return not left.beyond(MOVED) or left.direction == direction

    def _canary_at(self, level: _Level) -> Values | None:
        """The canary's values in the nights of a level."""
        nights = dict.fromkeys(p.measured_in for p in level.nights)
        there = [self.canary[n] for n in nights if n in self.canary]
        return mean_of(there) if there else None

    def _cause(
        self, new: _Level, old: _Level, noise: NightNoise
    ) -> tuple[Cause, NightShift | None]:
        """The cause of a change, and the canary's shift if it was measured."""
        if self.is_canary:
            return "drift", None
        now, then = self._canary_at(new), self._canary_at(old)
        if now is None or then is None:
            return "unclear", None
        canary = compare(now, then, noise)
        # Nights of both: the model's two and the canary's two.
        rest = shift_of(apart(new.values, old.values, now, then), noise, nights=4)
        if canary.beyond(MOVED):
            return ("unclear" if rest.beyond(MOVED) else "drift"), canary
        return ("model" if rest.beyond(CLAIMED) else "unclear"), canary


def moved(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Changed facts: name -> (before, now)."""
    names = [n for n in {**then, **now} if then.get(n) != now.get(n)]
    return {n: (then.get(n, ""), now.get(n, "")) for n in names}


def reportable(changes: Sequence[Change], when: When, *, canary: bool) -> list[Change]:
    """Changes to report: drift from the canary's series only, others in the relevant direction,
    and recoveries of reported changes."""
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


#: Values of a row's metric by prompt; None if they were not kept.
ValuesOf = Callable[[NightRow, str], Values | None]


class SeriesKey(NamedTuple):
    """Key of comparable nights. ``protocol`` is that of the metric."""

    checkpoint: str
    protocol: str
    decoding: str
    metric: str

    @property
    def text(self) -> str:
        """One line, unique in a history."""
        return " ".join(self)


@dataclass(frozen=True)
class NightSeries:
    """One checkpoint, protocol and metric, night by night.

    ``rows`` are all of its nights, ``told`` the reported changes; ``noise`` is
    the canary's.
    """

    key: SeriesKey
    canary: bool
    protocol_name: str
    rows: tuple[NightRow, ...]
    noise: NightNoise
    told: tuple[Change, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.key.checkpoint} · {self.key.metric} ({self.key.decoding})"


def series_of(nights: Sequence[NightRow], values_of: ValuesOf, alerts: Alerts) -> list[NightSeries]:
    """All series of the watched metrics, the canary's first."""
    grouped: dict[SeriesKey, list[NightRow]] = {}
    for row in sorted(nights, key=lambda r: (not r.canary, r.night)):
        for metric in alerts.metrics:
            if metric in row.numbers:
                protocol = str(row.numbers[metric]["protocol"])
                key = SeriesKey(row.checkpoint, protocol, row.decoding, metric)
                grouped.setdefault(key, []).append(row)
    points = {key: _points(found, key.metric, values_of) for key, found in grouped.items()}
    canaries = {k[1:]: points[k] for k, found in grouped.items() if found[-1].canary}
    series = []
    for key, found in grouped.items():
        last, canary = found[-1], canaries.get(key[1:], [])
        frozen = None if last.canary else canary
        changes, noise = read_series(points[key], frozen, smallest=alerts.smallest)
        told = tuple(reportable(changes, alerts.when, canary=last.canary))
        series.append(NightSeries(key, last.canary, last.protocol_name, tuple(found), noise, told))
    return series


def _points(rows: Sequence[NightRow], metric: str, values_of: ValuesOf) -> list[NightPoint]:
    """Rows with known values by prompt; each evaluation is read once."""
    known: dict[str, Values | None] = {}
    found = []
    for row in rows:
        if row.stage not in known:
            known[row.stage] = values_of(row, metric)
        values = known[row.stage]
        if values is not None and len(values.prompts):
            found.append(NightPoint(row.night, row.measured_in, row.digest, values, row.facts))
    return found


def changed_alongside(rows: Sequence[NightRow]) -> dict[str, dict[str, tuple[str, str]]]:
    """Night -> changes since the series' previous night: weights and facts."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for one, other in pairwise(rows):
        facts = moved(one.facts, other.facts)
        if one.digest != other.digest:
            facts = {"weights": (one.source, other.source), **facts}
        if facts:
            found[other.night] = facts
    return found


#: Limit on names of other changes in an alert.
_MOST_FACTS = 8


def alert_of(
    nightly: str, series: NightSeries, change: Change, beside: Sequence[str]
) -> dict[str, Any]:
    """An alert as JSON: for people (``title``, ``text``) and for scripts.

    Parameters
    ----------
    beside
        Other checkpoints measured under the same conditions, for drift.
    """
    key, shift = series.key, change.shift
    low, high = shift.interval
    return {
        "version": 1,
        "nightly": nightly,
        "series": key.text,
        **key._asdict(),
        "protocol_name": series.protocol_name,
        **picked(change, "kind", "cause", "night", "nights", "since"),
        "direction": "rise" if change.direction > 0 else "drop",
        "difference": shift.difference,
        "low": low,
        "high": high,
        "n": shift.n,
        "noise": shift.noise.spread,
        "canary": None if change.canary is None else change.canary.difference,
        "weights_changed": change.weights,
        "changed": to_json(change.facts),
        "title": _title(nightly, series, change),
        "text": " ".join(_sentences(series, change, beside)),
    }


#: Sentence about a change by its cause; ``{0}`` is the canary's shift.
_CAUSES = {
    "drift": "The canary's weights are unchanged: this is no change of a model.",
    "model": "The canary has not moved: the model has changed.",
    "unclear": "The canary moved by {0:+.4g} meanwhile, and the rest of the change is not "
    "clearly the model's.",
    "unmeasured": "The canary was not measured in one of these nights, so a change of the model "
    "cannot be told from one of the judge or the machines.",
}


def _title(nightly: str, series: NightSeries, change: Change) -> str:
    what = f"{series.key.metric} ({series.key.decoding})"
    of = f"{what} of {series.key.checkpoint}"
    if change.kind == "recovery":
        return f"{nightly}: {of} is back where it was, or past it"
    way = "rose" if change.direction > 0 else "dropped"
    amount = f"{way} by {abs(change.shift.difference):.4g}"
    if change.cause == "drift":
        return f"{nightly}: the judge or the machines have drifted: {what} of the canary {amount}"
    return f"{nightly}: {of} {amount}" + ("; the cause is unclear" * (change.cause == "unclear"))


def _sentences(series: NightSeries, change: Change, beside: Sequence[str]) -> list[str]:
    (low, high), shift = change.shift.interval, change.shift
    moved = 0.0 if change.canary is None else change.canary.difference
    cause = "unmeasured" if change.cause == "unclear" and change.canary is None else change.cause
    found = [
        f"{shift.difference:+.4g} (95 %: {low:+.4g} to {high:+.4g}) against the night of "
        f"{change.since}, on {shift.n} prompts, in {len(change.nights)} of the last nights "
        f"({', '.join(change.nights)}).",
        _CAUSES[cause].format(moved),
    ]
    if cause == "drift" and beside:
        found.append(f"Later numbers do not compare with older ones: {', '.join(beside)}.")
    facts = dict(change.facts)
    if change.weights:
        sources = {r.night: r.source for r in series.rows}
        facts = {"weights": (sources.get(change.since, ""), sources.get(change.night, "")), **facts}
    said = [f"{n}: {a or '(none)'} -> {b or '(none)'}" for n, (a, b) in facts.items()]
    if said:
        found.append(f"Also changed: {'; '.join(said[:_MOST_FACTS])}.")
    elif cause == "drift":
        found.append("No other recorded fact has changed (judge, code, versions, host).")
    return found
