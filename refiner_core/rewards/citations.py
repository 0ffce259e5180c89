"""The citation reward.

In: a parsed answer, the prompt's evidence, judgements of its claims. Out: :class:`CitationScore`.

Formula of the DR Tulu paper ("DR Tulu: Reinforcement Learning with Evolving Rubrics for Deep
Research", Shao et al., 2025) and its open-instruct code: per claim (cited spans and the plain text
between them)

    recall     with evidence: fully, in part, not supported = 1, 0.5, 0
               without: 1 - [needs a citation]
    precision  with evidence: relevant, irrelevant = 1, 0; without: 1
    F1         their harmonic mean, 0 if both are 0

    citation = 0.6 * mean F1 + 0.4 * (unique known ids cited / unique ids cited, 0 if none is)

and 0 where the prompt has no evidence. As there, a text counts once in the means, however often the
answer says it: else to repeat a good claim would pay. And whether a passage needs a citation is
asked with the whole answer, since what sums up cited text needs none.

What the formula leaves open, and we decide:

- A claim's evidence is what its *known* ids name; a claim that cites unknown ids alone has none.
- Claims of one text (:func:`refiner_core.answers.compared`) may cite different sources: each is
  judged, and the text has the mean of their scores. There, the last one takes the place of all.
- A snippet tag around nothing scores 0 on both, without a question to the judge.

And in one point we depart from it: precision is asked for each source cited by itself, and averaged
over the claim's sources. There, one question is asked about all of them together, so that one good
source hides any number of bad ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from refiner_core.answers import (
    Claim,
    ParsedAnswer,
    ParsedEvidence,
    Problem,
    compared,
    says_something,
)
from refiner_core.contract.types import Judgement, JudgeRequest

F1_SHARE = 0.6
FORMAT_SHARE = 0.4

CitationKind = Literal["citation_recall", "citation_needed", "citation_precision"]


class CitationQuestion(NamedTuple):
    """One question about claim number ``claim`` of an answer."""

    claim: int
    ids: tuple[str, ...]
    request: JudgeRequest

    def detail(self) -> dict[str, Any]:
        """What is stored beside the judgement."""
        return {"claim": self.request.text, "claim_index": self.claim, "ids": list(self.ids)}


@dataclass(frozen=True)
class CitationScore:
    """Parts of the citation reward, each in [0, 1]; means are over what claims say."""

    reward: float = 0.0
    precision: float = 0.0
    recall: float = 0.0
    f1: float = 0.0
    format: float = 0.0


def plan_citations(
    answer: ParsedAnswer, evidence: ParsedEvidence, question: str
) -> list[CitationQuestion]:
    """The questions whose answers the citation reward needs; none without evidence or answer."""
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
) -> CitationScore:
    """Put the judgements of :func:`plan_citations` together. All of them must be scored."""
    if answer.malformed or not evidence:
        return CitationScore()
    by_claim: dict[int, dict[str, list[float]]] = {}
    for question, judgement in judged:
        assert judgement.score is not None, "a failed judgement has no place in a score"
        kinds = by_claim.setdefault(question.claim, {})
        kinds.setdefault(question.request.kind, []).append(judgement.score)
    pairs = [_claim_score(by_claim.get(index, {})) for index in range(len(answer.claims))]
    mean = functools.partial(mean_over_texts, answer.claims)
    f1 = mean([harmonic_mean(recall, precision) for recall, precision in pairs])
    form = citation_format(answer.cited_ids, evidence)
    return CitationScore(
        reward=F1_SHARE * f1 + FORMAT_SHARE * form,
        precision=mean([precision for _, precision in pairs]),
        recall=mean([recall for recall, _ in pairs]),
        f1=f1,
        format=form,
    )


def mean_over_texts(claims: Sequence[Claim], values: Sequence[float]) -> float:
    """The mean of the claims' values in which each text counts once, with the mean of its claims; 0
    of none. Claims that say nothing repeat no text: each counts."""
    by_text: dict[str | int, list[float]] = {}
    for index, (claim, value) in enumerate(zip(claims, values, strict=True)):
        text = compared(claim.text) if says_something(claim.text) else index
        by_text.setdefault(text, []).append(value)
    return _mean([_mean(found) for found in by_text.values()])


def harmonic_mean(a: float, b: float) -> float:
    """2ab/(a+b); 0 where both are 0."""
    return 2 * a * b / (a + b) if a + b > 0 else 0.0


def citation_format(cited_ids: Sequence[str], evidence: ParsedEvidence) -> float:
    """Share of the ids cited (each once) that the evidence knows; 0 if none is cited."""
    if not cited_ids:
        return 0.0
    return sum(i in evidence.texts for i in cited_ids) / len(cited_ids)


def _claim_score(scores: Mapping[str, list[float]]) -> tuple[float, float]:
    """Recall and precision of one claim; (0, 0) of one that nothing was asked about."""
    if "citation_needed" in scores:
        return 1.0 - scores["citation_needed"][0], 1.0
    if "citation_recall" in scores:
        return scores["citation_recall"][0], _mean(scores["citation_precision"])
    return 0.0, 0.0


def _known(claim: Claim, evidence: ParsedEvidence) -> tuple[str, ...]:
    return tuple(i for i in claim.ids if i in evidence.texts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
