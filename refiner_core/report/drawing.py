"""Drawings of pages as SVG: strips, dots, curves, attempts on a time axis, shares of a reward.

In: numbers and a :class:`Scale`. Out: escaped markup, coloured by classes of the page's style
sheet. Places in a strip are percentages, so that it takes whatever width its column has; curves
have a size of their own, because their text scales with them. What a drawing shows stands in words
in its ``aria-label``, which is also what hovering shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from refiner_core.report.printing import MINUS, duration, finite, moment, number, plain
from refiner_core.report.run.document import (
    UNDER_WAY,
    AttemptRow,
    MetricCurve,
    RewardPart,
    StageRow,
)
from refiner_core.report.sweep.document import Curve

#: Marks of a mean, by what a comparison says: told apart by form, not by colour alone.
SHAPES: Mapping[str, str] = {
    "better": "M0 -6 L6 5 L-6 5Z",
    "worse": "M0 6 L6 -5 L-6 -5Z",
    "not clear": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "judge moved": "M0 -6 L6 0 L0 6 L-6 0Z",
    "baseline": "M-5 -1.5H-1.5V-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5Z",
}
#: Marks of arms and models, by their places.
DOTS = tuple(SHAPES[k] for k in ("baseline", "not clear", "better", "worse", "judge moved"))
_COLOURS = 7
_MARGIN = 3.0


@dataclass(frozen=True)
class Scale:
    """From numbers to percentages of a width, with round numbers as ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int

    def place(self, value: float) -> float:
        """Place of a number, in percent; what lies outside is put at the edge."""
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
    """Content of one strip: a mean, its interval, the seeds' numbers; ``matters`` is how far from 0
    a difference has to be to matter."""

    scale: Scale
    value: float | None
    low: float | None
    high: float | None
    points: tuple[float | None, ...]
    mark: str
    label: str
    zero: bool = False
    matters: float | None = None


# ---------------------------------------------------------------- marks of several arms or models


def style_of(index: int) -> int:
    """The colour of an arm by its place among arms; the baseline (0) is ink."""
    return 0 if index == 0 else 1 + (index - 1) % _COLOURS


def dash_of(index: int) -> int:
    """Dashes of an arm's line, so that colours may come again."""
    return 0 if index == 0 else (index - 1) // _COLOURS % 4


class Models(NamedTuple):
    """Numbers of several models on one scale: (place among models, value, low, high) of each."""

    marks: list[tuple[int, float, float | None, float | None]]
    scale: Scale | None
    label: str


# ---------------------------------------------------------------- curves


@dataclass(frozen=True)
class Frame:
    """Places of steps and values in a drawing of curves."""

    width: int
    height: int
    #: Room on the left, on the right, above and below.
    room: tuple[int, int, int, int]
    steps: Scale
    values: Scale

    def x(self, step: float) -> float:
        """Pixels from the left."""
        left, right, _, _ = self.room
        share = (step - self.steps.low) / (self.steps.high - self.steps.low)
        return left + share * (self.width - left - right)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        _, _, top, bottom = self.room
        share = (value - self.values.low) / (self.values.high - self.values.low)
        return self.height - bottom - share * (self.height - top - bottom)

    def rows(self, gap: int, text: Callable[[float, Scale], str] | None = None) -> str:
        """Lines of the values' ticks, with their numbers so many pixels on their left."""
        left, right, _, _ = self.room
        return "".join(
            f'<line class="g" x1="{left}" x2="{self.width - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="y" x="{left - gap}" y="{y + 4:.1f}">'
            f"{text(t, self.values) if text else number(t, self.values.decimals)}</text>"
            for t in self.values.ticks
            for y in (self.y(t),)
        )

    def svg(self, label: str, rows: str, foot: int, rest: str) -> Markup:
        """The drawing: numbers of steps so many pixels above its foot, and what lies above."""
        left, right, top, bottom = self.room
        steps = "".join(
            f'<text x="{self.x(t):.1f}" y="{self.height - foot}">{t:.0f}</text>'
            for t in self.steps.ticks
            if t == round(t)
        )
        cursor = (
            f'<line class="cursor" y1="{top}" y2="{self.height - bottom}" visibility="hidden"/>'
        )
        return Markup(
            f'<svg class="curves" viewBox="0 0 {self.width} {self.height}" role="img" tabindex="0" '
            f'aria-label="{escape(plain(label))}" '
            f'data-x="{self.steps.low:g},{self.steps.high:g}" '
            f'data-frame="{left},{self.width - right},{self.width}">'
            f"{rows}{steps}{rest}{cursor}</svg>"
        )


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
    extents = (d.curve for d in drawn if d.index in shown)
    values = scale_for((v for c in extents for v in (*c.mean, *c.low, *c.high)), ticks=5)
    if steps is None or values is None:
        return Markup("")
    frame = Frame(860, 340, (64, 16, 12, 40), steps, values)
    names = ", ".join(d.curve.arm for d in drawn if d.index in shown)
    label = f"{stage_metric} over steps, of {names}; the numbers are in the table below"
    body = "".join(_curve(d, frame, d.index in shown) for d in drawn)
    name = f'<text x="{(860 + 64) / 2:.0f}" y="{340 - 5}">step</text>'
    return frame.svg(label, f'<g class="ys">{frame.rows(8)}</g>', 22, name + body)


