"""The judge x policy matrix of a sweep: every arm under every judge and rubric set.

In: groups of evaluations of the last model. Out: a row for each way of judging, with each arm's
mean and rank, and how far the rows agree on the order of arms (Kendall's tau-b, by SciPy). An arm
whose evaluations met a judge that had moved has no rank. A judge that trains no arm is held out:
training finds the weaknesses of the judge that it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from refiner_core.evaluation.statistics import two_way_means
from refiner_core.report.sweep.document import Agreement, Comparison, MatrixCell, MatrixRow
from refiner_core.report.sweep.evidence import Evidence
from refiner_core.report.sweep.groups import Group

METRIC = "rubric_score"
#: Means that differ by less are one rank.
_SAME = 1e-9
_FEWEST_ARMS = 3


def make_matrix(
    evidence: Evidence,
    groups: Sequence[Group],
    chosen: Group | None,
    comparisons: Sequence[Comparison] = (),
) -> tuple[MatrixRow, ...]:
    """Rows in the order of groups, for the model and decoding of the sweep's question.

    ``comparisons`` say under which protocols the judge of an arm has moved.
    """
    if chosen is None:
        return ()
    fitting = [
        g
        for g in groups
        if (g.model, g.decoding) == (chosen.model, chosen.decoding) and METRIC in g.metrics
    ]
    trains = _trained_by(evidence, chosen.model)
    moved = _moved(comparisons, chosen.model)
    return tuple(
        _row(evidence, group, trains, moved.get(group.protocol, frozenset())) for group in fitting
    )


def _moved(comparisons: Sequence[Comparison], model: str) -> dict[str, frozenset[str]]:
    """Protocol -> arms whose judge has moved."""
    return {
        c.key.protocol: frozenset(n.arm for n in c.numbers if n.verdict == "judge moved")
        for c in comparisons
        if c.key.metric == METRIC and c.key.model == model
    }


def _row(
    evidence: Evidence,
    group: Group,
    trains: Mapping[str, tuple[object, object]],
    moved: frozenset[str],
) -> MatrixRow:
    protocol = evidence.protocols.get(group.protocol, {})
    judge, rubrics = protocol.get("judge") or {}, protocol.get("rubrics") or {}
    asked = _asked(protocol)
    arms = [arm.name for arm in evidence.sweep.arms]
    means = {arm: _mean(group, arm) for arm in arms}
    known = [m[0] for arm, m in means.items() if m is not None and arm not in moved]
    cells = []
    for arm in arms:
        found = means[arm]
        if found is None:
            cells.append(MatrixCell(arm, None, None, None, None))
            continue
        rank = 1 + sum(other > found[0] + _SAME for other in known)
        cells.append(MatrixCell(arm, *found, None if arm in moved else rank, arm in moved))
    return MatrixRow(
        protocol=group.name,
        judge="@".join(str(judge[k]) for k in ("model", "prompt") if judge.get(k)),
        rubrics=" ".join(str(rubrics[k]) for k in ("source", "static") if rubrics.get(k)),
        metric=METRIC,
        decoding=group.decoding,
        trains=tuple(arm for arm in arms if trains.get(arm) == asked),
        cells=tuple(cells),
    )


def _mean(group: Group, arm: str) -> tuple[float, float | None, float | None] | None:
    rows = [group.cells[arm, s].measured.means.of(METRIC) for s in group.seeds_of(arm)]
    found = [row for row in rows if row is not None]
    if not found or len({len(row) for row in found}) > 1:
        return None
    (mean,) = two_way_means(np.stack(found)[None])
    return (mean.value, mean.low, mean.high) if mean.n else None


def _trained_by(evidence: Evidence, model: str) -> dict[str, tuple[object, object]]:
    """Arm -> judge and rubrics of its reward, as its evaluation under its own protocol has them."""
    found: dict[str, tuple[object, object]] = {}
    for trial in evidence.trials:
        own = evidence.evaluations.get(trial.stages.get(f"evaluate-{model}", ""))
        if own is not None and own.measured and trial.row.arm not in found:
            found[trial.row.arm] = _asked(evidence.protocols.get(own.measured[0].protocol, {}))
    return found


def _asked(protocol: Mapping[str, Any]) -> tuple[object, object]:
    return protocol.get("judge"), protocol.get("rubrics")


def make_agreement(matrix: Sequence[MatrixRow]) -> tuple[Agreement, ...]:
    """How far each two rows put the arms in one order; of arms that both have, at least three."""
    from scipy.stats import kendalltau

    found = []
    for (i, first), (j, second) in combinations(enumerate(matrix), 2):
        pairs = [
            (a.value, b.value)
            for a, b in zip(first.cells, second.cells, strict=True)
            if a.value is not None and b.value is not None and not (a.moved or b.moved)
        ]
        if len(pairs) < _FEWEST_ARMS:
            continue
        result = kendalltau([round(a, 9) for a, _ in pairs], [round(b, 9) for _, b in pairs])
        tau = float(result.statistic)
        found.append(Agreement(i, j, None if tau != tau else tau, len(pairs)))
    return tuple(found)
