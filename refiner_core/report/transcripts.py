"""Answers and prompts as markup: what is cited is marked, what is long is cut, nothing is obeyed.

In: texts as policies have sampled them, which may hold anything. Out: escaped markup; a claim in
its snippet tag is a mark that names its ids, and so are the snippets of the prompt that an answer
cites. A page holds a bounded number of characters; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from markupsafe import Markup, escape

from refiner_core.answers.tags import read_attributes, scan_tags
from refiner_core.report.printing import count, plain

MOST_OF_ANSWER = 4_000
MOST_OF_PROMPT = 12_000
#: Characters of all answers and judgements of a page.
MOST_IN_ALL = 1_500_000


class Span(NamedTuple):
    """A piece of a text: in a snippet (``ids`` are those it names, perhaps none) or not (None);
    ``before`` and ``after`` are the snippet's own tags. ``start`` is where it begins."""

    start: int
    text: str
    ids: tuple[str, ...] | None = None
    before: str = ""
    after: str = ""


def spans(text: str, *, any_case: bool = False) -> Iterator[Span]:
    """A text cut at its snippet tags, as an answer's claims are cut; put together again, the
    pieces are the text. A tag that is broken, that closes nothing or (but with ``any_case``, as
    prompts are read) is not in lower case is text."""
    at = 0
    opened: tuple[int, tuple[str, ...], str] | None = None
    for tag in scan_tags(text):
        if tag.name != "snippet" or not tag.complete or not (tag.lower_case or any_case):
            continue
        raw, inside = text[tag.start : tag.end], text[at : tag.start]
        if opened is not None:
            start, ids, before = opened
            yield Span(start, inside, ids, before, raw if tag.closing else "")
        elif tag.closing:
            continue
        elif inside:
            yield Span(at, inside)
        opened = None if tag.closing else (tag.start, read_attributes(tag.attributes).ids, raw)
        at = tag.end
    if opened is not None:
        yield Span(opened[0], text[at:], opened[1], opened[2])
    elif text[at:]:
        yield Span(at, text[at:])


def tagged(span: Span) -> Markup:
    """A span with its tags, as they were written."""
    kind = Markup('<span class="tag">{}</span>')
    before, after = (kind.format(t) if t else Markup("") for t in (span.before, span.after))
    return before + escape(span.text) + after


def left_out(characters: int) -> Markup:
    """The sign for characters that are not shown; nothing where none are."""
    if characters <= 0:
        return Markup("")
    return Markup('<span class="cut"> … {} characters more are in report.json</span>').format(
        count(characters)
    )


def marked(text: str, cited: frozenset[str] | None = None, most: int = MOST_OF_ANSWER) -> Markup:
    """A text with its snippets marked: those of ``cited`` ids, or all."""
    parts: list[Markup] = []
    for span in spans(plain(text[:most])):
        shown = tagged(span)
        if span.ids is not None and (cited is None or cited.intersection(span.ids)):
            shown = Markup('<mark title="cites {}">{}</mark>').format(", ".join(span.ids), shown)
        parts.append(shown)
    return Markup("").join([*parts, left_out(len(text) - most)])


def cited_ids(text: str) -> frozenset[str]:
    """Ids that the snippet tags of an answer name."""
    found = spans(text[:MOST_OF_ANSWER])
    return frozenset(i for span in found if span.ids is not None for i in span.ids)
