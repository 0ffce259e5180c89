"""Learning curves: a training metric over steps, per arm, with the range of its seeds.

In: what training stages logged. Out: :class:`~refiner_core.report.sweep.document.Curve` values,
thinned so that a page can hold them. Stages that all arms share have no curve: nothing differs
there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from refiner_core.report.sweep.document import Curve
from refiner_core.report.sweep.evidence import Evidence, Training

Floats = npt.NDArray[np.float64]
#: Metrics that are shown, where a stage logs them.
SHOWN = (
    "scores",
    "objective/rubric_reward",
    "objective/citation_reward",
    "objective/kl3_avg",
    "val/stop_rate",
    "val/sequence_lengths",
    "policy/clipfrac_avg",
    "loss/train_avg",
    "loss/validation",
)
#: Points of all curves together, and the fewest and most of one.
_ALL_POINTS = 150_000
_FEWEST, _MOST = 12, 200


def make_curves(evidence: Evidence) -> tuple[Curve, ...]:
    """Curves by stage and metric, arms in the order of the sweep."""
    by_stage: dict[str, dict[str, dict[int, Training]]] = {}
    for trial in evidence.trials:
        for stage in trial.trainings:
            training = evidence.trainings[stage]
            arms = by_stage.setdefault(training.name, {})
            arms.setdefault(trial.row.arm, {})[trial.row.seed] = training
    found = [
        (name, metric, arm, seeds)
        for name, arms in by_stage.items()
        if not _shared(arms)
        for metric in SHOWN
        for arm, seeds in arms.items()
        if any(metric in t.metrics for t in seeds.values())
    ]
    lines = sum(3 + len(seeds) for *_, seeds in found)
    most = min(_MOST, max(_FEWEST, _ALL_POINTS // max(1, lines)))
    return tuple(_curve(name, metric, arm, seeds, most) for name, metric, arm, seeds in found)


def _shared(arms: Mapping[str, Mapping[int, Training]]) -> bool:
    seeds = {seed for trainings in arms.values() for seed in trainings}
    return len(arms) > 1 and all(
        len({id(t[seed]) for t in arms.values() if seed in t}) == 1 for seed in seeds
    )


def _curve(stage: str, metric: str, arm: str, seeds: Mapping[int, Training], most: int) -> Curve:
    logged = {s: t.metrics[metric] for s, t in sorted(seeds.items()) if metric in t.metrics}
    steps = np.unique(np.concatenate([at for at, _ in logged.values()]))
    if len(steps) > most:
        steps = steps[np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))]
    table = np.full((len(logged), len(steps)), np.nan)
    for row, (at, values) in zip(table, logged.values(), strict=True):
        places = np.searchsorted(steps, at)
        inside = places < len(steps)
        hit = inside & (steps[np.minimum(places, len(steps) - 1)] == at)
        row[places[hit]] = values[hit]
    there = ~np.isnan(table)
    count = there.sum(axis=0)
    known = count > 0
    total = np.where(there, table, 0.0).sum(axis=0)
    mean = np.where(known, total / np.maximum(count, 1), np.nan)
    low = np.where(known, np.where(there, table, np.inf).min(axis=0), np.nan)
    high = np.where(known, np.where(there, table, -np.inf).max(axis=0), np.nan)
    return Curve(
        stage=stage,
        metric=metric,
        arm=arm,
        steps=tuple(steps.tolist()),
        mean=_plain(mean),
        low=_plain(low),
        high=_plain(high),
        by_seed={str(s): _plain(row) for s, row in zip(logged, table, strict=True)},
    )


def _plain(values: Floats) -> tuple[float | None, ...]:
    """Numbers with six digits, None for what is not finite: a page is not to carry more."""
    return tuple(float(f"{v:.6g}") if v - v == 0 else None for v in values.tolist())
