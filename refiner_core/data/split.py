"""Who is held out: a seeded split by question, independent of the order of rows.

In: the names that the question of each row goes by. Out: the questions on the other side.

All rows of a question go to one side: real data sets ask one question several times, and a model
that has practised a held-out question is not evaluated on it but on its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def same_questions(rows: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """Each name that occurs, and the one name of its question.

    Rows that share a name, directly or by way of others, ask the same question. It goes by what a
    row puts first; of several such names by the first in alphabetical order.
    """
    above: dict[str, str] = {}

    def top(name: str) -> str:
        while above[name] != name:
            above[name] = above[above[name]]
            name = above[name]
        return name

    for names in rows:
        tops = {top(above.setdefault(name, name)) for name in names}
        above.update(dict.fromkeys(tops, min(tops)))
    known_as: dict[str, str] = {}
    for first, *_ in rows:
        known_as[top(first)] = min(first, known_as.get(top(first), first))
    return {name: known_as[top(name)] for name in above}
