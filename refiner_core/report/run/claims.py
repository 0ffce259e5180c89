"""An answer and its prompt as markup: every claim leads to the evidence that it cites.

In: texts as policies have sampled them, which may hold anything. Out: escaped markup. A claim that
cites a snippet of the prompt is a link to it; one that cites what is not there, one that cites
nothing and text outside the answer look different, and say why. A cited snippet that lies behind
the end of what is shown of a long prompt is shown all the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from markupsafe import Markup, escape

from refiner_core.answers.claims import parse_answer, says_something, strip_tags
from refiner_core.answers.evidence import parse_evidence
from refiner_core.answers.tags import Tag, read_attributes, scan_tags
from refiner_core.report.printing import plain
from refiner_core.report.transcripts import (
    MOST_OF_ANSWER,
    MOST_OF_PROMPT,
    Span,
    left_out,
    spans,
    tagged,
)

_TAG = Markup('<span class="tag">{}</span>')
_OUTSIDE = Markup('<span class="outside" title="not in an answer block">{}</span>')
_UNCITED = Markup(
    '<span class="claim uncited" data-n="{}" title="claim {}: cites nothing">{}</span>'
)
_MOST_BEHIND = 20
_MOST_OF_SNIPPET = 1_500


@dataclass(frozen=True)
class Evidence:
    """A prompt as it is shown: ``anchors`` are the elements of its snippets by id; ``known`` is
    every id that may be cited."""

    markup: Markup
    anchors: dict[str, str]
    known: frozenset[str]


def evidence_of(prompt: str, answers: Iterable[str], name: str) -> Evidence:
    """The prompt with its snippets marked, those that an answer cites more strongly; ``name``
    keeps anchors of prompts apart."""
    known = frozenset(parse_evidence(prompt).texts)
    cited = {i for text in answers for span in spans(text[:MOST_OF_ANSWER]) for i in span.ids or ()}
    marker = _Marker(known, frozenset(cited), name)
    parts: list[Markup] = []
    behind = 0
    for span in spans(plain(prompt), any_case=True):
        if (room := MOST_OF_PROMPT - span.start) > 0:
            parts.append(marker.piece(_cut(span, room)))
        elif behind < _MOST_BEHIND and marker.awaited(span.ids or ()):
            behind += 1
            parts.append(Markup('<span class="cut"> … </span>'))
            parts.append(marker.piece(_cut(span, _MOST_OF_SNIPPET)))
    parts.append(left_out(len(prompt) - MOST_OF_PROMPT))
    return Evidence(Markup("").join(parts), marker.anchors, known)


def _cut(span: Span, room: int) -> Span:
    return span if len(span.text) <= room else span._replace(text=span.text[:room] + " …")


@dataclass
class _Marker:
    """Marks what may be cited; ``anchors`` names the first element of each id."""

    known: frozenset[str]
    cited: frozenset[str]
    name: str
    anchors: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def awaited(self, ids: Iterable[str]) -> bool:
        """Whether an answer cites one of these, and nothing that is shown has it yet."""
        return any(i in self.cited and i not in self.anchors for i in ids)

    def piece(self, span: Span) -> Markup:
        """A snippet, or what stands between two; a web page's opening tag may be cited too."""
        if span.ids is not None:
            return self._source(tagged(span), span.ids)
        parts, at, text = [], 0, span.text
        for tag in scan_tags(text):
            raw = _TAG.format(text[tag.start : tag.end])
            page = tag.name == "webpage" and not tag.closing
            parts.append(escape(text[at : tag.start]))
            parts.append(self._source(raw, read_attributes(tag.attributes).ids) if page else raw)
            at = tag.end
        return Markup("").join([*parts, escape(text[at:])])

    def _source(self, shown: Markup, ids: Iterable[str]) -> Markup:
        mine = [i for i in ids if i in self.known]
        if not mine:
            return shown
        anchor = f"{self.name}-s{self.count}"
        self.count += 1
        for i in mine:
            self.anchors.setdefault(i, anchor)
        kind = "source cited" if self.cited.intersection(mine) else "source"
        return Markup('<mark class="{}" id="{}" tabindex="-1">{}</mark>').format(
            kind, anchor, shown
        )


def answer_markup(text: str, evidence: Evidence) -> Markup:
    """An answer with its claims numbered as its judgements number them."""
    shown, body = plain(text[:MOST_OF_ANSWER]), parse_answer(text).body
    start = end = 0
    if body is not None:
        start = next(t.end for t in scan_tags(text) if _opens_answer(t))
        end = start + len(body)
    parts = [_around(shown[:start], evidence)]
    count = 0
    for span in spans(shown[start:end]):
        if span.ids is not None:
            parts.append(_claim(span, evidence, count))
        elif says_something(strip_tags(span.text)):
            parts.append(_UNCITED.format(count + 1, count + 1, span.text))
        else:
            parts.append(escape(span.text))
            continue
        count += 1
    parts += [_around(shown[end:], evidence), left_out(len(text) - MOST_OF_ANSWER)]
    return Markup("").join(parts)


def _opens_answer(tag: Tag) -> bool:
    plainly = tag.complete and tag.lower_case and not tag.attributes.strip()
    return tag.name == "answer" and not tag.closing and plainly


def _around(text: str, evidence: Evidence) -> Markup:
    """What is not in an answer block, or all of it where there is no single one."""
    return Markup("").join(
        _outside(span.text) if span.ids is None else _claim(span, evidence, None)
        for span in spans(text)
    )


def _outside(text: str) -> Markup:
    parts, at = [], 0
    for tag in scan_tags(text):
        parts += [_beside(text[at : tag.start]), _TAG.format(text[tag.start : tag.end])]
        at = tag.end
    return Markup("").join([*parts, _beside(text[at:])])


def _beside(text: str) -> Markup:
    return _OUTSIDE.format(text) if says_something(text) else escape(text)


def _claim(span: Span, evidence: Evidence, place: int | None) -> Markup:
    ids = span.ids or ()
    anchors = list(dict.fromkeys(evidence.anchors[i] for i in ids if i in evidence.anchors))
    missing = [i for i in ids if i not in evidence.known]
    number = "" if place is None else str(place + 1)
    said = f"claim {number}: " if number else ""
    if not ids:
        kind, said = "uncited", said + "cites nothing"
    elif missing:
        kind = "unknown"
        said += f"cites {', '.join(ids)}; not in the prompt: {', '.join(missing)}"
    else:
        kind, said = "cites", said + f"cites {', '.join(ids)}"
    if anchors:
        return Markup(
            '<a class="claim {}" href="#{}" data-cites="{}" data-n="{}" title="{}">{}</a>'
        ).format(kind, anchors[0], " ".join(anchors), number, said[:400], tagged(span))
    return Markup('<mark class="claim {}" data-n="{}" title="{}">{}</mark>').format(
        kind, number, said[:400], tagged(span)
    )
