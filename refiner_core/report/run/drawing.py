"""Drawings of a run's page: attempts on a time axis, curves of training, shares of a reward.

In: values of :mod:`refiner_core.report.run.document`. Out: SVG as escaped markup, coloured by
classes of the page's style sheet. Places are percentages, so that a drawing takes whatever width it
has; curves have a size of their own, because their text scales with them. What a drawing shows
stands in words in its ``aria-label``, which is also what hovering shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from markupsafe import Markup, escape

from refiner_core.report.drawing import SHAPES, Scale, scale_for, style_of
from refiner_core.report.printing import MINUS, duration, finite, moment, number, plain
from refiner_core.report.run.document import (
    UNDER_WAY,
    AttemptRow,
    MetricCurve,
    RewardPart,
    StageRow,
)

# ---------------------------------------------------------------- attempts over time

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
#: Ends that say nothing against the stage itself.
_FROM_OUTSIDE = ("interrupted", "cancelled", "preempted", "time_limit", "node_failure")
#: Attempts that are drawn of one stage: what is more would be thinner than a line.
MOST_BARS = 400


@dataclass(frozen=True)
class Lane:
    """A stage of the timeline. ``drawing`` is empty where nothing of it lies in this run."""

    stage: StageRow
    drawing: Markup
    said: str


@dataclass(frozen=True)
class Timeline:
    """Stages over the time of a run; ``axis`` counts from its beginning."""

    lanes: tuple[Lane, ...]
    axis: Markup
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
        Lane(s, Markup(""), _skipped(s)) if s.skipped else _lane(s, first, last, scale)
        for s in stages
    ]
    return Timeline(tuple(lanes), _time_axis(scale), last - first)


def _skipped(stage: StageRow) -> str:
    return f"was there already{f', made by {stage.made_by}' if stage.made_by else ''}"


def _lane(stage: StageRow, first: float, last: float, scale: Scale) -> Lane:
    """Attempts as bars, from what they waited for to how they ended."""
    parts, said = [], []
    before = None
    for attempt in stage.attempts[:MOST_BARS]:
        began = _time(attempt.began_at)
        if began is None:
            continue
        ended = _ended(attempt, last)
        ended = began if ended is None else max(began, ended)
        queued = began - (stage.queue_seconds or 0.0) if attempt is stage.attempts[0] else None
        if (since := before if before is not None else queued) is not None and began > since:
            parts.append(_bar("wait", since - first, began - first, scale))
        kind = kind_of(attempt)
        parts.append(_bar(f"bar {kind}", began - first, ended - first, scale))
        if kind in ("bad", "stop"):
            sign = '<path d="M-3 -3L3 3M3 -3L-3 3"/>'
            parts.append(
                f'<svg class="broke" x="{scale.place(ended - first):.2f}%" y="13" '
                f'overflow="visible">{sign}</svg>'
            )
        said.append(_attempt_said(attempt))
        before = ended
    label = f"{stage.name}: " + ("; ".join(said[-12:]) if said else "has not begun")
    if len(stage.attempts) > 12:
        label = f"{stage.name}, {len(stage.attempts)} attempts, the last of them: " + label
    if stage.lost_seconds:
        label += f". {duration(stage.lost_seconds)} of work were lost."
    if not parts:
        return Lane(stage, Markup(""), stage.reason or stage.state)
    drawing = Markup(
        '<svg class="strip lane" role="img" tabindex="0" aria-label="{}">{}</svg>'
    ).format(plain(label[:1200]), Markup("".join(parts)))
    return Lane(stage, drawing, "")


def _ended(attempt: AttemptRow, now: float | None) -> float | None:
    """When an attempt ended; one that is gone without a word, when it last showed that it lived."""
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
    """How an attempt is drawn: done, running, stop (it was ended from outside), bad."""
    if not attempt.ended_at and attempt.outcome in ("", UNDER_WAY):
        return "running"
    if attempt.outcome in ("done", "none", "finished"):
        return "done"
    return "stop" if attempt.outcome in _FROM_OUTSIDE else "bad"


def _bar(kind: str, start: float, end: float, scale: Scale) -> str:
    left, right = scale.place(start), scale.place(end)
    high = 'y="11" height="4"' if kind == "wait" else 'y="5" height="16" rx="2"'
    return f'<rect class="{kind}" x="{left:.2f}%" width="{max(0.25, right - left):.2f}%" {high}/>'


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


def _time_axis(scale: Scale) -> Markup:
    ticks = "".join(
        f'<text x="{scale.place(t):.1f}%" y="11">{duration(t) if t else "0"}</text>'
        f'<line class="t" x1="{scale.place(t):.1f}%" x2="{scale.place(t):.1f}%" y1="14" y2="18"/>'
        for t in scale.ticks
    )
    return Markup(f'<svg class="axis" aria-hidden="true">{ticks}</svg>')


# ---------------------------------------------------------------- models of one metric


@dataclass(frozen=True)
class Mark:
    """A model's number with its interval; ``index`` is its place among models, and its style."""

    index: int
    model: str
    value: float
    low: float | None
    high: float | None


