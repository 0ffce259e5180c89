"""Scores and totals: the citation reward, and the total of all parts. Pure formulas.

In: a parsed answer, the prompt's evidence, judgements of claims and rubrics. Out: one number each.
Alternatives of every formula are options in :class:`~refiner_core.contract.config.RewardConfig`.

The citation reward is that of the DR Tulu paper ("DR Tulu: Reinforcement Learning with Evolving
Rubrics for Deep Research", Shao et al., 2025) and its open-instruct code: per claim (cited spans
and the plain text between them)

    recall     with evidence: fully, in part, not supported = 1, 0.5, 0
               without: 1 - [needs a citation]
    precision  with evidence: relevant, irrelevant = 1, 0; without: 1
    F1         their harmonic mean, 0 if both are 0

    citation = 0.6 * mean F1 + 0.4 * (unique known ids cited / unique ids cited, 0 if none is)

and 0 if the prompt has no evidence. As there, a text counts once in the means, however often the
answer repeats it: otherwise repeating a good claim would pay. The question whether a passage needs
a citation includes the whole answer, since a summary of cited text needs none.

Choices where the formula is open:

- A claim's evidence is the text of its *known* ids; a claim with unknown ids only has none.
- Claims of one text (:func:`refiner_core.answers.compared`) may cite different sources: each is
  judged, and the text has the mean of their scores. In the reference the last one replaces all.
- A snippet tag around nothing scores 0 on both, without a call to the judge.

One deliberate difference: precision is asked for each cited source separately, and averaged
over the claim's sources. The reference asks one question about all of them together, so that one
good source hides any number of bad ones.

Stored rollouts can be recomputed from their components (:func:`total_reward`): the reward under
another citation weight, gate or scale needs no judgement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from refiner_core.answers import (
    Claim,
    ParsedAnswer,
    ParsedEvidence,
    Problem,
    compared,
    says_something,
)
from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import ANSWER_ONLY, Judgement, JudgeRequest
from refiner_core.rewards.course import prices_of, share
from refiner_core.rubrics import Rubric

F1_SHARE = 0.6
FORMAT_SHARE = 0.4
#: A score that is left by rounding when penalties take all of it.
_ROUNDING = 1e-12
CITATION_PARTS = (
    *("citation", "citation_precision", "citation_recall"),
    *("citation_f1", "citation_format"),
)

CitationKind = Literal["citation_recall", "citation_needed", "citation_precision"]


class CitationQuestion(NamedTuple):
    """One question about claim number ``claim`` of an answer."""

    claim: int
    ids: tuple[str, ...]
    request: JudgeRequest

    def detail(self) -> dict[str, Any]:
        """Data stored beside the judgement."""
        return {"claim": self.request.text, "claim_index": self.claim, "ids": list(self.ids)}


def plan_citations(
    answer: ParsedAnswer, evidence: ParsedEvidence, question: str
) -> list[CitationQuestion]:
    """The questions for the citation reward; none without evidence or answer."""
    if answer.malformed or not evidence:
        return []
    questions = []

    def ask(index: int, kind: CitationKind, ids: tuple[str, ...], reference: str) -> None:
        request = JudgeRequest(kind, question, answer.claims[index].text, reference)
        questions.append(CitationQuestion(index, ids, request))

    for index, claim in enumerate(answer.claims):
        if Problem.EMPTY_CLAIM in claim.problems:
            continue
        known = _known(claim, evidence)
        if not known:
            ask(index, "citation_needed", claim.ids, answer.body or "")
            continue
        ask(index, "citation_recall", known, evidence.text_of(known))
        for cited in known:
            ask(index, "citation_precision", (cited,), evidence.texts[cited])
    return questions


def score_citations(
    answer: ParsedAnswer,
    evidence: ParsedEvidence,
    judged: Sequence[tuple[CitationQuestion, Judgement]],
) -> dict[str, float]:
    """Combine the judgements of :func:`plan_citations`: the citation reward and its parts by
    component, each in [0, 1]; means are over distinct texts of claims. All must be scored."""
    if answer.malformed or not evidence:
        return dict.fromkeys(CITATION_PARTS, 0.0)
    by_claim: dict[int, dict[str, list[float]]] = {}
    for question, judgement in judged:
        assert judgement.score is not None, "a failed judgement has no place in a score"
        kinds = by_claim.setdefault(question.claim, {})
        kinds.setdefault(question.request.kind, []).append(judgement.score)
    pairs = [_claim_score(by_claim.get(index, {})) for index in range(len(answer.claims))]
    mean = functools.partial(mean_over_texts, answer.claims)
    f1 = mean([harmonic_mean(recall, precision) for recall, precision in pairs])
    form = share(sum(i in evidence.texts for i in answer.cited_ids), len(answer.cited_ids))
    means = mean([precision for _, precision in pairs]), mean([recall for recall, _ in pairs])
    values = (F1_SHARE * f1 + FORMAT_SHARE * form, *means, f1, form)
    return dict(zip(CITATION_PARTS, values, strict=True))


def mean_over_texts(claims: Sequence[Claim], values: Sequence[float]) -> float:
    """The mean of the claims' values where each text counts once, with the mean of its claims; 0
    without claims. Empty claims are no repetitions: each counts."""
    by_text: dict[str | int, list[float]] = {}
    for index, (claim, value) in enumerate(zip(claims, values, strict=True)):
        text = compared(claim.text) if says_something(claim.text) else index
        by_text.setdefault(text, []).append(value)
    return _mean([_mean(found) for found in by_text.values()])


def harmonic_mean(a: float, b: float) -> float:
    """2ab/(a+b); 0 if both are 0."""
    return 2 * a * b / (a + b) if a + b > 0 else 0.0


def _claim_score(scores: Mapping[str, list[float]]) -> tuple[float, float]:
    """Recall and precision of one claim; (0, 0) for a claim without questions."""
    if "citation_needed" in scores:
        return 1.0 - scores["citation_needed"][0], 1.0
    if "citation_recall" in scores:
        return scores["citation_recall"][0], _mean(scores["citation_precision"])
    return 0.0, 0.0


def _known(claim: Claim, evidence: ParsedEvidence) -> tuple[str, ...]:
    return tuple(i for i in claim.ids if i in evidence.texts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def aggregate_rubrics(
    scores: Sequence[tuple[Rubric, float]], aggregation: str = "weighted_mean"
) -> float | None:
    """The judge term of the total; None if no rubric has weight.

    With s the raw score, and w the weight with the sign of the polarity:

    =============  =====================================================================  ==========
    weighted_mean  sum |w| s' / sum |w|, with s' = s if positive, 1 - s if negative       [0, 1]
    signed_mean    sum w s / sum |w|                                                      [-1, 1]
    positive_sum   sum w s / max(sum of the positive w, 1)                                (.., 1]
    =============  =====================================================================  ==========

    The flip is that of the published refiner runs; the others are the reference trainer's
    alternatives. Sums are exact, so that the order of rubrics has no effect.
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

    Claims are the snippet tags here; a sound one is closed, has text and cites only known ids.
    One text counts once, as in the citation reward. Without tags that half is 0. Text
    outside the block is a fault under ``answer_only``.
    """
    tagged = answer.tagged_claims
    share = mean_over_texts(tagged, [float(claim.well_formed) for claim in tagged])
    alone = answer.body is not None and not _outside(answer, refiner_mode)
    return 0.5 * alone + 0.5 * share


def format_valid(answer: ParsedAnswer, refiner_mode: str) -> bool:
    """One answer block, nothing outside it (``answer_only``), a cited claim, no problem."""
    return answer.well_formed and not _outside(answer, refiner_mode)


def _outside(answer: ParsedAnswer, refiner_mode: str) -> bool:
    return refiner_mode == ANSWER_ONLY and answer.outside


class Term(NamedTuple):
    """A term of the reward: the component ``name`` times ``gate``, with ``weight``."""

    name: str
    weight: float
    gate: float = 1.0


def reward_terms(components: Mapping[str, float | None], reward: RewardConfig) -> list[Term]:
    """The terms of a rollout's score, in the order of addition.

    ``(1-w) rubric + w citation``, or ``rubric + w citation`` if additive; w is 0 with the citation
    reward off. A gate multiplies the rubric term by the format bonus. Without rubrics the score is
    the citation term alone, and 0 if that is off. Penalties (``reward.penalties``) are subtracted;
    a gate keeps them from taking more than the score.

    A new term needs an entry here (if it has weight: older rollouts lack the component), a
    component in :mod:`refiner_core.rewards.compute` and a weight in :class:`RewardConfig`. Totals,
    stored rollouts and the report's breakdown of a reward use this list.
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
    terms = [Term("rubric", kept, gate), Term("citation", weight)]
    prices = prices_of(reward.penalties)
    return [*terms, *_penalty_terms(terms, components, prices)] if prices else terms


