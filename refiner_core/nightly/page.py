"""The trend page of a nightly evaluation: one HTML file that needs nothing but a browser.

In: series as they were judged, alerts, what was missed. Out: the page's text. It has no script, and
a content security policy that forbids all requests; colours and type are those of reports of
sweeps. Everything is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from markupsafe import Markup

from refiner_core.nightly.changes import Series
from refiner_core.nightly.definition import Nightly, Row
from refiner_core.report.drawing import Line, Plot, line_of
from refiner_core.report.pages import base_style, read, template_of
from refiner_core.report.printing import number


@dataclass(frozen=True)
class Reading:
    """A history as it stands; ``missed`` maps nights to checkpoints without a number and why."""

    nightly: Nightly
    rows: tuple[Row, ...]
    series: tuple[Series, ...]
    alerts: tuple[Mapping[str, Any], ...]
    missed: Mapping[str, Mapping[str, str]]
    nights: tuple[str, ...] = ()


#: Nights that are named below a drawing, about.
_NAMED = 8


def trend_page(trends: Reading, made_at: str) -> str:
    """The page's text."""
    nights = sorted({r.night for s in trends.series for r in s.rows} | set(trends.missed))
    text = template_of(__package__, "trends.html.jinja").render(
        t=trends,
        made_at=made_at,
        style=Markup(base_style() + read(__package__, "trends.css")),
        nights=nights,
        groups=_groups(trends.series),
        open_alerts=open_alerts(trends.alerts),
    )
    return text.encode("utf-8", "replace").decode()


def open_alerts(alerts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each series the last alert, where it is no recovery."""
    last = {alert["series"]: alert for alert in alerts}
    return [alert for alert in last.values() if alert["kind"] != "recovery"]


def _groups(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Series that may stand side by side: one protocol, decoding and metric; the newest first."""
    grouped: dict[tuple[str, ...], list[Series]] = {}
    for one in series:
        grouped.setdefault(one.key[1:], []).append(one)
    newest = {key: max(s.rows[-1].night for s in found) for key, found in grouped.items()}
    shown = []
    for key in sorted(grouped, key=lambda k: newest[k], reverse=True):
        found = grouped[key]
        lines = [_line(s, i) for i, s in enumerate(found)]
        plot = Plot(lines, range(len(found)), key[2], 960, 190, (68, 24, 14, 40))
        if plot.values is None:
            continue
        nights = sorted({row.night for s in found for row in s.rows})
        named = nights[:: max(1, round(len(nights) / _NAMED))]
        shown.append(
            {
                **dict(zip(("protocol", "decoding", "metric"), key, strict=True)),
                "protocol_name": found[0].protocol_name,
                "plot": plot,
                "named": [(plot.x(_day(night)), night[5:]) for night in named],
                "series": [_series(s, plot, line) for s, line in zip(found, lines, strict=True)],
            }
        )
    return shown


def _day(night: str) -> int:
    return date.fromisoformat(night).toordinal()


def _line(series: Series, index: int) -> Line:
    numbers = [row.numbers[series.key.metric] for row in series.rows]
    middle, low, high = ([n.get(part) for n in numbers] for part in ("value", "low", "high"))
    return line_of([_day(r.night) for r in series.rows], middle, (low, high), index=index)


def _series(series: Series, plot: Plot, line: Line) -> dict[str, Any]:
    last, spread = series.rows[-1], series.noise.spread
    rows = {_day(row.night): row for row in series.rows}
    return {
        "checkpoint": series.key.checkpoint,
        "title": series.title,
        "canary": series.canary,
        "source": last.source,
        "rows": series.rows,
        "last": number(last.numbers[series.key.metric]["value"]),
        "noise": number(spread) if series.canary and spread else "",
        "points": [(plot.x(d), plot.y(v), rows[d], number(v)) for d, v, *_ in line.known],
        "paths": plot.paths(line),
        "told": [(plot.x(_day(change.night)), change) for change in series.told],
    }
