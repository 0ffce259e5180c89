"""Drawings of the page: strips (an interval with its seeds as points) and learning curves, as SVG.

In: numbers and a :class:`Scale`. Out: SVG as escaped markup, coloured by classes of the page's
style sheet. Places in a strip are percentages, so that it takes whatever width its column has. What
a drawing shows stands in words in its ``aria-label``, which is also what hovering shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from refiner_core.report.printing import finite, number
from refiner_core.report.sweep.document import Curve

#: Marks of a mean, by what a comparison says: told apart by form, not by colour alone.
SHAPES: Mapping[str, str] = {
    "better": "M0 -6 L6 5 L-6 5Z",
    "worse": "M0 6 L6 -5 L-6 -5Z",
    "not clear": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "judge moved": "M0 -6 L6 0 L0 6 L-6 0Z",
    "baseline": "M-5 -1.5H-1.5V-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5Z",
}
_MIDDLE = 13
STRIP_HEIGHT = 26
_MARGIN = 3.0


@dataclass(frozen=True)
class Scale:
    """From numbers to percentages of a width, with round numbers as ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int

    def place(self, value: float) -> float:
        """Where a number lies, in percent; what lies outside is put at the edge."""
        share = (value - self.low) / (self.high - self.low)
        return _MARGIN + (100 - 2 * _MARGIN) * min(1.0, max(0.0, share))


def scale_for(values: Iterable[float | None], ticks: int = 4) -> Scale | None:
    """A scale that holds all the numbers; None where there are none."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) / 10 or 0.5
        low, high = low - pad, high + pad
    step = _round_step((high - low) / ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return Scale(low, high, tuple(i * step for i in range(first, last + 1)), decimals)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 5) if rough <= m * power), 10 * power)


@dataclass(frozen=True)
class Strip:
    """What one strip shows: a mean, its interval, the seeds' numbers."""

    value: float | None
    low: float | None
    high: float | None
    points: tuple[float | None, ...]
    mark: str
    label: str
    zero: bool = False
    matters: float | None = None


def strip(shown: Strip, scale: Scale) -> Markup:
    """A strip; nothing at all where there is nothing to draw."""
    parts = []
    matters = finite(shown.matters)
    if shown.zero and matters:
        left, right = scale.place(-matters), scale.place(matters)
        parts.append(
            f'<rect class="eq" x="{left:.1f}%" width="{right - left:.1f}%" height="100%"/>'
        )
    if shown.zero:
        parts.append(_line("z", scale.place(0.0), scale.place(0.0), 0, STRIP_HEIGHT))
    low, high = finite(shown.low), finite(shown.high)
    mark = shown.mark if shown.mark in SHAPES else "not clear"
    name = mark.replace(" ", "-")
    if low is not None and high is not None:
        parts.append(_line(f"i {name}", scale.place(low), scale.place(high), _MIDDLE, _MIDDLE))
    for position, point in enumerate(shown.points):
        if (known := finite(point)) is not None:
            y = _MIDDLE + (-5, 5, -8, 8, 0)[position % 5]
            parts.append(f'<circle cx="{scale.place(known):.1f}%" cy="{y}" r="2.6"/>')
    if (value := finite(shown.value)) is not None:
        path = f'<path class="m {name}" d="{SHAPES[mark]}"/>'
        parts.append(
            f'<svg x="{scale.place(value):.1f}%" y="{_MIDDLE}" overflow="visible">{path}</svg>'
        )
    return Markup(
        f'<svg class="strip" role="img" tabindex="0" aria-label="{escape(shown.label)}">'
        + "".join(parts)
        + "</svg>"
    )


def axis(scale: Scale, *, signed: bool = False) -> Markup:
    """The numbers above a column of strips."""
    ticks = "".join(
        f'<text x="{scale.place(t):.1f}%" y="11">{number(t, scale.decimals, signed=signed)}</text>'
        + _line("t", scale.place(t), scale.place(t), 14, 18)
        for t in scale.ticks
    )
    return Markup(f'<svg class="axis" aria-hidden="true">{ticks}</svg>')


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}%" x2="{x2:.1f}%" y1="{y1}" y2="{y2}"/>'


# ---------------------------------------------------------------- dots of several arms


def dots(values: Sequence[tuple[int, str, float]], scale: Scale) -> Markup:
    """One strip with a mark for each arm: (its style, its name, its value)."""
    said = ", ".join(f"{name} {number(value)}" for _, name, value in values)
    marks = "".join(
        f'<svg x="{scale.place(value):.1f}%" y="{_MIDDLE}" overflow="visible" data-arm="{index}">'
        f'<path class="d s{style_of(index)}" d="{_DOTS[index % len(_DOTS)]}"/></svg>'
        for index, _, value in reversed(values)
    )
    return Markup(
        f'<svg class="strip" role="img" tabindex="0" aria-label="{escape(said)}">{marks}</svg>'
    )


_DOTS = (SHAPES["baseline"], *(SHAPES[k] for k in ("not clear", "better", "worse", "judge moved")))
_COLOURS = 7


def style_of(index: int) -> int:
    """The colour of an arm by its place among arms; the baseline (0) is ink."""
    return 0 if index == 0 else 1 + (index - 1) % _COLOURS


def dash_of(index: int) -> int:
    """Which dashes an arm's line has, so that colours may come again."""
    return 0 if index == 0 else (index - 1) // _COLOURS % 4


