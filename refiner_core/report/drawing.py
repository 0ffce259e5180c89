"""Drawings within tables: strips, dots, attempts on a time axis, shares of a reward.

In: numbers and a :class:`Scale`. Out: values that ``drawing.html.jinja`` writes as SVG, coloured by
classes of the page's style sheet. Places in a strip are percentages, so that it takes whatever
width its column has. What a drawing shows stands in words in its ``aria-label``, which is also what
hovering shows. Curves are charts (:mod:`refiner_core.report.charts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Any

from refiner_core.report.printing import duration, finite, moment
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
