"""Answers and prompts as markup: what is cited is marked, what is long is cut, nothing is obeyed.

In: texts as policies have sampled them, which may hold anything. Out: escaped markup; a claim in
its snippet tag is a mark that names its ids, and so are the snippets of the prompt that an answer
cites. A page holds a bounded number of characters; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from refiner_core.answers.tags import read_attributes, scan_tags
from refiner_core.report.conversations import size_of
from refiner_core.report.sweep.document import Answer, SideBySide
from refiner_core.report.sweep.printing import count, plain

MOST_OF_ANSWER = 4_000
MOST_OF_PROMPT = 12_000
#: Characters of all answers and judgements of a page.
MOST_IN_ALL = 1_500_000


def marked(text: str, cited: frozenset[str] | None = None, most: int = MOST_OF_ANSWER) -> Markup:
    """A text with its snippets marked: those of ``cited`` ids, or all."""
    shown, rest = plain(text[:most]), len(text) - most
    parts: list[Markup] = []
    at = 0
    open_mark = False
    for tag in scan_tags(shown):
        if tag.name != "snippet":
            continue
        parts.append(escape(shown[at : tag.start]))
        at = tag.end
        raw = Markup('<span class="tag">{}</span>').format(shown[tag.start : tag.end])
        if open_mark:
            parts.append(raw + Markup("</mark>") if tag.closing else Markup("</mark>"))
            open_mark = False
            if tag.closing:
                continue
        ids = read_attributes(tag.attributes).ids
        if not tag.closing and (cited is None or cited.intersection(ids)):
            parts.append(Markup('<mark title="{}">').format("cites " + ", ".join(ids)))
            open_mark = True
        parts.append(raw)
    parts.append(escape(shown[at:]))
    if open_mark:
        parts.append(Markup("</mark>"))
    if rest > 0:
        parts.append(
            Markup('<span class="cut"> … {} characters more are in report.json</span>').format(
                count(rest)
            )
        )
    return Markup("").join(parts)


def cited_ids(text: str) -> frozenset[str]:
    """Ids that the snippet tags of an answer name."""
    tags = scan_tags(text[:MOST_OF_ANSWER])
    return frozenset(
        i
        for tag in tags
        if tag.name == "snippet" and not tag.closing
        for i in read_attributes(tag.attributes).ids
    )


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
