"""Arms against the baseline on one number.

In: a :class:`~refiner_core.report.sweep.evidence.Group` and a metric. Out: a
:class:`~refiner_core.report.sweep.sweep_report.Comparison`: mean and interval per arm, the paired
difference, p-values that hold for all arms together (Holm), values by seed, and a verdict.

A comparison uses the seeds that both sides were measured with, and the prompts with a value on both
sides for all of these seeds; exclusions are reported. Arms measured on other prompts are refused.

The judge may have changed between two evaluations. The random copier's answers are the same in
every evaluation of a protocol: if their scores differ, then the judge, its server, or the scoring
code differs. The rule (:class:`_Drift`), for a difference D of arm and baseline and a
shift R of the reference, both paired over seeds and prompts:

1. All references equal (to 1e-9): the judge has not changed, and neither does the result.
2. R differs from 0 over prompts, all seeds together (p < 0.01) or one seed alone (p < 0.01 / number
   of seeds): the judge has moved. D is no progress, unless its whole interval, and that of D - R,
   lie on one side of 0 by more than three times the largest plausible R (its interval over prompts,
   of all seeds or of the seed that moved): the judge would have to have moved that much more on the
   arm's answers than on the copier's.
3. Otherwise the judge is noisy. D counts only if D - R is clear as well, which excludes effects of
   the judge's noise alone.

Seeds are fixed in the test of R: the question is whether *these* evaluations were judged equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.evaluation.metric_names import base_of
from refiner_core.evaluation.metrics import higher_is_better, is_number, is_yes_no, once_per_prompt
from refiner_core.evaluation.statistics import Difference, holm, mcnemar_of, two_way_means, wilson
from refiner_core.report.sweep.evidence import Group, PromptMeans
from refiner_core.report.sweep.sweep_report import ArmNumber, Comparison, NumberKey, Row, Verdict

Floats = npt.NDArray[np.float64]
SAME = 1e-9
LEVEL = 0.01
MARGIN = 3.0


class _Drift(NamedTuple):
    """The reference's verdict on one arm against the baseline.

    Attributes
    ----------
    kind
        ``equal``; ``noise`` (differs, but not beyond chance); ``moved``; ``unknown`` (there is no
        reference).
    shift, low, high
        The reference's mean shift with its interval over prompts, of all seeds or of the seed with
        the clearest shift.
    changed, prompts
        Number of the reference's differing scores, and of all its scores (all seeds).
    net
        The arm's difference minus the reference's, by prompt.
    """

    kind: Literal["equal", "noise", "moved", "unknown"]
    shift: float = 0.0
    low: float = 0.0
    high: float = 0.0
    changed: int = 0
    prompts: int = 0
    net: Difference | None = None

    def stands(self, found: Difference) -> bool:
        """True if a difference that is clear by itself remains so with this drift."""
        if self.kind in ("equal", "unknown"):
            return True
        if self.net is None or self.net.low is None or self.net.high is None:
            return False
        margin = MARGIN * max(abs(self.low), abs(self.high)) if self.kind == "moved" else 0.0
        if found.low is None or found.high is None:
            return False
        above = min(found.low, self.net.low) > margin
        below = max(found.high, self.net.high) < -margin
        return above or below


UNKNOWN = _Drift("unknown")


def _drift_of(reference: Floats, differences: Floats) -> _Drift:
    """The reference's verdict on one arm.

    Parameters
    ----------
    reference
        Arm minus baseline of the copier's answers [seeds, prompts]; NaN if either has no value.
    differences
        Arm minus baseline of the model's answers, of the same shape.
    """
    known = int(np.isfinite(reference).sum())
    changed = int((np.abs(np.nan_to_num(reference)) > SAME).sum())
    if not known:
        return UNKNOWN
    if not changed:
        return _Drift("equal", prompts=known)
    seeds = len(reference)
    (found,) = two_way_means(reference.mean(axis=0)[None, None])
    alone = two_way_means(reference[:, None]) if seeds > 1 else []
    (net,) = two_way_means((differences - reference)[None])
    moved = [f for f in alone if f.p_value is not None and f.p_value < LEVEL / seeds]
    if found.p_value is not None and found.p_value < LEVEL:
        moved.append(found)
    if moved:
        found = max(moved, key=lambda f: abs(f.value))
    low = found.value if found.low is None else found.low
    high = found.value if found.high is None else found.high
    return _Drift("moved" if moved else "noise", found.value, low, high, changed, known, net)


ALPHA = 0.05


@dataclass
class _Side:
    """One arm of a comparison under construction."""

    arm: str
    seeds: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    mean: Difference | None = None
    found: Difference | None = None
    drift: _Drift = UNKNOWN
    values: Floats | None = None  # [seeds, prompts]
    differences: Floats | None = None  # [shared seeds, prompts]
    refused: str = ""
    absent: bool = False  # not measured at all
    agents: bool = False
    p_adjusted: float | None = None


@dataclass(frozen=True)
class ComparisonSetting:
    """Shared parameters of a sweep's comparisons.

    ``absent`` maps arm and seed to the reason why there is no evaluation.
    """

    baseline: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    absent: Mapping[tuple[str, int], str] = field(default_factory=dict)


#: Above this share of prompts without a value, the rest is no fair selection.
_MANY_EXCLUDED = 0.2
_NOTHING: Any = Difference(None, None, None, 0, 0, 0, None, "none")  # type: ignore[arg-type]


def number_text(
    side: _Side, base: _Side | None, metric: str, setting: ComparisonSetting
) -> ArmNumber:
    """One arm's row."""
    mean, found = side.mean or _NOTHING, side.found or _NOTHING
    basis = side.found or mean
    is_base = side.arm == setting.baseline
    return ArmNumber(
        arm=side.arm,
        value=mean.value,
        low=mean.low,
        high=mean.high,
        difference=found.value,
        difference_low=found.low,
        difference_high=found.high,
        p=found.p_value,
        p_adjusted=side.p_adjusted,
        n=basis.n,
        seeds=len(side.seeds if side.found is None else side.shared),
        excluded=basis.excluded,
        interval=basis.interval,
        verdict=None if is_base else _verdict(side, base, metric),
        points=tuple(_points(side, setting)),
        note="; ".join(_notes(side, base, setting, is_base)),
    )


