"""Who is held out: a seeded split by question, independent of the order of rows.

In: the question keys of rows. Out: the set of questions on the other side.

All rows of a question go to one side: real data sets ask one question several times, and a model
that has practised a held-out question is not evaluated on it but on its memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from refiner_core.contract.seeds import derive_seed


def choose_questions(questions: Iterable[str], share: float, seed: int, purpose: str) -> set[str]:
    """A seeded ``share`` of the distinct questions.

    At least one question is chosen where ``share`` is above 0, and at least one is left; with fewer
    than two questions none is. ``purpose`` keeps different splits of one seed independent.
    """
    distinct = sorted(set(questions))
    if share <= 0 or len(distinct) < 2:
        return set()
    count = min(max(round(share * len(distinct)), 1), len(distinct) - 1)
    ranked = sorted(distinct, key=lambda question: derive_seed(seed, purpose, question))
    return set(ranked[:count])
