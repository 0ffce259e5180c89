"""The trend page of a nightly evaluation: one HTML file that needs nothing but a browser.

In: series as they were judged, alerts, what was missed. Out: the page's text. It has no script, and
a content security policy that forbids all requests; colours and type are those of reports of
sweeps. Everything is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from refiner_core.nightly.drawing import LETTERS, Frame, draw, scale_of
from refiner_core.nightly.series import Series, changed_beside
from refiner_core.nightly.values import Row
from refiner_core.report.pages import base_style, read
from refiner_core.report.printing import number

#: Nights whose numbers stand in words below a drawing.
_LAST = 30


@dataclass(frozen=True)
class Trends:
    """What the page shows; ``missed`` maps nights to checkpoints and why they have no number."""

    name: str
    schedule: str
    series: Sequence[Series]
    alerts: Sequence[Mapping[str, Any]]
    missed: Mapping[str, Mapping[str, str]]
    made_at: str


def trend_page(trends: Trends) -> str:
    """The page's text."""
    nights = sorted({r.night for s in trends.series for r in s.rows} | set(trends.missed))
    return _template().render(
        t=trends,
        style=Markup(base_style() + read(__package__, "trends.css")),
        nights=nights,
        groups=_groups(trends.series, nights),
        open_alerts=open_alerts(trends.alerts),
        letters=LETTERS,
    ).encode("utf-8", "replace").decode()  # fmt: skip


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
    first = {key: min(s.rows[0].night for s in found) for key, found in grouped.items()}
    shown = []
    for key in sorted(grouped, key=lambda k: newest[k], reverse=True):
        scale = scale_of(grouped[key])
        if scale is None:
            continue
        same = [k for k in grouped if k != key and _stands_for(grouped[k], grouped[key])]
        frame = Frame(nights, scale)
        shown.append(
            {
                "protocol": key[0],
                "decoding": key[1],
                "metric": key[2],
                "protocol_name": grouped[key][0].protocol_name,
                "older": any(newest[k] > newest[key] for k in same),
                "before": any(first[k] < first[key] for k in same),
                "since": first[key],
                "series": [_series(s, frame) for s in grouped[key]],
            }
        )
    return shown


def _stands_for(one: Sequence[Series], other: Sequence[Series]) -> bool:
    """Whether one protocol came in the place of the other: the same file, metric and decoding."""
    a, b = one[0], other[0]
    return a.key[2:] == b.key[2:] and a.rows[0].protocol_set == b.rows[0].protocol_set


def _series(series: Series, frame: Frame) -> dict[str, Any]:
    last = series.rows[-1]
    spread = series.judged.noise.spread
    changed = changed_beside(series.rows)
    metric = series.key.metric
    return {
        "checkpoint": series.key.checkpoint,
        "canary": series.canary,
        "source": last.source,
        "last": number(last.numbers[metric]["value"]),
        "noise": number(spread) if series.canary and spread else "",
        "drawing": draw(series, frame),
        "numbers": [_number(r, metric, changed) for r in reversed(series.rows[-_LAST:])],
    }


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


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(read(__package__, "trends.html.jinja"))