def swatch(index: int) -> Markup:
    """How an arm's line and its mark look, for legends."""
    return Markup(
        f'<svg class="swatch" width="34" height="14" aria-hidden="true">'
        f'<line class="l s{style_of(index)} k{dash_of(index)}" x1="0" x2="34" y1="7" y2="7"/>'
        f'<svg x="17" y="7" overflow="visible">'
        f'<path class="d s{style_of(index)}" d="{_DOTS[index % len(_DOTS)]}"/></svg></svg>'
    )


def dot(index: int) -> Markup:
    """How an arm's mark looks, for headings of columns."""
    path = f'<path class="d s{style_of(index)}" d="{_DOTS[index % len(_DOTS)]}"/>'
    return Markup(
        '<svg class="swatch" width="16" height="14" aria-hidden="true">'
        f'<svg x="8" y="7" overflow="visible">{path}</svg></svg>'
    )


# ---------------------------------------------------------------- curves

WIDTH, HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40


@dataclass(frozen=True)
class Drawn:
    """A curve with the place of its arm among arms, thinned to points that are drawn."""

    index: int
    curve: Curve
    picked: tuple[int, ...]


def curves(stage_metric: str, drawn: Sequence[Drawn], shown: frozenset[int]) -> Markup:
    """Curves of one metric over steps, each with its band. The axis holds those that are ``shown``;
    the others are there too, hidden until somebody chooses them and the page draws them anew."""
    steps = scale_for((float(s) for d in drawn for s in d.curve.steps), ticks=6)
    values = scale_for((v for d in drawn if d.index in shown for v in _extent(d.curve)), ticks=5)
    if steps is None or values is None:
        return Markup("")
    place = _Frame(steps, values)
    names = ", ".join(d.curve.arm for d in drawn if d.index in shown)
    label = escape(f"{stage_metric} over steps, of {names}; the numbers are in the table below")
    body = "".join(_curve(d, place, d.index in shown) for d in drawn)
    return Markup(
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{label}" data-x="{steps.low:g},{steps.high:g}" '
        f'data-frame="{_LEFT},{WIDTH - _RIGHT},{WIDTH}">'
        f"{_grid(place)}{body}"
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """Where steps and values lie in the drawing."""

    steps: Scale
    values: Scale

    def x(self, step: float) -> float:
        span = self.steps.high - self.steps.low
        return _LEFT + (step - self.steps.low) / span * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.values.high - self.values.low
        return HEIGHT - _BOTTOM - (value - self.values.low) / span * (HEIGHT - _TOP - _BOTTOM)


def _extent(curve: Curve) -> Iterable[float | None]:
    yield from curve.mean
    yield from curve.low
    yield from curve.high


def _grid(place: _Frame) -> str:
    parts = ['<g class="ys">']
    for tick in place.values.ticks:
        y = place.y(tick)
        text = number(tick, place.values.decimals)
        parts.append(
            f'<line class="g" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text class="y" x="{_LEFT - 8}" y="{y + 4:.1f}">{text}</text>')
    parts.append("</g>")
    for tick in place.steps.ticks:
        if tick == round(tick):
            parts.append(f'<text x="{place.x(tick):.1f}" y="{HEIGHT - 22}">{tick:.0f}</text>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 5}">step</text>')
    return "".join(parts)


def _curve(drawn: Drawn, place: _Frame, shown: bool) -> str:
    curve, off = drawn.curve, "" if shown else ' class="off"'
    style = f"s{style_of(drawn.index)}"
    line: list[str] = []
    at = ""
    band: list[list[tuple[float, float, float]]] = [[]]
    data = []
    pen = "M"
    for i in drawn.picked:
        mean, low, high = (finite(v) for v in (curve.mean[i], curve.low[i], curve.high[i]))
        if mean is None:
            if pen == "L":
                data.append("")
            pen = "M"
            band.append([])
            continue
        x = place.x(curve.steps[i])
        at = f"{x:.0f} {place.y(mean):.1f}"
        line.append(pen + at)
        pen = "L"
        low, high = (mean if low is None else low), (mean if high is None else high)
        band[-1].append((x, place.y(low), place.y(high)))
        data.append(f"{curve.steps[i]} {mean:.4g} {low:.4g} {high:.4g}")
    areas = "".join(_area(part) for part in band if len(part) > 1)
    name, mark = escape(curve.arm), _DOTS[drawn.index % len(_DOTS)]
    return (
        f'<g data-curve="{drawn.index}" data-name="{name}" data-p="{";".join(data)}"{off}>'
        f'<path class="b {style}" d="{areas}"/>'
        f'<path class="l {style} k{dash_of(drawn.index)}" d="{"".join(line)}"/>'
        f'<path class="e {style}" d="{mark}" transform="translate({at or "0 0"})"/>'
        "</g>"
    )


def _area(part: Sequence[tuple[float, float, float]]) -> str:
    if all(low == high for _, low, high in part):
        return ""
    there = " ".join(f"{x:.0f} {high:.1f}" for x, _, high in part)
    back = " ".join(f"{x:.0f} {low:.1f}" for x, low, _ in reversed(part))
    return f"M{there} {back}Z"


def thinned(curve: Curve, most: int) -> tuple[int, ...]:
    """Indices of at most ``most`` steps, evenly spaced, first and last included."""
    size = len(curve.steps)
    if size <= most:
        return tuple(range(size))
    return tuple(round(i * (size - 1) / (most - 1)) for i in range(most))
