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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refiner_core.answers import compared, parse_answer, parse_evidence

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
    known = {prompt: _sources(prompt) for prompt in dict.fromkeys(prompts)}
    rows = [_of_answer(a, known[prompt]) for prompt, a in zip(prompts, answers, strict=True)]
    found = {
        f"quality/{name}": sum(row[name] for row in rows) / len(rows) for name in sorted(rows[0])
    }
    return found | _of_judgements(prompts, judgements)


def _sources(prompt: str) -> str:
    """All evidence of a prompt, in a form to compare."""
    texts = parse_evidence(prompt).texts
    return f" {' '.join(compared(texts[name]) for name in texts)} "


def _of_answer(text: str, sources: str) -> dict[str, float]:
    answer = parse_answer(text)
    claims = [compared(claim.text) for claim in answer.claims]
    body = answer.body if answer.body is not None else ""
    copied = [_copied(claim, sources) for claim in claims]
    words = sum(len(claim.split()) for claim in claims)
    outside = len(text.strip()) - len(body) - len("<answer></answer>")
    return {
        "claims": float(len(set(claims))),
        "repeated_share": _share(len(claims) - len(set(claims)), len(claims)),
        "cited_share": _share(sum(claim.well_formed for claim in answer.claims), len(claims)),
        "copied_share": _share(sum(copied), words),
        "outside_share": _share(max(0, outside) if answer.single_block else len(text), len(text)),
    }


def _copied(claim: str, sources: str) -> int:
    """Words of a claim that stand in a run of words of the sources."""
    words, size = claim.split(), min(_RUN, len(claim.split()))
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


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
