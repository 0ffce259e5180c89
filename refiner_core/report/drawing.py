"""Drawings of pages: strips, dots, curves, attempts on a time axis, shares of a reward.

In: numbers and a :class:`Scale`. Out: values that ``drawing.html.jinja`` writes as SVG, coloured by
classes of the page's style sheet. Places in a strip are percentages, so that it takes whatever
width its column has; curves have a size of their own, because their text scales with them. What a
drawing shows stands in words in its ``aria-label``, which is also what hovering shows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

from refiner_core.report.printing import MINUS, duration, finite, moment, number
from refiner_core.report.run.document import (
    UNDER_WAY,
    Row,
    StageRow,
)

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


def strip(
    scale: Scale, value: float, ends: Sequence[float | None], mark: str, label: str, **more: Any
) -> dict[str, Any]:
    """Content of one strip: a mean, the ends of its interval, the seeds' numbers (``points``);
    ``zero``: it is a difference, and ``matters`` how far from 0 that has to be to matter."""
    low, high = ends
    shown = {"scale": scale, "value": value, "low": low, "high": high, "mark": mark, "label": label}
    return {"points": (), "zero": False, "matters": None, **shown, **more}


# ---------------------------------------------------------------- marks of several arms or models


def style_of(index: int) -> int:
    """The colour of an arm by its place among arms; the baseline (0) is ink."""
    return 0 if index == 0 else 1 + (index - 1) % _COLOURS


def dash_of(index: int) -> int:
    """Dashes of an arm's line, so that colours may come again."""
    return 0 if index == 0 else (index - 1) // _COLOURS % 4


# ---------------------------------------------------------------- curves

#: Values of a curve; None where there is none.
Values = Sequence[float | None]
#: Points of all curves of a page, and the fewest of one.
MOST_POINTS, _FEWEST_POINTS = 30_000, 8


@dataclass(frozen=True)
class Line:
    """A curve: the place of its arm among arms, and (step, value, low, high) of its points, None
    where there is a gap."""

    index: int
    name: str
    points: tuple[tuple[int, float, float, float] | None, ...]

    @property
    def known(self) -> list[tuple[int, float, float, float]]:
        """Its points without the gaps."""
        return [point for point in self.points if point is not None]


