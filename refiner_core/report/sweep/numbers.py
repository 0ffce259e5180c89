"""Arms against the baseline on one number.

In: a :class:`~refiner_core.report.sweep.groups.Group` and a metric. Out: a
:class:`~refiner_core.report.sweep.document.Comparison`: mean and interval per arm, the paired
difference, p-values that hold for all arms together (Holm), what each seed says, and a verdict.

What is compared is what both sides have: the seeds that both were measured with, the prompts on
which both have a value for all of these seeds. What was left out is said. Arms that were asked
other prompts are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from refiner_core.evaluation.metrics import (
    higher_is_better,
    is_number,
    is_yes_no,
    once_per_prompt,
)
from refiner_core.evaluation.names import base_of
from refiner_core.evaluation.statistics import (
    Difference,
    holm,
    mcnemar_of,
    two_way_means,
    wilson,
)
from refiner_core.report.drift import Drift, drifts
from refiner_core.report.sweep.document import Comparison, Key
from refiner_core.report.sweep.evidence import PromptMeans
from refiner_core.report.sweep.groups import Group
from refiner_core.report.sweep.said import said_absent, said_number, said_warnings
from refiner_core.report.sweep.sides import BySeed, Floats, Setting, Side


def compare_group(
    group: Group, setting: Setting, missing: Sequence[str] = (), *, primary: str = ""
) -> list[Comparison]:
    """All metrics of a group. ``missing`` are arms that were not measured in any way; ``primary``
    is the metric that answers the sweep's question, if it is of this group."""
    return [_compare(group, m, setting, missing, m == primary) for m in group.metrics]


def _compare(
    group: Group, metric: str, setting: Setting, missing: Sequence[str], primary: bool
) -> Comparison:
    sides = _sides(group, metric, setting)
    _means(sides, metric)
    base = _base(sides, setting)
    if base is not None:
        _differences(group, metric, base, sides)
        _adjust(sides)
    numbers = [said_number(side, base, group, metric, setting) for side in sides]
    numbers += [said_absent(arm, setting) for arm in missing]
    order = {arm: i for i, arm in enumerate(setting.arms)}
    return Comparison(
        key=Key(group.model, group.protocol, group.name, group.decoding, metric, group.judge),
        numbers=tuple(sorted(numbers, key=lambda n: order.get(n.arm, len(order)))),
        higher_is_better=higher_is_better(metric),
        primary=primary,
        warnings=said_warnings(base, sides, setting),
    )


def paired_layouts(group: Group, metric: str, setting: Setting) -> dict[str, Floats]:
    """Arm minus baseline [seeds that both have, prompts], of every arm that can be compared."""
    if setting.baseline not in group.arms or metric not in group.metrics:
        return {}
    sides = _sides(group, metric, setting)
    base = _base(sides, setting)
    if base is None:
        return {}
    _pair(base, sides)
    return {s.arm: s.differences for s in sides if s.differences is not None}


# ---------------------------------------------------------------- what there is


def _sides(group: Group, metric: str, setting: Setting) -> list[Side]:
    """Arms of the group with their values; those that were asked other prompts are refused."""
    first = setting.baseline if setting.baseline in group.arms else group.arms[0]
    asked = _prompts(group, first, group.seeds_of(first)[0])
    sides = []
    for arm in group.arms:
        side = Side(arm, group.seeds_of(arm), agents=group.agents)
        refusals = (_other_prompts(group, (arm, seed), asked, first) for seed in side.seeds)
        side.refused = next(filter(None, refusals), "")
        found = {seed: _row(group, arm, seed, metric) for seed in side.seeds}
        rows = {seed: row for seed, row in found.items() if row is not None}
        side.seeds = tuple(rows)
        if len({len(row) for row in rows.values()}) == 1:
            side.values = np.stack(list(rows.values()))
        sides.append(side)
    return sides


def _base(sides: Sequence[Side], setting: Setting) -> Side | None:
    """The baseline, if it has values on one set of prompts."""
    fitting = (s for s in sides if s.arm == setting.baseline and not s.refused)
    return next((s for s in fitting if s.values is not None), None)


def _row(group: Group, arm: str, seed: int, metric: str) -> Floats | None:
    return group.cells[arm, seed].measured.means.about(metric)[1]


def _prompts(group: Group, arm: str, seed: int) -> tuple[str, ...]:
    return group.cells[arm, seed].measured.means.prompts


def _other_prompts(group: Group, place: tuple[str, int], asked: tuple[str, ...], first: str) -> str:
    """Why an evaluation cannot be held against the first arm's; empty where it can."""
    cell = group.cells[place]
    own = cell.measured.means.prompts
    if own is not asked and own != asked:
        odd = sorted(set(own) ^ set(asked))
        side = "here" if odd[0] in set(own) else f"with {first}"
        return (
            f"other prompts: {len(own)} against {len(asked)} of {first}, {len(odd)} on one side "
            f"only (such as {odd[0]!r}, only {side})"
        )
    if group.fingerprint(cell) != group.protocol:
        return f"other prompts: they have the names of those of {first}, but not their content"
    return ""


# ---------------------------------------------------------------- estimates


