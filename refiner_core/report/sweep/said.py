"""What is said of the arms of a comparison: numbers, verdicts, notes and warnings.

In: sides with their estimates. Out: the rows of a
:class:`~refiner_core.report.sweep.document.Comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence

from refiner_core.evaluation.metrics import (
    higher_is_better,
)
from refiner_core.evaluation.statistics import Difference
from refiner_core.report.drift import Drift
from refiner_core.report.sweep.document import ArmNumber, SeedPoint, Verdict
from refiner_core.report.sweep.groups import Group
from refiner_core.report.sweep.sides import ALPHA, BySeed, Setting, Side

#: Above this share of prompts without a value, those that are left are no fair choice of them.
_MANY_EXCLUDED = 0.2
_NOTHING = Difference(float("nan"), None, None, 0, 0, 0, None, "none")


def said_number(
    side: Side, base: Side | None, group: Group, metric: str, setting: Setting
) -> ArmNumber:
    """One arm's row."""
    mean, found = side.mean, side.found
    is_base = side.arm == setting.baseline
    verdict = None if is_base else _verdict(side, base, metric)
    return ArmNumber(
        arm=side.arm,
        value=None if mean is None else mean.value,
        low=None if mean is None else mean.low,
        high=None if mean is None else mean.high,
        difference=None if found is None else found.value,
        difference_low=None if found is None else found.low,
        difference_high=None if found is None else found.high,
        p=None if found is None else found.p_value,
        p_adjusted=side.p_adjusted,
        n=found.n if found is not None else (mean.n if mean is not None else 0),
        seeds=len(side.shared) if found is not None else len(side.seeds),
        excluded=(found or mean or _NOTHING).excluded,
        interval=(found or mean or _NOTHING).interval,
        verdict=verdict,
        points=_points(side, setting),
        note="; ".join(_notes(side, base, setting, is_base)),
    )


def _verdict(side: Side, base: Side | None, metric: str) -> Verdict | None:
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


def _points(side: Side, setting: Setting) -> tuple[SeedPoint, ...]:
    mine = _of_seeds(side.seeds, side.by_seed)
    change = _of_seeds(side.shared, side.changes)
    nothing = (None, 0)
    return tuple(
        SeedPoint(seed, mine.get(seed, nothing)[0], change.get(seed, nothing)[0],
                  mine.get(seed, nothing)[1])
        for seed in setting.seeds
        if seed in mine or (side.arm, seed) in setting.absent
    )  # fmt: skip


def _of_seeds(seeds: Sequence[int], found: BySeed | None) -> dict[int, tuple[float | None, int]]:
    if found is None:
        return {}
    triples = zip(seeds, found.means, found.counts, strict=True)
    return {seed: (mean if count else None, count) for seed, mean, count in triples}


def _notes(side: Side, base: Side | None, setting: Setting, is_base: bool) -> list[str]:
    notes = [side.refused] if side.refused else []
    notes += [
        f"seed {seed} is missing: {setting.absent[side.arm, seed]}"
        for seed in setting.seeds
        if seed not in side.seeds and (side.arm, seed) in setting.absent
    ]
    if is_base:
        return notes
    if base is None or base.values is None:
        notes.append(f"the baseline {setting.baseline} was not measured in this way")
        return notes
    if not side.refused and side.values is not None and not side.shared:
        notes.append("no seed in common with the baseline")
    left = [s for s in side.seeds if side.shared and s not in side.shared]
    if left:
        notes.append(
            f"compared on {_seeds(side.shared)}: the baseline has no seed "
            f"{', '.join(map(str, left))}"
        )
    return notes + _of_few(side) + _of_drift(side.drift, agents=side.agents)


def _of_few(side: Side) -> list[str]:
    found = side.found
    if found is None:
        return []
    notes = []
    if len(side.shared) == 1:
        notes.append("one seed: this is about these checkpoints, not about their recipes")
    elif len(side.shared) == 2:
        notes.append("two seeds: an interval of 95 % covers as little as 91 %")
    if found.n < 2:
        notes.append("one prompt has no interval")
    if found.excluded > _MANY_EXCLUDED * (found.n + found.excluded):
        notes.append(
            f"{found.excluded} of {found.n + found.excluded} prompts have no value on some side: "
            "what is left need not be like them"
        )
    return notes


def _of_drift(drift: Drift, *, agents: bool) -> list[str]:
    if drift.kind not in ("moved", "noise"):
        return []
    who, whose = "the judge", "answers of the random copier"
    if agents:
        who, whose = "the environment or its user", "attempts of who does nothing"
    what = (
        f"{drift.changed} of {drift.prompts} {whose}, the same on both sides, were scored otherwise"
    )
    size = f"{drift.shift:+.3g} ({drift.low:+.3g} to {drift.high:+.3g})"
    if drift.kind == "noise":
        return [f"{who} is noisy: {what}, by {size} on average, which may be chance"]
    return [
        f"{who} moved: {what}, by {size} on average; evaluate both again with one "
        "`evaluate.occasion`"
    ]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def said_absent(arm: str, setting: Setting) -> ArmNumber:
    """An arm that was not measured at all."""
    why = {s: setting.absent[arm, s] for s in setting.seeds if (arm, s) in setting.absent}
    points = tuple(SeedPoint(seed, None, None, 0) for seed in why)
    note = "; ".join(f"seed {s} is missing: {text}" for s, text in why.items())
    verdict: Verdict | None = None if arm == setting.baseline else "missing"
    return ArmNumber(
        arm=arm,
        value=None, low=None, high=None,
        difference=None, difference_low=None, difference_high=None,
        p=None, p_adjusted=None,
        n=0, seeds=0, excluded=0, interval="none",
        verdict=verdict, points=points, note=note,
    )  # fmt: skip


def said_warnings(base: Side | None, sides: Sequence[Side], setting: Setting) -> tuple[str, ...]:
    """What holds of the whole comparison."""
    found = []
    if base is None and sides:
        found.append(
            f"The baseline {setting.baseline} was not measured in this way: nothing is compared."
        )
    refused = [s.arm for s in sides if s.refused]
    if refused:
        found.append(f"Not comparable, since asked other prompts: {', '.join(refused)}.")
    moved = [s.arm for s in sides if s.drift.kind == "moved"]
    if moved:
        who = "environment" if any(s.agents for s in sides) else "judge"
        found.append(
            f"The {who} has scored the same answers otherwise in evaluations of: "
            f"{', '.join(moved)}."
        )
    return tuple(found)
