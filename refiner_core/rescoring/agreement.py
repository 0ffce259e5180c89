"""Where two judges judged the same thing: how far they agree, criterion by criterion.

In: the judgements of two scorings, as they are stored. Out: one :class:`CriterionAgreement` for all
questions of a kind (``rubric``, ``citation_recall`` …) and one for each rubric that was asked often
enough to say something; intervals are over the prompts' questions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from refiner_core.judge_report.agreement import Agreement, agreement
from refiner_core.rescoring.questions import described
from refiner_core.rescoring.rollouts import StoredRollout
from refiner_core.rescoring.scores import Scores

#: Rubrics that were judged less often by both stand in the numbers of their kind alone.
LEAST_PAIRS = 8
#: Rubrics that are listed, those that were asked most often.
MOST_CRITERIA = 40

Pair = tuple[float | None, float | None, str]


class CriterionAgreement(NamedTuple):
    """``criterion`` is empty for all questions of the kind together."""

    kind: str
    title: str
    criterion: str
    agreement: Agreement


def judges_agree(
    rollouts: Sequence[StoredRollout], first: Scores, second: Scores, *, resamples: int = 1000
) -> list[CriterionAgreement]:
    """Agreement of the judgements that both scorings have, kinds first."""
    kinds: dict[str, list[Pair]] = defaultdict(list)
    rubrics: dict[str, list[Pair]] = defaultdict(list)
    titles: dict[str, str] = {}
    for rollout, a, b in zip(rollouts, first.judgements, second.judgements, strict=True):
        theirs = _by_question(b)
        for question, entry in _by_question(a).items():
            if question not in theirs:
                continue
            pair = (entry["score"], theirs[question]["score"], rollout.prompt.sample_id)
            kinds[entry["kind"]].append(pair)
            if entry["kind"] == "rubric":
                rubrics[entry["criterion"]].append(pair)
                titles[entry["criterion"]] = str(entry.get("title") or "")
    found = [CriterionAgreement(kind, "", "", _of(p, resamples)) for kind, p in kinds.items()]
    listed = sorted(rubrics, key=lambda c: -len(rubrics[c]))[:MOST_CRITERIA]
    found += [
        CriterionAgreement("rubric", titles[c], c, _of(rubrics[c], resamples))
        for c in listed
        if len(rubrics[c]) >= LEAST_PAIRS
    ]
    return found


def _of(pairs: Sequence[Pair], resamples: int) -> Agreement:
    a, b, questions = ([pair[i] for pair in pairs] for i in range(3))
    return agreement(a, b, questions, resamples=resamples)  # type: ignore[arg-type]


def _by_question(judgements: Sequence[Mapping[str, Any]]) -> dict[Hashable, Mapping[str, Any]]:
    return {described(entry): entry for entry in judgements}