def _means(sides: Sequence[Side], metric: str) -> None:
    """The mean of each arm over its seeds and prompts."""
    for together in _alike([s for s in sides if s.values is not None], lambda s: s.values):
        stacked = np.stack([s.values for s in together if s.values is not None])
        found = zip(together, two_way_means(stacked), _by_seed(stacked), strict=True)
        for side, mean, by_seed in found:
            side.by_seed = by_seed
            side.mean = _bounded(mean, metric) if mean.n else None


def _by_seed(values: Floats) -> list[BySeed]:
    """Of layouts [layouts, seeds, prompts]."""
    known = ~np.isnan(values)
    counts = known.sum(axis=2)
    means = np.where(known, values, 0.0).sum(axis=2) / np.maximum(counts, 1)
    return [BySeed(m, n) for m, n in zip(means.tolist(), counts.tolist(), strict=True)]


def _bounded(found: Difference, metric: str) -> Difference:
    """Means of shares stay in [0, 1]; where all are 0 or all are 1, the interval is Wilson's, as if
    each prompt were one yes or no."""
    if is_number(metric) or found.low is None or found.high is None:
        return found
    if found.value in (0.0, 1.0) and found.low == found.high:
        low, high = wilson(int(found.value) * found.n, found.n)
        return found._replace(low=low, high=high, interval="wilson over prompts")
    if metric == "rubric_score" and not 0.0 <= found.value <= 1.0:
        return found  # a recorded alternative of the aggregation leaves [0, 1]
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def _differences(group: Group, metric: str, base: Side, sides: Sequence[Side]) -> None:
    """Paired differences to the baseline over the seeds that both have, and what the reference says
    of them."""
    ready = _pair(base, sides)
    for together in _alike(ready, lambda s: s.differences):
        stacked = np.stack([s.differences for s in together if s.differences is not None])
        found = zip(together, two_way_means(stacked), _by_seed(stacked), strict=True)
        for side, difference, by_seed in found:
            side.changes = by_seed
            side.found = difference if difference.n else None
            _one_against_one(group, metric, side)
        _look_at_reference(group, metric, base, together, stacked)


def _pair(base: Side, sides: Sequence[Side]) -> list[Side]:
    """Put arm minus baseline into the sides that can be compared; these."""
    at = {seed: i for i, seed in enumerate(base.seeds)}
    ready = []
    for side in sides:
        if side is base or side.refused or side.values is None or base.values is None:
            continue
        side.shared = tuple(s for s in side.seeds if s in at)
        if side.shared:
            mine = [side.seeds.index(s) for s in side.shared]
            side.differences = side.values[mine] - base.values[[at[s] for s in side.shared]]
            ready.append(side)
    return ready


def _one_against_one(group: Group, metric: str, side: Side) -> None:
    """Of a yes or no with one sample per prompt and one seed, McNemar's exact test."""
    single = is_yes_no(metric) and once_per_prompt(metric, group.decoding)
    if len(side.shared) != 1 or not single or side.found is None or side.differences is None:
        return
    row = side.differences[0]
    p_value = mcnemar_of(row[~np.isnan(row)])
    side.found = side.found._replace(p_value=p_value, interval="t over prompts, p by McNemar")


def _look_at_reference(
    group: Group, metric: str, base: Side, sides: Sequence[Side], differences: Floats
) -> None:
    if base_of(metric) in ("judge_failed", "episode_error"):  # an outage is nobody's opinion
        return
    known: list[int] = []
    rows: list[list[Floats]] = []
    for place, side in enumerate(sides):
        pairs = [
            (
                group.cells[side.arm, seed].measured.reference,
                group.cells[base.arm, seed].measured.reference,
            )
            for seed in side.shared
        ]
        if all(a is not None and b is not None and a.values is b.values for a, b in pairs):
            side.drift = Drift("equal", prompts=differences.shape[2] * len(pairs))
            continue
        found = [_shift(a, b, metric) for a, b in pairs]
        shifts = [row for row in found if row is not None and len(row) == differences.shape[2]]
        if len(shifts) == len(pairs):
            known.append(place)
            rows.append(shifts)
    if known:
        for place, drift in zip(known, drifts(np.array(rows), differences[known]), strict=True):
            sides[place].drift = drift


def _shift(one: PromptMeans | None, other: PromptMeans | None, metric: str) -> Floats | None:
    """How the copier's answers were scored, less how they were scored in another evaluation."""
    if one is None or other is None or one.prompts != other.prompts:
        return None
    a, b = one.about(metric)[1], other.about(metric)[1]
    return None if a is None or b is None else a - b


def _alike(sides: Sequence[Side], values: Callable[[Side], Floats | None]) -> list[list[Side]]:
    """Sides whose values have one shape, together."""
    found: dict[tuple[int, ...], list[Side]] = {}
    for side in sides:
        array = values(side)
        if array is not None:
            found.setdefault(array.shape, []).append(side)
    return list(found.values())


def _adjust(sides: Sequence[Side]) -> None:
    """Holm over the arms that were compared."""
    tested = [s for s in sides if s.found is not None and s.found.p_value is not None]
    raw = [s.found.p_value for s in tested if s.found is not None and s.found.p_value is not None]
    for side, p_value in zip(tested, holm(raw), strict=True):
        side.p_adjusted = p_value


# ---------------------------------------------------------------- what is said of it
