"""Which answers fit on the page of a sweep.

In: prompts with the answers of all arms. Out: :class:`Shown`, as many as a page can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refiner_core.report.conversations import size_of
from refiner_core.report.sweep.document import Answer, SideBySide
from refiner_core.report.transcripts import MOST_IN_ALL, MOST_OF_ANSWER, cited_ids


@dataclass(frozen=True)
class Shown:
    """One prompt of the page, with the answers that fit in, and how many there are."""

    side: SideBySide
    answers: tuple[Answer, ...]
    cited: frozenset[str]

    @property
    def left_out(self) -> int:
        """Answers that are only in the JSON."""
        return len(self.side.answers) - len(self.answers)


def fitting(sides: Sequence[SideBySide], first_arms: Sequence[str]) -> list[Shown]:
    """Prompts with as many of their answers as a page can hold: each has an equal share of the
    room, and arms named first are preferred."""
    rank = {arm: i for i, arm in enumerate(first_arms)}
    share = MOST_IN_ALL // max(1, len(sides))
    shown = []
    for side in sides:
        ordered = sorted(
            side.answers, key=lambda a: (a.sample_index, rank.get(a.arm, len(rank)), a.seed)
        )
        kept = tuple(_within(ordered, share))
        cited = frozenset().union(*(cited_ids(a.text) for a in kept)) if kept else frozenset()
        shown.append(Shown(side, kept, cited))
    return shown


def _within(answers: Sequence[Answer], room: int) -> Iterator[Answer]:
    for answer in answers:
        size = min(len(answer.text), MOST_OF_ANSWER) + 200 * len(answer.judgements)
        if answer.episode is not None:
            size = size_of(answer.episode)
        room -= size + 300
        if room < 0:
            return
        yield answer