def line_of(
    steps: Sequence[int],
    middle: Values,
    band: tuple[Values, Values] | None = None,
    *,
    index: int = 1,
    name: str = "",
    curves: int = 1,
) -> Line:
    """A curve (its values, and the ends of a band where it has one) with as many points as one of
    so many ``curves`` may have on a page."""
    kept = kept_places(middle, max(_FEWEST_POINTS, MOST_POINTS // max(1, curves)))
    found: list[tuple[int, float, float, float] | None] = []
    for i in kept:
        value, low, high = (finite(values[i]) for values in (middle, *(band or (middle, middle))))
        if value is None:
            found.append(None)
            continue
        low, high = (value if end is None else end for end in (low, high))
        found.append((steps[i], value, low, high))
    return Line(index, name, tuple(found))


def kept_places(values: Values, most: int) -> list[int]:
    """Places of about ``most`` values: of each stretch its lowest, its highest and its first gap,
    so that neither a spike nor a hole is thinned away. The ends stay."""
    size = len(values)
    if size <= most:
        return list(range(size))
    there = {i: v for i, value in enumerate(values) if (v := finite(value)) is not None}
    kept = {0, size - 1, *list(there)[:1], *list(there)[-1:]}
    stretches = max(1, (most - 4) // 3)
    for k in range(stretches):
        part = range(k * size // stretches, (k + 1) * size // stretches)
        known = [i for i in part if i in there]
        kept.update([i for i in part if i not in there][:1])
        if known:
            kept |= {min(known, key=there.__getitem__), max(known, key=there.__getitem__)}
    return sorted(kept)


@dataclass(frozen=True)
class Plot:
    """Curves of one metric over steps, in pixels. The axis holds those that are ``shown``; the
    others are there too, hidden until somebody chooses them and the page draws them anew.

    ``room`` is left on the left, on the right, above and below; ``took`` are steps at which a
    further attempt took over.
    """

    lines: Sequence[Line]
    shown: Collection[int]
    label: str
    width: int
    height: int
    room: tuple[int, int, int, int]
    took: Sequence[int] = ()

    @cached_property
    def steps(self) -> Scale | None:
        """The axis of steps; None where nothing is there to draw."""
        return scale_for((float(p[0]) for line in self.lines for p in line.known), ticks=6)

    @cached_property
    def values(self) -> Scale | None:
        """The axis of values; None where nothing is shown."""
        shown = (line for line in self.lines if line.index in self.shown)
        return scale_for((v for line in shown for p in line.known for v in p[1:]), ticks=5)

    def x(self, step: float) -> float:
        """Pixels from the left."""
        assert self.steps is not None, "who draws has looked"
        left, right, _, _ = self.room
        share = (step - self.steps.low) / (self.steps.high - self.steps.low)
        return left + share * (self.width - left - right)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        assert self.values is not None, "who draws has looked"
        _, _, top, bottom = self.room
        share = (value - self.values.low) / (self.values.high - self.values.low)
        return self.height - bottom - share * (self.height - top - bottom)

    def paths(self, line: Line) -> dict[str, str]:
        """The band, the line, its end, and its points for who hovers over it."""
        band, path, data = "", "", []
        end = (0.0, 0.0)
        for there, run in groupby(line.points, key=bool):
            if not there:
                continue
            points = [point for point in run if point is not None]
            places = [(self.x(p[0]), *map(self.y, p[1:])) for p in points]
            path += "M" + "L".join(f"{x:.4g} {y:.4g}" for x, y, *_ in places)
            path += "h0" if len(places) == 1 else ""  # a dot, by its round ends
            if len(places) > 1 and any(low != high for *_, low, high in places):
                upper = " ".join(f"{x:.4g} {high:.4g}" for x, *_, high in places)
                lower = " ".join(f"{x:.4g} {low:.4g}" for x, _, low, _ in reversed(places))
                band += f"M{upper} {lower}Z"
            data.append(";".join(f"{s} {v:.4g} {a:.4g} {b:.4g}" for s, v, a, b in points))
            end = places[-1][0], places[-1][1]
        place = f"translate({end[0]:.4g} {end[1]:.4g})"
        return {"band": band, "line": path, "end": place, "data": ";;".join(data)}

    def tick(self, value: float) -> str:
        """A number of the axis of values that fits beside it."""
        decimals = 0 if self.values is None else self.values.decimals
        if decimals <= 4 and abs(value) < 1e6:
            return number(value, decimals)
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("-", MINUS)


def plot_of_run(curve: Row, line: Line) -> Plot:
    """One metric of a run."""
    words = f"{curve['metric']} of {curve['stage']} over steps"
    if known := line.known:
        words += ": " + ", ".join(f"{v:.4g} at step {s}" for s, v, *_ in (known[0], known[-1]))
    if began := curve["from_attempts"]:
        at = ", ".join(map(str, began[:12]))
        words += f"; a further attempt took over at step {at}"
    return Plot([line], (line.index,), words, 480, 210, (58, 10, 10, 30), began[:MOST_BARS])


# ---------------------------------------------------------------- attempts over time

_TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
#: Ends that say nothing against the stage itself.
_FROM_OUTSIDE = ("interrupted", "cancelled", "preempted", "time_limit", "node_failure")
#: Attempts that are drawn of one stage: what is more would be thinner than a line.
MOST_BARS = 400


def timeline(stages: Sequence[StageRow], began_at: str, made_at: str) -> dict[str, Any] | None:
    """Stages over the time of a run, counted from its beginning; None where no attempt of it has
    begun. A lane has the bars of a stage with both ends in percent, and what they show in words;
    without bars, why nothing of it lies in this run."""
    own = [s for s in stages if not s.skipped]
    now = _time(made_at)
    times = [t for s in own for a in s.attempts for t in (_time(a["began_at"]), _ended(a, now))]
    known = [t for t in [_time(began_at) if times else None, *times] if t is not None]
    if not times or not known:
        return None
    first, last = min(known), max(known)
    scale = _time_scale(max(last - first, 1.0))
    lanes = []
    for stage in stages:
        bars, label = ([], _skipped(stage)) if stage.skipped else _lane(stage, first, last, scale)
        lanes.append({"stage": stage, "bars": bars, "label": label})
    return {"lanes": lanes, "scale": scale, "seconds": last - first}


def _skipped(stage: StageRow) -> str:
    return f"was there already{f', made by {stage.made_by}' if stage.made_by else ''}"


def _lane(
    stage: StageRow, first: float, last: float, scale: Scale
) -> tuple[list[tuple[str, float, float]], str]:
    """Attempts as bars, from what they waited for to how they ended."""
    bars, said = [], []
    before = None
    for attempt in stage.attempts[:MOST_BARS]:
        began = _time(attempt["began_at"])
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
        return [], stage.reason or stage.state
    label = f"{stage.name}: " + "; ".join(said[-12:])
    if len(stage.attempts) > 12:
        label = f"{stage.name}, {len(stage.attempts)} attempts, the last of them: " + label
    if stage.lost_seconds:
        label += f". {duration(stage.lost_seconds)} of work were lost."
    return bars, label


def _ended(attempt: Row, now: float | None) -> float | None:
    """End of an attempt; of one that is gone without a word, when it last showed that it lived."""
    if attempt["ended_at"]:
        return _time(attempt["ended_at"])
    if kind_of(attempt) == "running":
        return now
    began = _time(attempt["began_at"])
    return None if began is None else began + (attempt["seconds"] or 0.0)


def _attempt_said(attempt: Row) -> str:
    step, seconds, text = attempt["reached_step"], attempt["seconds"], attempt["text"]
    said = attempt["outcome"] or UNDER_WAY
    said += "" if seconds is None else f" after {duration(seconds)}"
    said += "" if step is None else f", to step {step}"
    said += f" ({text[:160]})" if text else ""
    return f"attempt {attempt['number']} from {moment(attempt['began_at'])}: {said}"


def kind_of(attempt: Row) -> str:
    """Manner in which an attempt is drawn: done, running, stop (it was ended from outside), bad."""
    if not attempt["ended_at"] and attempt["outcome"] in ("", UNDER_WAY):
        return "running"
    if attempt["outcome"] in ("done", "none", "finished"):
        return "done"
    return "stop" if attempt["outcome"] in _FROM_OUTSIDE else "bad"


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


def shares(parts: Sequence[Row]) -> tuple[list[dict[str, Any]], list[Row]]:
    """Parts of a reward that count, each beginning where the one before it ends (from 0), and those
    that were only measured."""
    counted = [p for p in parts if finite(p["share"]) is not None and p["weight"] != 0]
    ends = [0.0, *accumulate(part["share"] for part in counted)]
    scale = scale_for(ends, ticks=3)
    made = [
        {"part": part, "start": start, "end": end, "scale": scale}
        for part, (start, end) in zip(counted, pairwise(ends), strict=True)
    ]
    return made, [p for p in parts if p not in counted]