def _verdict(side: _Side, base: _Side | None, metric: str) -> Verdict | None:
    if side.refused:
        return "not comparable"
    if side.mean is None:
        return "missing"
    if base is None or base.mean is None:
        return "not comparable"
    found = side.found
    if found is None:
        return "missing"
    clear = side.p_adjusted is not None and side.p_adjusted < ALPHA
    stands = side.drift.stands(found)
    if side.drift.kind == "moved" and not (clear and stands):
        return "judge moved"
    good = higher_is_better(metric)
    if good is None:
        return None
    if not (clear and stands):
        return "not clear"
    return "better" if (found.value > 0) == good else "worse"


def _points(side: _Side, setting: ComparisonSetting) -> Iterator[Row]:
    values = dict(zip(side.seeds, () if side.values is None else side.values, strict=False))
    changes = side.differences
    changed = dict(zip(side.shared, () if changes is None else changes, strict=False))
    for seed in setting.seeds:
        if seed in values or (side.arm, seed) in setting.absent:
            value, count = _of_known(values.get(seed))
            change, _ = _of_known(changed.get(seed))
            yield {"seed": seed, "value": value, "difference": change, "n": count}


def _of_known(row: Floats | None) -> tuple[float | None, int]:
    """The mean over the prompts with a value, and their number."""
    known = () if row is None else row[~np.isnan(row)]
    return (float(np.mean(known)) if len(known) else None), len(known)


def _notes(
    side: _Side, base: _Side | None, setting: ComparisonSetting, is_base: bool
) -> Iterator[str]:
    if side.refused:
        yield side.refused
    for seed in setting.seeds:
        if seed not in side.seeds and (side.arm, seed) in setting.absent:
            yield f"seed {seed} is missing: {setting.absent[side.arm, seed]}"
    if is_base or side.absent:
        return
    if base is None or base.values is None:
        yield f"the baseline {setting.baseline} was not measured in this way"
        return
    if not side.refused and side.values is not None and not side.shared:
        yield "no seed in common with the baseline"
    if left := [str(s) for s in side.seeds if side.shared and s not in side.shared]:
        own = ", ".join(map(str, side.shared))
        yield f"compared on seed {own}: the baseline has no seed {', '.join(left)}"
    if (found := side.found) is not None:
        yield from filter(None, [_FEW_SEEDS.get(len(side.shared))])
        if found.n < 2:
            yield "one prompt has no interval"
        if found.excluded > _MANY_EXCLUDED * (whole := found.n + found.excluded):
            yield (
                f"{found.excluded} of {whole} prompts have no value on some side: the rest "
                "may differ from them"
            )
    if side.drift.kind in ("moved", "noise"):
        yield _of_drift(side.drift, agents=side.agents)


