"""Course of quality: what a step's answers look like, apart from their reward.

In: the answers of a step with their prompts, groups and judgements. Out: metrics ``quality/…``,
computed without a call. They show what a rising reward may hide: copying, repetition, text outside
of the answer, criteria that all samples meet.

============================= ==================================================================
metric                        mean over answers of
============================= ==================================================================
quality/claims                distinct claims
quality/repeated_share        share of claims that repeat another one of the answer
quality/cited_share           share of claims with a sound citation
quality/copied_share          share of the claims' words in a run of five (or a whole claim, if it
                              is shorter) that the evidence has, too
quality/outside_share         share of the text's characters outside of the answer block
quality/unusable_judgements   share of judgements without a score, over all answers
quality/saturated             share of (prompt, rubric) pairs in which all samples have full credit
============================= ==================================================================

Penalties: measures of answers that a recipe may put a price on (``reward.penalties``).

In: a parsed answer, its evidence, the support of its claims. Out: a measure in [0, 1] per price
that is not 0. All are read from the text or from judgements that the reward has anyway: no call.

=============== ================================================================================
price           measure
=============== ================================================================================
copied          ``quality/copied_share``: words of the claims in a run that the evidence has
copied_sources  share of the evidence's words in a run that the claims have
uncited         claims without a sound citation (of a known source): the larger of their shares of
                all claims (1 - ``quality/cited_share``) and of all words
outside         ``quality/outside_share``, under ``answer_only``
long_spans      share of the claims' words beyond the first ``long_span_words`` of their tag
unsupported     share of the cited claims that their sources do not support in full
repeated        ``quality/repeated_share``
length          share of the words beyond ``length_words``, text outside of the block included
abstention      1 for an answer that cites nothing
=============== ================================================================================

Lengths are in words, not tokens, so that they are the same for each model and for stored answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refiner_core.answers import (
    ParsedAnswer,
    ParsedEvidence,
    compared,
    parse_answer,
    parse_evidence,
    strip_tags,
)
from refiner_core.contract.config import PenaltiesConfig
from refiner_core.contract.types import ANSWER_ONLY

_RUN = 5


def course_of_quality(
    prompts: Sequence[str],
    answers: Sequence[str],
    judgements: Sequence[Iterable[Mapping[str, Any]]],
) -> dict[str, float]:
    """The metrics of one step.

    Parameters
    ----------
    prompts
        Text of each answer's prompt, samples of one prompt together.
    answers, judgements
        One per answer; judgements as stored with rollouts.
    """
    if not answers:
        return {}
    known = {p: in_one(compared_sources(parse_evidence(p))) for p in dict.fromkeys(prompts)}
    pairs = zip(prompts, answers, strict=True)
    rows = [measures_of(parse_answer(text), text, known[prompt]) for prompt, text in pairs]
    found = {
        f"quality/{name}": sum(row[name] for row in rows) / len(rows) for name in sorted(rows[0])
    }
    return found | _of_judgements(prompts, judgements)


def compared_sources(evidence: ParsedEvidence) -> list[str]:
    """The texts of all evidence in a form to compare."""
    return [compared(evidence.texts[name]) for name in evidence.texts]


def in_one(texts: Iterable[str]) -> str:
    """Compared texts as one, in which :func:`copied_words` finds whole words."""
    return f" {' '.join(texts)} "


def measures_of(answer: ParsedAnswer, text: str, sources: str) -> dict[str, float]:
    """What one answer looks like: metrics by their name without ``quality/``.

    Parameters
    ----------
    text
        The answer as sampled.
    sources
        All evidence of its prompt (:func:`in_one`).
    """
    claims = [compared(claim.text) for claim in answer.claims]
    body = answer.body if answer.body is not None else ""
    copied = [copied_words(claim, sources) for claim in claims]
    words = sum(len(claim.split()) for claim in claims)
    outside = len(text.strip()) - len(body) - len("<answer></answer>")
    return {
        "claims": float(len(set(claims))),
        "repeated_share": share(len(claims) - len(set(claims)), len(claims)),
        "cited_share": share(sum(claim.well_formed for claim in answer.claims), len(claims)),
        "copied_share": share(sum(copied), words),
        "outside_share": share(
            max(0, outside) if answer.body is not None else len(text), len(text)
        ),
    }


def copied_words(text: str, sources: str) -> int:
    """Number of words of a compared text in a run of words that the sources have, too."""
    words = text.split()
    size = min(_RUN, len(words))
    inside = [False] * len(words)
    for start in range(len(words) - size + 1 if words else 0):
        if f" {' '.join(words[start : start + size])} " in sources:
            inside[start : start + size] = [True] * size
    return sum(inside)


def _of_judgements(
    prompts: Sequence[str], judgements: Sequence[Iterable[Mapping[str, Any]]]
) -> dict[str, float]:
    failed = total = 0
    full: dict[tuple[str, str], bool] = {}
    for prompt, found in zip(prompts, judgements, strict=True):
        for judgement in found:
            score, total = judgement.get("score"), total + 1
            failed += score is None
            if judgement.get("kind") == "rubric":
                best = 0.0 if judgement.get("polarity") == "negative" else 1.0
                key = prompt, str(judgement.get("criterion"))
                full[key] = full.get(key, True) and score == best
    if not total:
        return {}
    return {
        "quality/unusable_judgements": failed / total,
        **({"quality/saturated": sum(full.values()) / len(full)} if full else {}),
    }


def share(part: float, whole: float) -> float:
    """A quotient; 0 of nothing."""
    return part / whole if whole else 0.0


PRICES = (
    *("copied", "copied_sources", "uncited", "outside", "long_spans", "unsupported"),
    *("repeated", "length", "abstention"),
)
_COMPONENT = "penalty_"


def prices_of(penalties: PenaltiesConfig) -> dict[str, float]:
    """The prices that are not 0, by component."""
    found = {f"{_COMPONENT}{name}": getattr(penalties, name) for name in PRICES}
    return {name: price for name, price in found.items() if price}


def penalty_measures(
    penalties: PenaltiesConfig,
    answer: ParsedAnswer,
    text: str,
    evidence: ParsedEvidence,
    refiner_mode: str,
    support: Sequence[float],
) -> dict[str, float]:
    """The measures that have a price, as components.

    Parameters
    ----------
    text
        The answer as sampled.
    support
        Scores of the citation questions about support.
    """
    prices = prices_of(penalties)
    if not prices:
        return {}
    sources = compared_sources(evidence)
    looks = measures_of(answer, text, in_one(sources))
    lengths = [len(claim.text.split()) for claim in answer.claims]
    tagged = [len(claim.text.split()) for claim in answer.tagged_claims]
    sound = sum(len(claim.text.split()) for claim in answer.claims if claim.well_formed)
    said = len(strip_tags(text).split())
    measures = {
        "copied": looks["copied_share"],
        "uncited": 1.0 - min(looks["cited_share"], share(sound, sum(lengths))),
        "outside": looks["outside_share"] if refiner_mode == ANSWER_ONLY else 0.0,
        "long_spans": share(_beyond(tagged, penalties.long_span_words), sum(lengths)),
        "unsupported": share(sum(score < 1.0 for score in support), len(support)),
        "repeated": looks["repeated_share"],
        "length": share(_beyond([said], penalties.length_words), said),
        "abstention": float(not answer.cited_ids),
    }
    if penalties.copied_sources:
        claims = in_one(compared(claim.text) for claim in answer.claims)
        copied = sum(copied_words(source, claims) for source in sources)
        measures["copied_sources"] = share(copied, sum(len(s.split()) for s in sources))
    found = {f"{_COMPONENT}{name}": value for name, value in measures.items()}
    return {name: found[name] for name in prices}


def _beyond(lengths: Sequence[int], free: int) -> int:
    return sum(max(0, length - free) for length in lengths)
