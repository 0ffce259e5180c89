"""Quality of an answer by the generator's ground truth.

In: an answer text and the ``truth`` column of a generated row. Out: shares in [0, 1].

Rewards are measured against these scores, so they share no code: a reward that learns to fool its
own parser does not fool this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CLAIM = re.compile(r"<snippet\s+id=[\"']?([^<>\"']+?)[\"']?\s*>(.*?)</snippet>", re.DOTALL)


class _Claim(NamedTuple):
    lead: str
    ids: tuple[str, ...]
    text: str


def _claims(answer_text: str) -> list[_Claim]:
    """The claims of the single answer block; none unless there is exactly one block."""
    one_block = answer_text.count("<answer>") == answer_text.count("</answer>") == 1
    block = _ANSWER.search(answer_text) if one_block else None
    if block is None:
        return []
    claims, position = [], 0
    for match in _CLAIM.finditer(block[1]):
        ids = dict.fromkeys(i.strip() for i in match[1].split(",") if i.strip())
        if "<snippet" not in match[2]:
            claims.append(_Claim(block[1][position : match.start()], tuple(ids), match[2]))
        position = match.end()
    return claims


def _says(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _states(claim: _Claim, fact: Mapping[str, Any]) -> bool:
    """The claim carries the value; it or the lead before it names entity and attribute."""
    about = f"{claim.lead} {claim.text}"
    return _says(claim.text, fact["value"]) and all(
        _says(about, fact[part]) for part in ("entity", "attribute")
    )


def score_truth(answer_text: str, truth: Mapping[str, Any]) -> dict[str, float]:
    """Score an answer against the facts that it should state.

    Parameters
    ----------
    answer_text
        The model's text.
    truth
        ``{"facts": [{"entity", "attribute", "value", "ids"}], "gold_ids": [...]}``.

    Returns
    -------
    dict
        ``fact_recall``: share of the facts stated by a claim. ``citation_precision``: share of
        the citations (claim, id) whose id states the fact that the claim states.
        ``citation_recall``: share of the gold ids that are cited correctly. ``citation_f1``: their
        harmonic mean. ``oracle``: mean of ``fact_recall`` and ``citation_f1``. ``claims``: number
        of claims. All are 0 unless there is exactly one answer block.
    """
    claims = _claims(answer_text)
    stated = [[fact for fact in truth["facts"] if _states(claim, fact)] for claim in claims]
    cited = [
        (one, any(one in fact["ids"] for fact in facts))
        for claim, facts in zip(claims, stated, strict=True)
        for one in claim.ids
    ]
    right, found = [good for _, good in cited], {one for one, good in cited if good}
    said = [any(fact in facts for facts in stated) for fact in truth["facts"]]
    fact_recall = sum(said) / len(said) if said else 0.0
    precision = sum(right) / len(right) if right else 0.0
    gold = set(truth["gold_ids"])
    recall = len(found & gold) / len(gold) if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {
        "fact_recall": fact_recall,
        "citation_precision": precision,
        "citation_recall": recall,
        "citation_f1": f1,
        "oracle": (fact_recall + f1) / 2,
        "claims": float(len(claims)),
    }
