"""Curves of what a run has trained: metrics over steps, as its newest attempts logged them.

In: a :class:`~flows.reporting.run.reading.RunReading`. Out:
:class:`~refiner_core.report.run.document.MetricCurve` values. A step whose value was not finite is
a gap, and so is one at which a metric is missing that is logged at most steps. Long curves are
thinned so that spikes and gaps stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from flows.reporting.run.reading import RunReading
from infra.orchestrator.timeline import StageHistory
from infra.store.traces import MetricsLine, read_metrics
from refiner_core.contract.kinds import TRAINED
from refiner_core.report.curves import SHOWN
from refiner_core.report.run.document import MetricCurve

#: What a run's own curves show besides, where a stage logs it; of agents the course of episodes.
_ALSO = (
    *("episodes/success", "episodes/partial", "episodes/turns"),
    *("policy/entropy_avg", "grad_norm", "learning_rate"),
)
#: Metrics of a trainer that is not ours: it has names of its own.
_MOST_FOREIGN = 12
MOST_POINTS = 400
#: A metric that more than this share of steps has is one of every step.
_DENSE = 0.5

Points = tuple[tuple[int, ...], tuple[float | None, ...]]


def training_curves(reading: RunReading) -> tuple[MetricCurve, ...]:
    """The curves of all training stages, in the order of work."""
    found: list[MetricCurve] = []
    for name, history in reading.of_kind(*TRAINED):
        foreign = history.record.spec.kind == "command"
        only = None if foreign else (*SHOWN, *_ALSO)
        what = f"The metrics of {name}"
        lines = reading.tried(what, _newest_lines, reading, history, only) or []
        taken_over = tuple(_taken_over(history))
        for metric, (steps, values) in points_of(lines, foreign=foreign).items():
            began = tuple(s for s in taken_over if steps[0] <= s <= steps[-1])
            found.append(MetricCurve(name, metric, steps, values, began))
    return tuple(found)


def _newest_lines(
    reading: RunReading, history: StageHistory, only: Sequence[str] | None
) -> list[MetricsLine]:
    """What the newest attempt that logged anything did log; that tells the whole story."""
    for attempt in reversed(history.record.attempts):
        paths = reading.workspace.layout.attempt(history.stage_id, attempt.number)
        if lines := read_metrics(paths.metrics, only):
            return lines
    return []


def _taken_over(history: StageHistory) -> Iterator[int]:
    """Steps from which later attempts went on."""
    for attempt in history.record.attempts:
        if attempt.resumed_from_step is not None and attempt.started_at is not None:
            yield attempt.resumed_from_step


def points_of(
    lines: Sequence[MetricsLine], *, foreign: bool = False, most: int = MOST_POINTS
) -> dict[str, Points]:
    """Steps and values by metric; a step's later line goes before an earlier one."""
    logged: dict[str, dict[int, float | None]] = {}
    for step, metrics in lines:
        for metric, value in metrics.items():
            logged.setdefault(metric, {})[step] = _finite(value)
    shown = list(logged)[:_MOST_FOREIGN] if foreign else (*SHOWN, *_ALSO)
    names = [metric for metric in shown if metric in logged]
    steps = sorted({step for metric in names for step in logged[metric]})
    found = {}
    for metric in names:
        points = logged[metric]
        if all(value is None for value in points.values()):
            continue
        found[metric] = thinned(_with_gaps(points, steps), most)
    return found


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _with_gaps(points: Mapping[int, float | None], steps: Sequence[int]) -> Points:
    """Steps within the metric's own range; all of them where it is logged at most steps."""
    first, last = min(points), max(points)
    inside = [s for s in steps if first <= s <= last]
    kept = inside if len(points) > _DENSE * len(inside) else sorted(points)
    return tuple(kept), tuple(points.get(step) for step in kept)


def thinned(points: Points, most: int) -> Points:
    """At most about ``most`` points: of each stretch its lowest, its highest and its first gap, so
    that what sticks out is not lost. The ends stay."""
    steps, values = points
    if len(steps) <= most:
        return points
    kept = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), max(1, (most - 2) // 3)):
        places = part.tolist()
        known = [i for i in places if values[i] is not None]
        kept.update([i for i in places if values[i] is None][:1])
        if known:
            kept.add(min(known, key=lambda i: _at(values, i)))
            kept.add(max(known, key=lambda i: _at(values, i)))
    order = sorted(kept)
    return tuple(steps[i] for i in order), tuple(values[i] for i in order)


def _at(values: Sequence[float | None], place: int) -> float:
    value = values[place]
    return math.nan if value is None else value
