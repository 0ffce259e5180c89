"""From parts to the total: pure formulas.

In: rubric scores with polarity and weight, format facts, the citation score. Out: one number each.
Every formula has its alternatives in :class:`~refiner_core.contract.config.RewardConfig`.

Stored rollouts come in at two places: their judgements (:func:`judged_rubrics`) and their
components (:func:`total_reward`). What a reward would be under another aggregation, citation
weight, gate or scale costs no judgement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.answers import ParsedAnswer
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.rewards.citations import mean_over_texts
from refiner_core.rubrics import Rubric

ANSWER_ONLY = "answer_only"


def aggregate_rubrics(
    scores: Sequence[tuple[Rubric, float]], aggregation: str = "weighted_mean"
) -> float | None:
    """The judge term of the total; None where no rubric has weight.

    With s the raw score, and w the weight with the sign of the polarity:

    =============  =====================================================================  ==========
    weighted_mean  sum |w| s' / sum |w|, with s' = s if positive, 1 - s if negative       [0, 1]
    signed_mean    sum w s / sum |w|                                                      [-1, 1]
    positive_sum   sum w s / max(sum of the positive w, 1)                                (.., 1]
    =============  =====================================================================  ==========

    The flip is that of the published refiner runs; the others are recorded alternatives of the
    reference trainer. Sums are exact, so that the order of rubrics does not show.
    """
    size = math.fsum(rubric.weight for rubric, _ in scores)
    if size == 0:
        return None
    signed = math.fsum(rubric.signed_weight * score for rubric, score in scores)
    if aggregation == "signed_mean":
        return signed / size
    if aggregation == "positive_sum":
        positive = math.fsum(max(rubric.signed_weight, 0.0) for rubric, _ in scores)
        return signed / max(positive, 1.0)
    flipped = math.fsum(
        rubric.weight * (1.0 - score if rubric.polarity == "negative" else score)
        for rubric, score in scores
    )
    return flipped / size


def format_bonus(answer: ParsedAnswer, refiner_mode: str) -> float:
    """0.5 for one answer block with nothing outside it, 0.5 times the share of sound claims.

    Claims are the snippet tags here; a sound one is closed, says something and cites known ids
    alone. One text counts once, as in the citation reward. Without tags that half is 0. Text
    outside the block is a fault under ``answer_only``.
    """
    tagged = answer.tagged_claims
    share = mean_over_texts(tagged, [float(claim.well_formed) for claim in tagged])
    alone = answer.single_block and not _outside(answer, refiner_mode)
    return 0.5 * alone + 0.5 * share


def format_valid(answer: ParsedAnswer, refiner_mode: str) -> bool:
    """One answer block, nothing outside it (``answer_only``), a cited claim, no problem at all."""
    return answer.well_formed and not _outside(answer, refiner_mode)


def _outside(answer: ParsedAnswer, refiner_mode: str) -> bool:
    return refiner_mode == ANSWER_ONLY and answer.outside


class Term(NamedTuple):
    """A term of the reward: the component ``name``, times ``gate``, counts with ``weight``."""

    name: str
    weight: float
    gate: float = 1.0


def reward_terms(components: Mapping[str, float | None], reward: RewardConfig) -> list[Term]:
    """The terms of a rollout's score, in the order in which they are added.

    ``(1-w) rubric + w citation``, or ``rubric + w citation`` if additive; w is 0 with the citation
    reward off. A gate multiplies the rubric term by the format bonus. Without rubrics the score is
    the citation term alone, and 0 if that is off.

    A further term is an entry here (where it has weight: older rollouts have no such component), a
    component in :mod:`refiner_core.rewards.compute` and a weight in :class:`RewardConfig`. Totals,
    stored rollouts and the report's taking apart of a reward go by this list.
    """
    cites = reward.apply_paper_citation_reward
    weight = reward.paper_citation_weight if cites else 0.0
    kept = 1.0 if reward.combination == "additive" else 1.0 - weight
    gate = 1.0
    if components.get("no_rubrics"):
        kept, weight = 0.0, 1.0 if cites else 0.0
    elif reward.gate_judge_score_with_format_bonus:
        bonus = components.get("format_bonus")
        gate = math.nan if bonus is None else bonus
    return [Term("rubric", kept, gate), Term("citation", weight)]


def total_reward(
    components: Mapping[str, float | None], reward: RewardConfig, stopped: bool
) -> float:
    """The number that the policy is trained on: ``verification_reward`` times the sum of
    :func:`reward_terms`; ``non_stop_penalty`` replaces that of a completion that did not stop.

    Of a stored rollout it is, under the configuration that it was rewarded under, its own total to
    the last bit, without any judgement. Every field of the total may differ. The rubric term is
    taken as it is stored; for another ``rubric_aggregation`` replace ``rubric`` first
    (:func:`judged_rubrics`, :func:`aggregate_rubrics`).

    Parameters
    ----------
    components
        As :func:`~refiner_core.rewards.compute.compute_rewards` names them: those of the terms,
        ``format_bonus`` and ``no_rubrics``; others are not looked at.
    reward
        The settings to compute under.
    stopped
        Whether the completion ended by itself.

    Raises
    ------
    DataError
        A component is missing (or None, or NaN): the rollout is unscored, since its judge failed,
        and has no total under any setting.
    """
    terms = reward_terms(components, reward)
    names = ("no_rubrics", "format_bonus", *(term.name for term in terms))
    known = {n: v for n in names if (v := components.get(n)) is not None and not math.isnan(v)}
    if len(known) < len(names):
        lacking = ", ".join(name for name in names if name not in known)
        raise DataError(
            f"The rollout has no {lacking}",
            expected="the components of a scored or malformed rollout",
            fix="leave unscored rollouts out: their judge failed",
        )
    if reward.non_stop_penalty and not stopped:
        return reward.non_stop_penalty_value
    score = sum((t.weight * (known[t.name] * t.gate) for t in terms), 0.0)
    return reward.verification_reward * score


def judged_rubrics(judgements: Iterable[Mapping[str, Any]]) -> list[tuple[Rubric, float]]:
    """The rubrics of a stored rollout with their raw scores, as :func:`aggregate_rubrics` wants.

    A malformed rollout has none, and its rubric term is 0 under any aggregation.

    Parameters
    ----------
    judgements
        As they are stored; those of citations are passed over.

    Raises
    ------
    DataError
        A rubric's judgement failed: what is left says nothing about the whole.
    """
    scored = []
    for entry in judgements:
        if entry["kind"] != "rubric":
            continue
        if entry["score"] is None:
            raise DataError(
                f"The judgement of rubric {entry['title']!r} failed ({entry['detail']})",
                expected="rollouts whose judgements are all scored",
                fix="leave unscored rollouts out",
            )
        rubric = Rubric(
            title=entry["title"],
            description=entry["criterion"],
            polarity=entry["polarity"],
            weight=entry["weight"],
            source=entry["source"],
        )
        scored.append((rubric, float(entry["score"])))
    return scored