def _penalty_terms(
    terms: Sequence[Term], components: Mapping[str, float | None], prices: Mapping[str, float]
) -> list[Term]:
    known = {name: math.nan if (v := components.get(name)) is None else v for name in components}
    score = sum(t.weight * (known.get(t.name, math.nan) * t.gate) for t in terms)
    due = sum(price * known.get(name, math.nan) for name, price in prices.items())
    paid = 1.0 if due <= score else max(score, 0.0) / due if due > 0 else 0.0
    return [Term(name, -price, paid) for name, price in prices.items()]


def total_reward(
    components: Mapping[str, float | None], reward: RewardConfig, stopped: bool
) -> float:
    """The number that the policy is trained on: ``verification_reward`` times the sum of
    :func:`reward_terms`; ``non_stop_penalty`` replaces it if the completion did not stop.

    For a stored rollout under its original configuration, this is its own total to the last bit,
    without any judgement. Every field of the total may change, except ``rubric_aggregation`` and
    prices that were 0 (``penalties``): the rubric term and the measures are used as stored; for
    others judge again from the store.

    Parameters
    ----------
    components
        Named as by :func:`~refiner_core.rewards.compute.compute_rewards`: those of the terms,
        ``format_bonus`` and ``no_rubrics``; others are ignored.
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
    if prices_of(reward.penalties) and abs(score) < _ROUNDING:
        score = 0.0
    return reward.verification_reward * score
