"""From rows of a history to series, and what each of them says.

In: rows, a way to their values prompt by prompt. Out: :class:`Series` in the order of the rows,
judged. Another protocol is another series: its numbers are never held against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from refiner_core.nightly.changes import Change, Judged, Point, read_series, worth_telling
from refiner_core.nightly.compare import Values
from refiner_core.nightly.values import Alerts, Row

#: Values of a row's metric by prompt; None where they were not kept.
ValuesOf = Callable[[Row, str], Values | None]


class Key(NamedTuple):
    """What makes two nights comparable. ``protocol`` is that of the metric."""

    checkpoint: str
    protocol: str
    decoding: str
    metric: str

    @property
    def text(self) -> str:
        """One line, unique in a history."""
        return " ".join(self)


@dataclass(frozen=True)
class Series:
    """One checkpoint, protocol and metric, night by night.

    ``rows`` are all of its nights, ``told`` the changes that somebody is to hear of.
    """

    key: Key
    canary: bool
    protocol_name: str
    rows: tuple[Row, ...]
    judged: Judged
    told: tuple[Change, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.key.checkpoint} · {self.key.metric} ({self.key.decoding})"


def series_of(rows: Sequence[Row], values_of: ValuesOf, alerts: Alerts) -> list[Series]:
    """All series of the watched metrics, the canary's first."""
    grouped: dict[Key, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (not r.canary, r.night)):
        for metric in alerts.metrics:
            if metric in row.numbers:
                protocol = str(row.numbers[metric]["protocol"])
                key = Key(row.checkpoint, protocol, row.decoding, metric)
                grouped.setdefault(key, []).append(row)
    points = {key: _points(found, key.metric, values_of) for key, found in grouped.items()}
    canaries = {k[1:]: points[k] for k, found in grouped.items() if found[-1].canary}
    return [
        _judged(key, found, points[key], canaries.get(key[1:], []), alerts)
        for key, found in grouped.items()
    ]


def _judged(
    key: Key,
    rows: Sequence[Row],
    points: Sequence[Point],
    canary: Sequence[Point],
    alerts: Alerts,
) -> Series:
    is_canary = rows[-1].canary
    judged = read_series(points, None if is_canary else canary, smallest=alerts.smallest)
    told = worth_telling(judged.changes, alerts.when, canary=is_canary)
    return Series(key, is_canary, rows[-1].protocol_name, tuple(rows), judged, tuple(told))


def _points(rows: Sequence[Row], metric: str, values_of: ValuesOf) -> list[Point]:
    """Rows whose values are known by prompt; each evaluation's are looked up once."""
    known: dict[str, Values | None] = {}
    found = []
    for row in rows:
        if row.stage not in known:
            known[row.stage] = values_of(row, metric)
        values = known[row.stage]
        if values is not None and len(values.prompts):
            found.append(Point(row.night, row.measured_in, row.digest, values, row.facts))
    return found


def changed_beside(rows: Sequence[Row]) -> dict[str, dict[str, tuple[str, str]]]:
    """Night -> what is not what it was in the series' night before: weights and facts."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for one, other in pairwise(rows):
        moved = _moved(one.facts, other.facts)
        if one.digest != other.digest:
            moved = {"weights": (one.source, other.source), **moved}
        if moved:
            found[other.night] = moved
    return found


def _moved(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    names = [n for n in {**then, **now} if then.get(n) != now.get(n)]
    return {n: (then.get(n, ""), now.get(n, "")) for n in names}
