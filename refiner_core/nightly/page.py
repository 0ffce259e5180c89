"""The trend page of a nightly evaluation: one HTML file that needs only a browser.

In: analysed series, alerts, missing numbers. Out: the page's text, in the frame of
report pages (:mod:`refiner_core.report.pages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from refiner_core.nightly.changes import NightSeries, changed_alongside
from refiner_core.nightly.definition import Nightly, NightRow
from refiner_core.report.drawing import Series as Line
from refiner_core.report.drawing import chart, summary
from refiner_core.report.pages import parts_of
from refiner_core.report.printing import finite, number


@dataclass(frozen=True)
class HistoryView:
    """A history; ``missed`` maps nights to checkpoints without a number, with reasons."""

    nightly: Nightly
    rows: tuple[NightRow, ...]
    series: tuple[NightSeries, ...]
    alerts: tuple[Mapping[str, Any], ...]
    missed: Mapping[str, Mapping[str, str]]
    nights: tuple[str, ...] = ()


#: Views of the page, by anchor.
VIEWS = (("summary", "Trends"), ("alerts", "Alerts"), ("missed", "Without a number"))


def trend_page(trends: HistoryView, made_at: str) -> str:
    """The page's text."""
    parts = parts_of(__package__, charts=bool(trends.series))
    text: str = parts["template"].render(
        t=trends,
        report={"made_at": made_at},
        parts=parts,
        views=VIEWS,
        nights=sorted({r.night for s in trends.series for r in s.rows} | set(trends.missed)),
        groups=_groups(trends.series),
        open_alerts=open_alerts(trends.alerts),
    )
    return text.encode("utf-8", "replace").decode()


def open_alerts(alerts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last alert of each series, unless it is a recovery."""
    last = {alert["series"]: alert for alert in alerts}
    return [alert for alert in last.values() if alert["kind"] != "recovery"]


def _groups(series: Sequence[NightSeries]) -> list[dict[str, Any]]:
    """Series of one chart: one protocol, decoding and metric; the newest first."""
    grouped: dict[tuple[str, ...], list[NightSeries]] = {}
    for one in series:
        grouped.setdefault(one.key[1:], []).append(one)
    newest = {key: max(s.rows[-1].night for s in found) for key, found in grouped.items()}
    shown = []
    for key in sorted(grouped, key=lambda k: newest[k], reverse=True):
        found = grouped[key]
        changed = [(n, s.key.checkpoint, w) for s in found for n, w in _changes(s).items()]
        told = sorted({_day(change.night) for s in found for change in s.told})
        lines = [_line(s, i) for i, s in enumerate(found, start=1)]
        shown.append(
            {
                **dict(zip(("protocol", "decoding", "metric"), key, strict=True)),
                "protocol_name": found[0].protocol_name,
                "chart": chart(lines, of=len(series), marks=told, days=True),
                "changes": sorted(changed),
                "series": [_shown(s, line) for s, line in zip(found, lines, strict=True)],
            }
        )
    return shown


def _day(night: str) -> float:
    return datetime.fromisoformat(night).replace(tzinfo=UTC).timestamp() * 1000


def _changes(series: NightSeries) -> dict[str, str]:
    """Night -> changes since the night before."""
    return {
        night: "; ".join(f"{name}: {old} -> {new}" for name, (old, new) in facts.items())
        for night, facts in changed_alongside(series.rows).items()
    }


def _line(series: NightSeries, index: int) -> Line:
    numbers = [row.numbers[series.key.metric] for row in series.rows]
    middle, low, high = ([n.get(part) for n in numbers] for part in ("value", "low", "high"))
    changes = _changes(series)
    notes = [
        f"{row.source}{', late' if row.late else ''}"
        f"{'' if row.fresh else ', unchanged: the number still holds'} {changes.get(row.night, '')}"
        for row in series.rows
    ]
    days = [_day(row.night) for row in series.rows]
    return Line(series.key.checkpoint, days, middle, low, high, index, notes)


def _shown(series: NightSeries, line: Line) -> dict[str, Any]:
    spread = series.noise.spread
    nights = [row.night for row in series.rows]
    before, last = map(finite, [None, *line.values][-2:])
    change = None if before is None or last is None else last - before
    return {
        "change": change,
        **summary(line._replace(steps=nights)),
        "canary": series.canary,
        "source": series.rows[-1].source,
        "noise": number(spread) if series.canary and spread else "",
    }
