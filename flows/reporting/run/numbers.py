"""Numbers of a run: what its evaluations say, what training has changed, and curves of metrics.

In: a :class:`~flows.reporting.run.stages.RunReading`. Out: :class:`Evaluated` (one evaluation that
is done and can be read), rows of numbers and changes, and
:class:`~refiner_core.report.run.document.MetricCurve` values. Numbers come as they were recorded;
changes are computed from the samples, and left out where those are gone. A step whose value was not
finite is a gap in its curve; long curves are thinned so that spikes and gaps stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.reporting.run.stages import RunReading
from infra.orchestrator.timeline import StageHistory
from infra.store.traces import MetricsLine, read_metrics
from refiner_core.contract.kinds import MODELS, TRAINED, model_order
from refiner_core.contract.protocols import protocol_name
from refiner_core.evaluation.metric_names import base_of
from refiner_core.evaluation.metrics import higher_is_better
from refiner_core.evaluation.results import compare_results, load_results
from refiner_core.report.drawing import kept_places
from refiner_core.report.run.document import ChangeRow, MetricCurve, NumberRow
from refiner_core.report.sweep.comparing import SHOWN


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: of which model, under which protocol file (empty: the recipe's settings)."""

    name: str
    stage_id: str
    attempt: int
    model: str
    under: str
    folder: Path
    report: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Yes for a model that a training ended with, and not a checkpoint on the way."""
        return self.model in MODELS


def evaluations_of_run(reading: RunReading) -> list[Evaluated]:
    """The evaluations that are done: without a protocol file first, models in the order of
    training."""
    found = [
        reading.tried(f"The numbers of {name}", _evaluated, reading, name)
        for name, _ in reading.of_kind("evaluate")
    ]
    known = [evaluated for evaluated in found if evaluated is not None]
    return sorted(known, key=lambda e: (e.under, model_order(e.model)))


def _evaluated(reading: RunReading, name: str) -> Evaluated | None:
    """None where it is not done."""
    stage_id, result, folder = reading.run.stages[name], reading.result(name), reading.output(name)
    if result is None or folder is None:
        return None
    report = result.report if "evaluations" in result.report else load_results(folder)
    model, under = str(report["model"]), protocol_name(name)
    return Evaluated(name, stage_id, result.attempt, model, under, folder, report)


# ---------------------------------------------------------------- numbers


def number_rows(evaluations: Sequence[Evaluated]) -> tuple[NumberRow, ...]:
    """Every number, models in the order of training, then what stands beside them, once."""
    rows = [_number(e, entry) for e in evaluations for entry in e.report["evaluations"]]
    beside: dict[tuple[str, ...], NumberRow] = {}
    for evaluated in evaluations:
        for entry in evaluated.report.get("reference") or ():
            row = _number(evaluated, entry, reference=True)
            beside[row.model, row.under, row.decoding, row.metric] = row
    return (*rows, *beside.values())


def _number(
    evaluated: Evaluated, entry: Mapping[str, Any], *, reference: bool = False
) -> NumberRow:
    metric = str(entry["metric"])
    return NumberRow(
        model=str(entry["stage"]) if reference else evaluated.model,
        protocol=str(entry["protocol"]),
        protocol_name=str(entry.get("protocol_name") or ""),
        decoding=str(entry["decoding"]),
        metric=metric,
        **{name: entry.get(name) for name in ("value", "low", "high", "n")},
        higher_is_better=higher_is_better(metric),
        under=evaluated.under,
        reference=reference,
    )


# ---------------------------------------------------------------- changes


def before_and_after(evaluations: Sequence[Evaluated]) -> list[tuple[Evaluated, Evaluated]]:
    """Per protocol the pairs whose difference is told: the first trained model (the base, where
    only one is trained) against the last; then each against the one before it."""
    pairs = []
    for under in dict.fromkeys(e.under for e in evaluations):
        models = [e for e in evaluations if e.under == under and e.whole]
        trained = [e for e in models if e.model != MODELS[0]]
        chain = trained if len(trained) > 1 else models
        if len(chain) < 2:
            continue
        pairs.append((chain[0], chain[-1]))
        if len(chain) > 2:
            pairs += pairwise(chain)
    return pairs


def change_rows(reading: RunReading, evaluations: Sequence[Evaluated]) -> tuple[ChangeRow, ...]:
    """Changes by training, number by number; of numbers of single domains none."""
    rows: list[ChangeRow] = []
    for before, after in before_and_after(evaluations):
        found = reading.tried(
            f"The difference of {after.name} and {before.name}",
            compare_results,
            [after.folder],
            [before.folder],
            metrics=_shared(after, before),
        )
        rows += [_change(before, after, one) for one in found or ()]
    return tuple(rows)


def _shared(after: Evaluated, before: Evaluated) -> list[str]:
    """Metrics that both have under one protocol, whole domains together."""
    one, other = (
        {(e["decoding"], e["metric"]): e["protocol"] for e in side.report["evaluations"]}
        for side in (after, before)
    )
    apart = {key[1] for key in one if one[key] != other.get(key)}
    return sorted({m for _, m in one if m not in apart and base_of(m) == m})


def _change(before: Evaluated, after: Evaluated, found: Mapping[str, Any]) -> ChangeRow:
    metric = str(found["metric"])
    return ChangeRow(
        before=before.model,
        after=after.model,
        under=before.under,
        decoding=str(found["decoding"]),
        metric=metric,
        value_before=float(found["b"]),
        value_after=float(found["a"]),
        difference=float(found["difference"]),
        low=found.get("low"),
        high=found.get("high"),
        n=int(found["n"]),
        higher_is_better=higher_is_better(metric),
    )


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
        taken_over = [
            a.resumed_from_step
            for a in history.record.attempts
            if a.resumed_from_step is not None and a.started_at is not None
        ]
        for metric, (steps, values) in points_of(lines, foreign=foreign).items():
            began = tuple(s for s in taken_over if steps[0] <= s <= steps[-1])
            found.append(MetricCurve(name, metric, steps, values, began))
    return tuple(found)


def _newest_lines(
    reading: RunReading, history: StageHistory, only: Sequence[str] | None
) -> list[MetricsLine]:
    """Lines of the newest attempt that logged anything; they tell the whole story."""
    for attempt in reversed(history.record.attempts):
        paths = reading.workspace.layout.attempt(history.stage_id, attempt.number)
        if lines := read_metrics(paths.metrics, only):
            return lines
    return []


def points_of(lines: Sequence[MetricsLine], *, foreign: bool = False) -> dict[str, Points]:
    """Steps and values by metric; a step's later line goes before an earlier one."""
    logged: dict[str, dict[int, float | None]] = {}
    for step, metrics in lines:
        for metric, value in metrics.items():
            logged.setdefault(metric, {})[step] = _finite(value)
    shown = list(logged)[:_MOST_FOREIGN] if foreign else (*SHOWN, *_ALSO)
    names = [metric for metric in shown if metric in logged]
    steps = sorted({step for metric in names for step in logged[metric]})
    return {
        metric: _with_gaps(logged[metric], steps)
        for metric in names
        if any(value is not None for value in logged[metric].values())
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _with_gaps(points: Mapping[int, float | None], steps: Sequence[int]) -> Points:
    """Steps within the metric's own range, all of them where it is logged at most steps; of very
    many the extremes."""
    first, last = min(points), max(points)
    inside = [s for s in steps if first <= s <= last]
    kept = inside if len(points) > _DENSE * len(inside) else sorted(points)
    places = kept_places([points.get(step) for step in kept], MOST_POINTS)
    return tuple(kept[i] for i in places), tuple(points.get(kept[i]) for i in places)
