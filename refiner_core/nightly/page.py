"""The trend page of a nightly evaluation: one HTML file that needs nothing but a browser.

In: series as they were judged, alerts, what was missed. Out: the page's text. It has no script, and
a content security policy that forbids all requests; colours and type are those of reports of
sweeps. Everything is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from refiner_core.nightly.changes import Series, changed_beside
from refiner_core.nightly.definition import Row
from refiner_core.report.drawing import Scale, scale_for
from refiner_core.report.pages import base_style, read
from refiner_core.report.printing import number

_WIDTH, _HEIGHT = 960, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 14, 40
#: How facts are marked below the axis; the first that fits.
LETTERS: tuple[tuple[str, str], ...] = (
    ("W", "weights"),
    ("J", "judge"),
    ("C", "code"),
    ("V", "versions"),
    ("H", "host"),
)
_OF_FACT = {"weights": "W", "judge": "J", "code": "C", "versions": "V", "python": "V", "host": "H"}


def letters_of(changed: Mapping[str, object]) -> str:
    """The marks of facts that are not what they were."""
    found = {_OF_FACT.get(name.partition(".")[0], "") for name in changed}
    return "".join(letter for letter, _ in LETTERS if letter in found)


def values_in(series: Sequence[Series]) -> list[float | None]:
    """All that a shared scale has to hold."""
    found: list[float | None] = []
    for one in series:
        for row in one.rows:
            shown = row.numbers[one.key.metric]
            found += [shown.get("value"), shown.get("low"), shown.get("high")]
    return found


class Frame:
    """Where nights and numbers lie on a drawing.

    Parameters
    ----------
    nights
        All of the page, in order: the same place in every drawing.
    """

    def __init__(self, nights: Sequence[str], scale: Scale) -> None:
        days = [date.fromisoformat(n).toordinal() for n in nights]
        self.first, self.last = min(days), max(days)
        self.nights, self.scale = nights, scale

    def x(self, night: str) -> float:
        """Pixels from the left."""
        day = date.fromisoformat(night).toordinal()
        share = (day - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return _LEFT + 12 + share * (_WIDTH - _LEFT - _RIGHT - 24)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (value - self.scale.low) / (self.scale.high - self.scale.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def scale_of(series: Sequence[Series]) -> Scale | None:
    """One scale for all of a group."""
    return scale_for(values_in(series))


def draw(series: Series, frame: Frame) -> Markup:
    """The drawing of one series."""
    parts = [*_axes(frame), *_band(series, frame), *_line(series, frame)]
    parts += [*_changes(series, frame), *_points(series, frame), *_alerts(series, frame)]
    last = series.rows[-1]
    label = (
        f"{series.title}: {len(series.rows)} nights from {series.rows[0].night} to {last.night}, "
        f"last {number(last.numbers[series.key.metric]['value'])}"
    )
    kind = "of-canary" if series.canary else "of-model"
    return Markup(
        f'<svg class="chart {kind}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _axes(frame: Frame) -> Iterator[str]:
    for tick in frame.scale.ticks:
        y = frame.y(tick)
        text = f"{tick:.{frame.scale.decimals}f}"
        yield f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{text}</text>'
    wanted = min(8, len(frame.nights))
    step = max(1, round(len(frame.nights) / wanted))
    for night in frame.nights[::step]:
        yield f'<text x="{frame.x(night):.1f}" y="{_HEIGHT - 4}">{escape(night[5:])}</text>'


def _part(row: Row, metric: str, part: str) -> float | None:
    found = row.numbers[metric].get(part)
    return float(found) if isinstance(found, int | float) else None


def _band(series: Series, frame: Frame) -> Iterator[str]:
    metric = series.key.metric
    known = [
        (frame.x(r.night), _part(r, metric, "low"), _part(r, metric, "high")) for r in series.rows
    ]
    there = [(x, low, high) for x, low, high in known if low is not None and high is not None]
    if not there:
        return
    if len(there) == 1:
        x, low, high = there[0]
        there = [(x - 5, low, high), (x + 5, low, high)]
    upper = [f"{x:.1f},{frame.y(high):.1f}" for x, _, high in there]
    lower = [f"{x:.1f},{frame.y(low):.1f}" for x, low, _ in reversed(there)]
    yield f'<polygon class="band" points="{" ".join([*upper, *lower])}"/>'


def _line(series: Series, frame: Frame) -> Iterator[str]:
    places = [
        f"{frame.x(r.night):.1f},{frame.y(value):.1f}"
        for r in series.rows
        if (value := _part(r, series.key.metric, "value")) is not None
    ]
    yield f'<polyline class="line" points="{" ".join(places)}"/>'


def _points(series: Series, frame: Frame) -> Iterator[str]:
    for row in series.rows:
        value = _part(row, series.key.metric, "value")
        if value is None:
            continue
        kind = "fresh" if row.fresh else "kept"
        late = ", late" if row.late else ""
        title = escape(f"{row.night}: {number(value)}{late}\n{row.source}")
        yield (
            f'<circle class="{kind}" cx="{frame.x(row.night):.1f}" cy="{frame.y(value):.1f}" '
            f'r="3.5"><title>{title}</title></circle>'
        )


def _changes(series: Series, frame: Frame) -> Iterator[str]:
    for night, changed in changed_beside(series.rows).items():
        x, letters = frame.x(night), letters_of(changed)
        if not letters:
            continue
        words = "\n".join(f"{name}: {old} -> {new}" for name, (old, new) in changed.items())
        yield f'<line class="change" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - 26}"/>'
        yield (
            f'<text class="mark" x="{x:.1f}" y="{_HEIGHT - 18}">{letters}'
            f"<title>{escape(f'{night}')}\n{escape(words)}</title></text>"
        )


def _alerts(series: Series, frame: Frame) -> Iterator[str]:
    for change in series.told:
        x = frame.x(change.night)
        back = change.kind == "recovery"
        path = f"M{x:.1f} 12L{x + 6:.1f} 1H{x - 6:.1f}Z" if back else (
            f"M{x:.1f} 1L{x + 6:.1f} 12H{x - 6:.1f}Z"
        )  # fmt: skip
        title = escape(f"{change.night}: {change.kind} by {change.shift.difference:+.4g}")
        kind = "recovery" if back else "alert"
        yield f'<path class="{kind}" d="{path}"><title>{title}</title></path>'


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
