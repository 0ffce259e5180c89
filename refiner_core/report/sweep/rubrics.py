"""Which rubrics a sweep has moved: credit per rubric and arm.

In: the group of the sweep's question, and what its judge said of each rubric. Out:
:class:`~refiner_core.report.sweep.document.RubricRow` values. Credit is the score of a positive
rubric and 1 - score of a negative one, so that higher is better. Answers that were malformed were
not judged and are not in it: their share is another number.

Of very many evaluations only so many are read that a report stays quick: all arms with the first
seeds, and of hundreds of arms those that differ most from the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from refiner_core.evaluation.statistics import two_way_means
from refiner_core.report.sweep.document import RubricRow
from refiner_core.report.sweep.evidence import Evidence
from refiner_core.report.sweep.groups import Group

Floats = npt.NDArray[np.float64]
#: Evaluations that are read.
_MOST_READ = 80


def make_rubrics(
    evidence: Evidence, group: Group, differences: Mapping[str, float]
) -> tuple[RubricRow, ...]:
    """A row per rubric, those that differ most between arms first.

    ``differences`` are those of arms on the sweep's question.
    """
    if evidence.stored is None or evidence.sweep.baseline not in group.arms:
        return ()
    baseline = evidence.sweep.baseline
    asked = group.cells[baseline, group.seeds_of(baseline)[0]].measured.means.prompts
    arms = _arms(group, baseline, differences)
    seeds = sorted({seed for _, seed in group.cells})[: max(1, _MOST_READ // len(arms))]
    names: tuple[tuple[str, str], ...] | None = None
    by_arm: dict[str, dict[int, Floats]] = {}
    for arm in arms:
        for seed in seeds:
            cell = group.cells.get((arm, seed))
            if cell is None or cell.measured.means.prompts != asked:
                continue
            found = evidence.stored.rubrics(cell.evaluation, cell.measured, names)
            if found is None:
                continue
            names = names or found.rubrics
            by_arm.setdefault(arm, {})[seed] = found.values
    if names is None or baseline not in by_arm:
        return ()
    rows = [_row(name, i, by_arm, baseline) for i, name in enumerate(names)]
    return tuple(sorted(rows, key=_largest, reverse=True))


def _arms(group: Group, baseline: str, differences: Mapping[str, float]) -> list[str]:
    """The baseline, then the arms that are read, in the order of the group."""
    others = [arm for arm in group.arms if arm != baseline]
    by_size = sorted(others, key=lambda arm: -abs(differences.get(arm, 0.0)))
    kept = set(by_size[: _MOST_READ - 1])
    return [baseline, *(arm for arm in others if arm in kept)]


def _row(
    name: tuple[str, str], place: int, by_arm: dict[str, dict[int, Floats]], baseline: str
) -> RubricRow:
    base = {seed: values[place] for seed, values in by_arm[baseline].items()}
    means, differences = {}, {}
    n = 0
    for arm, seeds in by_arm.items():
        mine = {seed: values[place] for seed, values in seeds.items()}
        (mean,) = two_way_means(np.stack(list(mine.values()))[None])
        if not mean.n:
            continue
        means[arm] = mean.value
        n = max(n, mean.n)
        shared = [seed for seed in mine if seed in base]
        if arm == baseline or not shared:
            continue
        (found,) = two_way_means(np.stack([mine[s] - base[s] for s in shared])[None])
        if found.n:
            differences[arm] = (found.value, found.low, found.high)
    return RubricRow(name[0], name[1], n, means, differences)


def _largest(row: RubricRow) -> float:
    return max((abs(d[0]) for d in row.differences.values()), default=-1.0)
