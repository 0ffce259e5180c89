"""Statistical power of a planned sweep: the smallest effect that it can detect.

In: a planned sweep, its number of evaluated prompts, and evidence of spreads from earlier
evaluations (:class:`SpreadEvidence`). Out: a :class:`Detectable` with warnings and sufficient
designs. The formula is that of the comparison itself (:mod:`refiner_core.evaluation.power`). Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from refiner_core.evaluation.metrics import is_number
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    likely_components,
    power_of,
)
from sweeps.forecast import amount
from sweeps.values import Question, SweepPlan

POWER, ALPHA = 0.8, 0.05
#: Largest number of seeds, and multiple of the prompts, that is suggested.
_MOST_SEEDS, _MOST_TIMES = 20, 64
#: Shares this near to 0 or 1 can hardly change.
_EDGE = 0.03

Basis = Literal["pairs", "one seed", "assumed", "nothing"]


@dataclass(frozen=True)
class SpreadEvidence:
    """Evidence of spreads before the sweep.

    Attributes
    ----------
    components
        Of the paired difference of two arms; None if not even an assumption makes sense.
    basis, text
        Basis of the components: a word for scripts, a sentence for people.
    mean
        Mean of the metric in these evaluations; None if there were none.
    """

    components: VarianceComponents | None
    basis: Basis
    text: str
    mean: float | None = None


@dataclass(frozen=True)
class Detectable:
    """Smallest effects that the sweep can detect.

    Attributes
    ----------
    aim
        The metric, and its smallest change that would matter.
    effect
        The smallest difference to the baseline that is found in 80 % of such sweeps, by the
        strictest comparison of all arms (Holm). None: unknown.
    effect_range
        Its likely range (80 %), if the spread of seeds comes from few seeds; else None.
    seeds, prompts, arms
        As planned; ``arms`` are those compared with the baseline; ``prompts`` is None if unknown.
    power_for_wanted
        Probability of finding the smallest effect that matters.
    would_do
        If the sweep is too small: sufficient ``seeds`` with the planned prompts, or sufficient
        ``prompts`` with the planned seeds. None: no reasonable number suffices.
    warnings
        Reasons why the sweep may not answer its question.
    """

    aim: Question
    effect: float | None
    seeds: int
    prompts: int | None
    arms: int
    evidence: SpreadEvidence
    power_for_wanted: float | None = None
    would_do: Mapping[str, int | None] | None = None
    warnings: tuple[str, ...] = ()
    effect_range: tuple[float, float] | None = None


def aim_of(plan: SweepPlan) -> Question:
    """The question with defaults filled in, that is the deciding metric: the last model, ``oracle``
    if answers have a known truth, else ``rubric_score`` (for agents ``pass@1``), and the sampled
    decoding."""
    question, stages = plan.sweep.question, plan.trials[0].plan.stages
    found = [s for s in stages if s.kind == "evaluate"]
    model = question.model or (found[-1].model if found else "")
    synthetic = any(s.sources.get("data.rl", "").startswith("synthetic:") for s in stages)
    usual = "oracle" if synthetic else "rubric_score"
    metric = question.metric or ("pass@1" if plan.config.environment.name else usual)
    chosen = plan.trials[0].plan.evaluation(model, question.protocol)
    decodings = tuple(chosen.identity.get("evaluate.decoding") or ()) if chosen else ()
    default = "sampled" if "sampled" in decodings or not decodings else decodings[0]
    decoding = question.decoding or default
    return replace(question, model=model, metric=metric, decoding=decoding)


def assumed(metric: str) -> SpreadEvidence:
    """Evidence without measurements: the largest spread of shares; none for other metrics."""
    if is_number(metric):
        text = f"nothing: {metric} has no bounds, and no earlier evaluation of it was found"
        return SpreadEvidence(None, "nothing", text)
    # Two independent coins: no paired difference of shares with independent noise spreads more.
    text = (
        "an assumption: independent answers, the largest spread of a share; no "
        "earlier evaluation was found"
    )
    return SpreadEvidence(VarianceComponents(None, 0.0, 0.5), "assumed", text)


def detectable(plan: SweepPlan, prompts: int | None, evidence: SpreadEvidence) -> Detectable:
    """Smallest effects that a sweep can detect.

    Parameters
    ----------
    prompts
        Held-out prompts of the deciding metric; None if unknown.
    """
    aim = aim_of(plan)
    seeds = len({t.seed for t in plan.trials})
    arms = max(0, len({t.arm for t in plan.trials}) - 1)
    strict = ALPHA / max(1, arms)
    known = evidence.components
    effect = found = would_do = limits = None
    if known is not None and prompts is not None and prompts >= 2 and seeds:
        effect = detectable_effect(known, seeds, prompts, POWER, strict)
        if (likely := likely_components(known)) is not None and seeds > 1:
            low, high = (detectable_effect(c, seeds, prompts, POWER, strict) for c in likely)
            limits = low, high
        if (wanted := aim.smallest_effect) is not None:
            found = power_of(known, seeds, prompts, wanted, strict)
            if found < POWER:
                would_do = _would_do(known, seeds, prompts, wanted, strict)
    result = Detectable(aim, effect, seeds, prompts, arms, evidence, found, would_do, (), limits)
    return replace(result, warnings=tuple(_warnings(plan, result)))


def _would_do(
    known: VarianceComponents, seeds: int, prompts: int, wanted: float, alpha: float
) -> dict[str, int | None]:
    def enough(s: int, p: int) -> bool:
        return power_of(known, s, p, wanted, alpha) >= POWER

    return {
        "seeds": _least(lambda s: enough(s, prompts), seeds, _MOST_SEEDS),
        "prompts": _least(lambda p: enough(seeds, p), prompts, prompts * _MOST_TIMES),
    }


def _least(enough: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest sufficient number from ``low`` to ``high``; ``enough`` is monotonic."""
    found = low + bisect_left(range(low, high + 1), True, key=enough)
    return found if found <= high else None


