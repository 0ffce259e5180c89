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

from refiner_core.nightly.changes import Series, changed_beside
from refiner_core.nightly.definition import Nightly, Row
from refiner_core.report.drawing import Scale, scale_for
from refiner_core.report.pages import base_style, read, template_of
from refiner_core.report.printing import number

#: Nights whose numbers stand in words below a drawing.
_LAST = 30


@dataclass(frozen=True)
class Reading:
    """A history as it stands; ``missed`` maps nights to checkpoints without a number and why."""

    nightly: Nightly
    rows: tuple[Row, ...]
    series: tuple[Series, ...]
    alerts: tuple[Mapping[str, Any], ...]
    missed: Mapping[str, Mapping[str, str]]
    nights: tuple[str, ...] = ()


class _Frame:
    """Places of nights and numbers on the drawings of a group; ``nights`` are all of the page, in
    order: the same place in every drawing."""

    width, height, left, right, top, bottom = 960, 190, 56, 12, 14, 40

    def __init__(self, nights: Sequence[str], scale: Scale) -> None:
        days = [date.fromisoformat(n).toordinal() for n in nights]
        self.first, self.last = min(days), max(days)
        self.scale = scale
        self.named = nights[:: max(1, round(len(nights) / min(8, len(nights))))]

    def x(self, night: str) -> float:
        """Pixels from the left."""
        day = date.fromisoformat(night).toordinal()
        share = (day - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return self.left + 12 + share * (self.width - self.left - self.right - 24)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.scale.low) / (self.scale.high - self.scale.low)
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)


def trend_page(trends: Reading, made_at: str) -> str:
    """The page's text."""
    nights = sorted({r.night for s in trends.series for r in s.rows} | set(trends.missed))
    text = template_of(__package__, "trends.html.jinja").render(
        t=trends,
        made_at=made_at,
        style=Markup(base_style() + read(__package__, "trends.css")),
        nights=nights,
        groups=_groups(trends.series, nights),
        open_alerts=open_alerts(trends.alerts),
    )
    return text.encode("utf-8", "replace").decode()


def open_alerts(alerts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each series the last alert, where it is no recovery."""
    last = {alert["series"]: alert for alert in alerts}
    return [alert for alert in last.values() if alert["kind"] != "recovery"]


def _groups(series: Sequence[Series], nights: Sequence[str]) -> list[dict[str, Any]]:
    """Series that may stand side by side: one protocol, decoding and metric; the newest first."""
    grouped: dict[tuple[str, ...], list[Series]] = {}
    for one in series:
        grouped.setdefault(one.key[1:], []).append(one)
    newest = {key: max(s.rows[-1].night for s in found) for key, found in grouped.items()}
    shown = []
    for key in sorted(grouped, key=lambda k: newest[k], reverse=True):
        values = (
            row.numbers[s.key.metric].get(part)
            for s in grouped[key]
            for row in s.rows
            for part in ("value", "low", "high")
        )
        scale = scale_for(values)
        if scale is None:
            continue
        frame = _Frame(nights, scale)
        shown.append(
            {
                "protocol": key[0],
                "decoding": key[1],
                "metric": key[2],
                "protocol_name": grouped[key][0].protocol_name,
                "frame": frame,
                "series": [_series(s, frame) for s in grouped[key]],
            }
        )
    return shown


def _series(series: Series, frame: _Frame) -> dict[str, Any]:
    last, metric = series.rows[-1], series.key.metric
    spread = series.noise.spread
    changed = changed_beside(series.rows)
    numbers = [(row, row.numbers[metric]) for row in series.rows]
    return {
        "checkpoint": series.key.checkpoint,
        "title": series.title,
        "canary": series.canary,
        "source": last.source,
        "rows": series.rows,
        "last": number(last.numbers[metric]["value"]),
        "noise": number(spread) if series.canary and spread else "",
        "points": [
            (frame.x(row.night), frame.y(shown["value"]), row, number(shown["value"]))
            for row, shown in numbers
            if shown.get("value") is not None
        ],
        "band": _band(
            [
                (frame.x(row.night), frame.y(shown["low"]), frame.y(shown["high"]))
                for row, shown in numbers
                if shown.get("low") is not None and shown.get("high") is not None
            ]
        ),
        "marks": [(frame.x(night), night, facts) for night, facts in changed.items()],
        "told": [(frame.x(change.night), change) for change in series.told],
        "numbers": [_number(r, metric, changed) for r in reversed(series.rows[-_LAST:])],
    }


def _band(ends: list[tuple[float, float, float]]) -> str:
    """The interval as the corners of a polygon; of one night some pixels wide."""
    if len(ends) == 1:
        ((x, low, high),) = ends
        ends = [(x - 5, low, high), (x + 5, low, high)]
    there = [f"{x:.1f},{high:.1f}" for x, _, high in ends]
    return " ".join(there + [f"{x:.1f},{low:.1f}" for x, low, _ in reversed(ends)])


def _number(
    row: Row, metric: str, changed: Mapping[str, Mapping[str, tuple[str, str]]]
) -> dict[str, str]:
    shown = row.numbers[metric]
    low, high = shown.get("low"), shown.get("high")
    how = "that night" if row.fresh else f"in {row.measured_in}" if row.measured_in else "elsewhere"
    names = changed.get(row.night, {})
    return {
        "night": row.night,
        "value": number(shown["value"]),
        "bounds": "" if low is None or high is None else f"{number(low)} to {number(high)}",
        "n": str(shown.get("n", "")),
        "how": how + (", late" if row.late else ""),
        "changed": "; ".join(
            f"{n}: {a or '(none)'} → {b or '(none)'}" for n, (a, b) in names.items()
        ),
    }