def _curve(drawn: Drawn, frame: Frame, shown: bool) -> str:
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
        x = frame.x(curve.steps[i])
        at = f"{x:.0f} {frame.y(mean):.1f}"
        line.append(pen + at)
        pen = "L"
        low, high = (mean if low is None else low), (mean if high is None else high)
        band[-1].append((x, frame.y(low), frame.y(high)))
        data.append(f"{curve.steps[i]} {mean:.4g} {low:.4g} {high:.4g}")
    areas = "".join(_area(part) for part in band if len(part) > 1)
    name, mark = escape(curve.arm), DOTS[drawn.index % len(DOTS)]
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


def curve(shown: MetricCurve, most: int) -> Markup:
    """One metric over steps. A value that is missing breaks the line; an attempt that took over is
    a dashed line. Of more than ``most`` points the extremes of each stretch are drawn."""
    steps = scale_for((float(s) for s in shown.steps), ticks=5)
    values = scale_for(shown.values, ticks=4)
    if steps is None or values is None:
        return Markup("")
    frame = Frame(480, 210, (58, 10, 10, 30), steps, values)
    took = "".join(
        f'<line class="took" x1="{frame.x(step):.1f}" x2="{frame.x(step):.1f}" y1="10" y2="180"/>'
        for step in shown.from_attempts[:MOST_BARS]
        if steps.low <= step <= steps.high
    )
    line, data, lonely = _curve_line(shown, most, frame)
    body = (
        f'{took}<g data-curve="0" data-name="{escape(plain(shown.metric))}" data-p="{data}">'
        f'<path class="l s1" d="{line}"/>{lonely}</g>'
    )
    return frame.svg(_curve_said(shown), frame.rows(6, _tick), 12, body)


def _tick(value: float, scale: Scale) -> str:
    """A number of an axis that fits beside it."""
    if scale.decimals <= 4 and abs(value) < 1e6:
        return number(value, scale.decimals)
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("-", MINUS)


def _curve_line(shown: MetricCurve, most: int, frame: Frame) -> tuple[str, str, str]:
    """A curve's path, its points for hovering, and dots where a point has no neighbours."""
    path, data, dots = "", [], ""
    points = [(shown.steps[i], finite(shown.values[i])) for i in picked(shown, most)]
    for missing, run in groupby(points, key=lambda point: point[1] is None):
        if missing:
            data.append("")
            continue
        places = [(step, value, frame.x(step), frame.y(value or 0.0)) for step, value in run]
        path += "".join(
            f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (*_, x, y) in enumerate(places)
        )
        data += [f"{step} {value:.4g} {value:.4g} {value:.4g}" for step, value, *_ in places]
        if len(places) == 1:
            *_, x, y = places[0]
            dots += f'<circle class="one s1" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
    return path, ";".join(data).strip(";"), dots