# ---------------------------------------------------------------- warnings


def _warnings(plan: SweepPlan, found: Detectable) -> list[str]:
    aim, texts = found.aim, []
    if plan.trials[0].plan.evaluation(aim.model, aim.protocol) is None:
        where = f" under protocol {aim.protocol}" if aim.protocol else ""
        return [
            f"No stage evaluates {aim.model or 'any model'}{where}: the sweep's question stays "
            "open; add `evaluate` to stages, or correct `question:`"
        ]
    if found.prompts is not None and found.prompts < 2:
        texts.append(
            f"{found.prompts} held-out prompts: nothing can be compared; raise "
            "data.held_out_fraction, or evaluate on a protocol with prompts of its own"
        )
    if found.seeds == 1:
        texts.append(
            "One seed: a difference is one of these checkpoints, and says nothing about the "
            "recipes; at least 3 seeds"
        )
    elif found.seeds == 2:
        texts.append("Two seeds: 95 % intervals cover as little as 91 %; at least 3 seeds")
    mean = found.evidence.mean
    if mean is not None and not is_number(aim.metric) and not _EDGE < mean < 1 - _EDGE:
        how = "better; choose another metric or harder prompts"
        if mean <= _EDGE:
            how = "worse, and has little to learn from; look at the samples first"
        texts.append(f"{aim.metric} was {mean:.2f} so far: an arm can hardly be {how}")
    power, wanted = found.power_for_wanted, aim.smallest_effect
    if wanted is not None and power is not None and power < POWER:
        ways = [f"{number} {what}" for what, number in (found.would_do or {}).items() if number]
        would_do = f"{' or '.join(ways)} would do"
        if not ways:
            would_do = f"neither {_MOST_SEEDS} seeds nor {_MOST_TIMES} times the prompts would do"
        texts.append(
            f"The smallest effect that matters ({amount(wanted)}) is smaller than the "
            f"detectable effect ({amount(found.effect or 0.0)}): it would be found in "
            f"{100 * power:.0f} of 100 such sweeps; {would_do}"
        )
    return texts