_FEW_SEEDS = {
    1: "one seed: this is about these checkpoints, not about their recipes",
    2: "two seeds: an interval of 95 % covers as little as 91 %",
}


def _of_drift(drift: _Drift, *, agents: bool) -> str:
    who, whose = "the judge", "answers of the random copier"
    if agents:
        who, whose = "the environment or its user", "attempts of the do-nothing agent"
    what = (
        f"{drift.changed} of {drift.prompts} {whose}, the same on both sides, were scored "
        f"otherwise, by {drift.shift:+.3g} ({drift.low:+.3g} to {drift.high:+.3g}) on average"
    )
    if drift.kind == "noise":
        return f"{who} is noisy: {what}, which may be chance"
    return f"{who} moved: {what}; evaluate both again with one `evaluate.occasion`"


def compare_group(
    group: Group, setting: ComparisonSetting, missing: Sequence[str] = (), *, primary: str = ""
) -> list[Comparison]:
    """All metrics of a group. ``missing`` are arms without any measurement; ``primary``
    is the metric that answers the sweep's question, if it belongs to this group."""
    return [_compare(group, m, setting, missing, m == primary) for m in group.metrics]


def _compare(
    group: Group, metric: str, setting: ComparisonSetting, missing: Sequence[str], primary: bool
) -> Comparison:
    sides = _sides(group, metric, setting.baseline)
    _means(sides, metric)
    base = _base(sides, setting.baseline)
    if base is not None:
        _differences(group, metric, base, sides)
        _adjust(sides)
    everybody = [*sides, *(_Side(arm, absent=True) for arm in missing)]
    numbers = [number_text(side, base, metric, setting) for side in everybody]
    order = {arm: i for i, arm in enumerate(setting.arms)}
    return Comparison(
        key=NumberKey(group.model, group.protocol, group.name, group.decoding, metric, group.judge),
        numbers=tuple(sorted(numbers, key=lambda n: order.get(n.arm, len(order)))),
        higher_is_better=higher_is_better(metric),
        primary=primary,
    )


def paired_layouts(group: Group, metric: str, baseline: str) -> dict[str, Floats]:
    """Arm minus baseline [shared seeds, prompts], for every comparable arm."""
    if baseline not in group.arms or metric not in group.metrics:
        return {}
    sides = _sides(group, metric, baseline)
    base = _base(sides, baseline)
    compared = [] if base is None else _pair(base, sides)
    return {s.arm: s.differences for s in compared if s.differences is not None}


# ---------------------------------------------------------------- available values


def _sides(group: Group, metric: str, baseline: str) -> list[_Side]:
    """Arms of the group with their values; those measured on other prompts are refused."""
    first = baseline if baseline in group.arms else group.arms[0]
    asked = group.cells[first, group.seeds_of(first)[0]].means.prompts
    sides = []
    for arm in group.arms:
        side = _Side(arm, group.seeds_of(arm), agents=group.agents)
        refusals = (_other_prompts(group, (arm, seed), asked, first) for seed in side.seeds)
        side.refused = next(filter(None, refusals), "")
        rows = {
            seed: row
            for seed in side.seeds
            if (row := group.cells[arm, seed].means.about(metric)[1]) is not None
        }
        side.seeds = tuple(rows)
        if len({len(row) for row in rows.values()}) == 1:
            side.values = np.stack(list(rows.values()))
        sides.append(side)
    return sides


def _base(sides: Sequence[_Side], baseline: str) -> _Side | None:
    """The baseline, if it has values on one set of prompts."""
    fitting = (s for s in sides if s.arm == baseline and not s.refused)
    return next((s for s in fitting if s.values is not None), None)