def models(marks: Sequence[Mark], label: str) -> Markup:
    """Numbers of several models on one scale, each in a row of its own."""
    scale = scale_for([v for m in marks for v in (m.value, m.low, m.high)], ticks=3)
    if scale is None:
        return Markup("")
    parts = []
    for row, mark in enumerate(marks):
        y, style = 7 + 11 * row, f"s{style_of(mark.index)}"
        if mark.low is not None and mark.high is not None:
            left, right = scale.place(mark.low), scale.place(mark.high)
            parts.append(
                f'<line class="i {style}" x1="{left:.1f}%" x2="{right:.1f}%" y1="{y}" y2="{y}"/>'
            )
        parts.append(
            f'<svg x="{scale.place(mark.value):.1f}%" y="{y}" overflow="visible">'
            f'<path class="d {style}" d="{DOTS[mark.index % len(DOTS)]}"/></svg>'
        )
    foot = 11 * len(marks) + 3
    for tick in (scale.ticks[0], scale.ticks[-1]) if len(scale.ticks) > 1 else scale.ticks:
        parts.append(
            f'<text x="{scale.place(tick):.1f}%" y="{foot + 10}">'
            f"{number(tick, scale.decimals)}</text>"
        )
    return Markup(
        '<svg class="strip models" role="img" tabindex="0" aria-label="{}" height="{}" '
        'style="height:{}px">{}</svg>'
    ).format(plain(label), foot + 12, foot + 12, Markup("".join(parts)))


DOTS = (SHAPES["baseline"], *(SHAPES[k] for k in ("not clear", "better", "worse", "judge moved")))

# ---------------------------------------------------------------- curves

WIDTH, HEIGHT = 480, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 10, 10, 30


def curve(shown: MetricCurve, most: int) -> Markup:
    """One metric over steps. A value that is missing breaks the line; an attempt that took over is
    a dashed line. Of more than ``most`` points the extremes of each stretch are drawn."""
    steps = scale_for((float(s) for s in shown.steps), ticks=5)
    values = scale_for(shown.values, ticks=4)
    if steps is None or values is None:
        return Markup("")

    def x(step: float) -> float:
        share = (step - steps.low) / (steps.high - steps.low)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (value - values.low) / (values.high - values.low)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in values.ticks:
        parts.append(
            f'<line class="g" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text class="y" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}">'
            f"{_tick(tick, values)}</text>"
        )
    for tick in steps.ticks:
        if tick == round(tick):
            parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 12}">{tick:.0f}</text>')
    for step in shown.from_attempts[:MOST_BARS]:
        if steps.low <= step <= steps.high:
            parts.append(
                f'<line class="took" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" '
                f'y2="{HEIGHT - _BOTTOM}"/>'
            )
    line, data, lonely = _line(shown, most, x, y)
    name, label = escape(plain(shown.metric)), escape(plain(_curve_said(shown)))
    return Markup(
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{label}" data-x="{steps.low:g},{steps.high:g}" '
        f'data-frame="{_LEFT},{WIDTH - _RIGHT},{WIDTH}">{"".join(parts)}'
        f'<g data-curve="0" data-name="{name}" data-p="{data}">'
        f'<path class="l s1" d="{line}"/>{lonely}</g>'
        f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/></svg>'
    )


def _tick(value: float, scale: Scale) -> str:
    """A number of an axis that fits beside it."""
    if scale.decimals <= 4 and abs(value) < 1e6:
        return number(value, scale.decimals)
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("-", MINUS)


def _line(
    shown: MetricCurve, most: int, x: Callable[[float], float], y: Callable[[float], float]
) -> tuple[str, str, str]:
    """A curve's path, its points for hovering, and dots where a point has no neighbours."""
    path: list[str] = []
    data: list[str] = []
    dots: list[str] = []
    run: list[tuple[int, float]] = []

    def end() -> None:
        if len(run) == 1:
            step, value = run[0]
            dots.append(f'<circle class="one s1" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>')
        for i, (step, value) in enumerate(run):
            path.append(f"{'L' if i else 'M'}{x(step):.1f} {y(value):.1f}")
        data.extend(f"{step} {value:.4g} {value:.4g} {value:.4g}" for step, value in run)
        if run:
            data.append("")
        run.clear()

    for i in picked(shown, most):
        value = finite(shown.values[i])
        if value is None:
            end()
        else:
            run.append((shown.steps[i], value))
    end()
    return "".join(path), ";".join(data).rstrip(";"), "".join(dots)


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


# ---------------------------------------------------------------- shares of a reward


@dataclass(frozen=True)
class Share:
    """A part of a reward with its bar, which begins where the one before it ends."""

    part: RewardPart
    bar: Markup


def shares(parts: Sequence[RewardPart]) -> tuple[list[Share], list[RewardPart]]:
    """Parts that count, as a waterfall from 0, and those that were only measured."""
    counted = [p for p in parts if finite(p.share) is not None and p.weight != 0]
    ends = [0.0]
    for part in counted:
        ends.append(ends[-1] + (part.share or 0.0))
    scale = scale_for(ends, ticks=3)
    made = [
        Share(part, _share_bar(start, end, scale) if scale is not None else Markup(""))
        for part, (start, end) in zip(counted, pairwise(ends), strict=True)
    ]
    return made, [p for p in parts if p not in counted]


def _share_bar(start: float, end: float, scale: Scale) -> Markup:
    left, right = sorted((scale.place(start), scale.place(end)))
    kind, zero = ("gain" if end >= start else "loss"), scale.place(0.0)
    return Markup(
        '<svg class="fall" aria-hidden="true">'
        f'<line class="z" x1="{zero:.1f}%" x2="{zero:.1f}%" y1="0" y2="16"/>'
        f'<rect class="{kind}" x="{left:.1f}%" width="{max(0.6, right - left):.1f}%" y="3" '
        'height="10" rx="1.5"/></svg>'
    )