def picked(shown: MetricCurve, most: int) -> list[int]:
    """Indices of about ``most`` points: of each stretch its lowest, its highest and a gap if it
    has one, so that neither a spike nor a hole is thinned away."""
    size = len(shown.steps)
    if size <= most:
        return list(range(size))
    stretches = max(1, most // 3)
    kept: set[int] = {0, size - 1}
    for k in range(stretches):
        part = range(k * size // stretches, (k + 1) * size // stretches)
        known = [i for i in part if finite(shown.values[i]) is not None]
        if known:
            kept.add(min(known, key=lambda i: shown.values[i] or 0.0))
            kept.add(max(known, key=lambda i: shown.values[i] or 0.0))
        if len(known) < len(part):
            kept.add(next(i for i in part if finite(shown.values[i]) is None))
    return sorted(kept)


def _curve_said(shown: MetricCurve) -> str:
    known = [i for i, v in enumerate(shown.values) if finite(v) is not None]
    words = f"{shown.metric} of {shown.stage} over steps"
    if known:
        first, last = known[0], known[-1]
        words += (
            f": {shown.values[first]:.4g} at step {shown.steps[first]}, "
            f"{shown.values[last]:.4g} at step {shown.steps[last]}"
        )
    if shown.from_attempts:
        at = ", ".join(str(s) for s in shown.from_attempts[:12])
        words += f"; a further attempt took over at step {at}"
    return words


# ---------------------------------------------------------------- attempts over time

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
#: Ends that say nothing against the stage itself.
_FROM_OUTSIDE = ("interrupted", "cancelled", "preempted", "time_limit", "node_failure")
#: Attempts that are drawn of one stage: what is more would be thinner than a line.
MOST_BARS = 400


@dataclass(frozen=True)
class Lane:
    """A stage of the timeline: its bars with both ends in percent, and what they show in words;
    without bars, why nothing of it lies in this run."""

    stage: StageRow
    bars: tuple[tuple[str, float, float], ...]
    label: str


@dataclass(frozen=True)
class Timeline:
    """Stages over the time of a run, counted from its beginning."""

    lanes: tuple[Lane, ...]
    scale: Scale
    seconds: float


def timeline(stages: Sequence[StageRow], began_at: str, made_at: str) -> Timeline | None:
    """Bars of all attempts; None where no attempt of the run has begun."""
    own = [s for s in stages if not s.skipped]
    now = _time(made_at)
    times = [t for s in own for a in s.attempts for t in (_time(a.began_at), _ended(a, now))]
    known = [t for t in [_time(began_at) if times else None, *times] if t is not None]
    if not times or not known:
        return None
    first, last = min(known), max(known)
    scale = _time_scale(max(last - first, 1.0))
    lanes = [
        Lane(s, (), _skipped(s)) if s.skipped else _lane(s, first, last, scale) for s in stages
    ]
    return Timeline(tuple(lanes), scale, last - first)


def _skipped(stage: StageRow) -> str:
    return f"was there already{f', made by {stage.made_by}' if stage.made_by else ''}"


def _lane(stage: StageRow, first: float, last: float, scale: Scale) -> Lane:
    """Attempts as bars, from what they waited for to how they ended."""
    bars, said = [], []
    before = None
    for attempt in stage.attempts[:MOST_BARS]:
        began = _time(attempt.began_at)
        if began is None:
            continue
        ended = _ended(attempt, last)
        ended = began if ended is None else max(began, ended)
        queued = began - (stage.queue_seconds or 0.0) if attempt is stage.attempts[0] else None
        if (since := before if before is not None else queued) is not None and began > since:
            bars.append(("wait", scale.place(since - first), scale.place(began - first)))
        kind = f"bar {kind_of(attempt)}"
        bars.append((kind, scale.place(began - first), scale.place(ended - first)))
        said.append(_attempt_said(attempt))
        before = ended
    if not bars:
        return Lane(stage, (), stage.reason or stage.state)
    label = f"{stage.name}: " + "; ".join(said[-12:])
    if len(stage.attempts) > 12:
        label = f"{stage.name}, {len(stage.attempts)} attempts, the last of them: " + label
    if stage.lost_seconds:
        label += f". {duration(stage.lost_seconds)} of work were lost."
    return Lane(stage, tuple(bars), label)


def _ended(attempt: AttemptRow, now: float | None) -> float | None:
    """End of an attempt; of one that is gone without a word, when it last showed that it lived."""
    if attempt.ended_at:
        return _time(attempt.ended_at)
    if kind_of(attempt) == "running":
        return now
    began = _time(attempt.began_at)
    return None if began is None else began + (attempt.seconds or 0.0)


def _attempt_said(attempt: AttemptRow) -> str:
    step = f", to step {attempt.reached_step}" if attempt.reached_step is not None else ""
    text = f" ({attempt.text[:160]})" if attempt.text else ""
    word = attempt.outcome or UNDER_WAY
    took = f" after {duration(attempt.seconds)}" if attempt.seconds is not None else ""
    return f"attempt {attempt.number} from {moment(attempt.began_at)}: {word}{took}{step}{text}"


def kind_of(attempt: AttemptRow) -> str:
    """Manner in which an attempt is drawn: done, running, stop (it was ended from outside), bad."""
    if not attempt.ended_at and attempt.outcome in ("", UNDER_WAY):
        return "running"
    if attempt.outcome in ("done", "none", "finished"):
        return "done"
    return "stop" if attempt.outcome in _FROM_OUTSIDE else "bad"


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _time_scale(seconds: float) -> Scale:
    step = next((s for s in _TIME_STEPS if seconds / s <= 7), None)
    if step is None:
        days = seconds / 86400
        step = 86400 * max(1, math.ceil(days / 7))
    return Scale(0.0, seconds, tuple(float(t) for t in range(0, int(seconds) + 1, step)), 0)


# ---------------------------------------------------------------- shares of a reward


class Share(NamedTuple):
    """A part of a reward, which begins where the one before it ends."""

    part: RewardPart
    start: float
    end: float
    scale: Scale | None


def shares(parts: Sequence[RewardPart]) -> tuple[list[Share], list[RewardPart]]:
    """Parts that count, as a waterfall from 0, and those that were only measured."""
    counted = [p for p in parts if finite(p.share) is not None and p.weight != 0]
    ends = [0.0, *accumulate(part.share or 0.0 for part in counted)]
    scale = scale_for(ends, ticks=3)
    made = [Share(part, *span, scale) for part, span in zip(counted, pairwise(ends), strict=True)]
    return made, [p for p in parts if p not in counted]