def _other_prompts(group: Group, place: tuple[str, int], asked: tuple[str, ...], first: str) -> str:
    """Reason why an evaluation is not comparable with the first arm's; empty if it is."""
    cell = group.cells[place]
    own = cell.means.prompts
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


def _means(sides: Sequence[_Side], metric: str) -> None:
    """The mean of each arm over its seeds and prompts."""
    for together, stacked in _stacked(sides, "values"):
        for side, mean in zip(together, two_way_means(stacked), strict=True):
            side.mean = _bounded(mean, metric) if mean.n else None


def _bounded(found: Difference, metric: str) -> Difference:
    """Clip means of shares to [0, 1]; if all are 0 or all are 1, use Wilson's interval, as if each
    prompt were one yes or no."""
    if is_number(metric) or found.low is None or found.high is None:
        return found
    if found.value in (0.0, 1.0) and found.low == found.high:
        low, high = wilson(int(found.value) * found.n, found.n)
        return found._replace(low=low, high=high, interval="wilson over prompts")
    if metric == "rubric_score" and not 0.0 <= found.value <= 1.0:
        return found  # an alternative aggregation leaves [0, 1]
    return found._replace(low=max(0.0, found.low), high=min(1.0, found.high))


def _differences(group: Group, metric: str, base: _Side, sides: Sequence[_Side]) -> None:
    """Paired differences to the baseline over shared seeds, with the reference's verdict on
    them."""
    for together, stacked in _stacked(_pair(base, sides), "differences"):
        for side, difference in zip(together, two_way_means(stacked), strict=True):
            side.found = difference if difference.n else None
            _one_against_one(group, metric, side)
            _check_reference(group, metric, base, side)


def _pair(base: _Side, sides: Sequence[_Side]) -> list[_Side]:
    """Store arm minus baseline in the comparable sides; returns these."""
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


def _one_against_one(group: Group, metric: str, side: _Side) -> None:
    """McNemar's exact test for a yes/no metric with one sample per prompt and one seed."""
    single = is_yes_no(metric) and once_per_prompt(metric, group.decoding)
    if len(side.shared) != 1 or not single or side.found is None or side.differences is None:
        return
    row = side.differences[0]
    p_value = mcnemar_of(row[~np.isnan(row)])
    side.found = side.found._replace(p_value=p_value, interval="t over prompts, p by McNemar")


def _check_reference(group: Group, metric: str, base: _Side, side: _Side) -> None:
    if base_of(metric) in ("judge_failed", "episode_error"):  # an outage is no judgement
        return
    assert side.differences is not None, "only compared sides have a reference check"
    pairs = [
        tuple(group.cells[arm, seed].reference for arm in (side.arm, base.arm))
        for seed in side.shared
    ]
    if all(a is not None and b is not None and a.values is b.values for a, b in pairs):
        side.drift = _Drift("equal", prompts=side.differences.size)
        return
    shifts = [_shift(a, b, metric) for a, b in pairs]
    known = [row for row in shifts if row is not None and len(row) == side.differences.shape[1]]
    if len(known) == len(pairs):
        side.drift = _drift_of(np.array(known), side.differences)


def _shift(one: PromptMeans | None, other: PromptMeans | None, metric: str) -> Floats | None:
    """Scores of the copier's answers, minus those in another evaluation."""
    if one is None or other is None or one.prompts != other.prompts:
        return None
    a, b = one.about(metric)[1], other.about(metric)[1]
    return None if a is None or b is None else a - b


def _stacked(sides: Sequence[_Side], name: str) -> Iterator[tuple[list[_Side], Floats]]:
    """Sides whose ``values`` or ``differences`` have the same shape, with these as an array
    [sides, seeds, prompts]."""
    found: dict[tuple[int, ...], list[_Side]] = {}
    for side in sides:
        if getattr(side, name) is not None:
            found.setdefault(getattr(side, name).shape, []).append(side)
    for together in found.values():
        yield together, np.stack([getattr(side, name) for side in together])


def _adjust(sides: Sequence[_Side]) -> None:
    """Holm's correction over the compared arms."""
    tested = [s for s in sides if s.found is not None and s.found.p_value is not None]
    raw = [s.found.p_value for s in tested if s.found is not None and s.found.p_value is not None]
    for side, p_value in zip(tested, holm(raw), strict=True):
        side.p_adjusted = p_value
