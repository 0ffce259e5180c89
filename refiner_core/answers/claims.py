"""The claims of an answer.

In: the text that a policy sampled (special tokens taken out), and the ids that may be cited.
Out: :class:`ParsedAnswer`. Claims are the spans in ``<snippet id=…>`` tags *and* the plain text
between them (DR Tulu counts both), in order; two claims with the same text are two claims.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass

from refiner_core.answers.tags import FATAL, Problem, Tag, read_attributes, scan_tags

_ANSWER_TAG = re.compile(r"<(/?)answer\s*+>")
_SAYS_SOMETHING = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Claim:
    """One span of an answer. ``tagged`` spans stand in a snippet tag, the others are plain text."""

    text: str
    ids: tuple[str, ...] = ()
    tagged: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def cited(self) -> bool:
        """Whether the span names at least one id, known or not."""
        return bool(self.ids)

    @property
    def well_formed(self) -> bool:
        """Whether the span is a tag that says something, closed, with all ids known."""
        return self.tagged and not self.problems


@dataclass(frozen=True)
class ParsedAnswer:
    """What an answer says, and what is wrong with it.

    ``body`` is the text inside the single answer block, tags as sampled; None where there is no
    single block. ``claims`` is then empty. ``outside`` tells of text before or after the block:
    a fault under ``answer_only``, so not among the ``problems`` (how often each occurs).
    """

    body: str | None
    claims: tuple[Claim, ...]
    outside: bool
    problems: Mapping[Problem, int]

    @property
    def single_block(self) -> bool:
        """Exactly one answer block, which may be empty."""
        return self.body is not None

    @property
    def malformed(self) -> bool:
        """No single answer block, or one that says nothing: there is nothing to judge."""
        return any(problem in FATAL for problem in self.problems)

    @property
    def well_formed(self) -> bool:
        """One answer block without any problem and with at least one cited claim."""
        return not self.problems and any(claim.cited for claim in self.claims)

    @property
    def tagged_claims(self) -> tuple[Claim, ...]:
        """The spans that stand in snippet tags, sound or not."""
        return tuple(claim for claim in self.claims if claim.tagged)

    @property
    def cited_ids(self) -> tuple[str, ...]:
        """All ids cited, each once, in the order of their first use."""
        return tuple(dict.fromkeys(i for claim in self.claims for i in claim.ids))


def says_something(text: str) -> bool:
    """Whether ``text`` holds a letter or a digit."""
    return _SAYS_SOMETHING.search(text) is not None


def strip_tags(text: str) -> str:
    """``text`` with each complete tag of ours replaced by a blank; nothing in tags is text."""
    pieces, position = [], 0
    for tag in scan_tags(text):
        if tag.complete:
            pieces += [text[position : tag.start], " "]
            position = tag.end
    pieces.append(text[position:])
    return "".join(pieces)


class _Builder:
    """Cuts a body into claims. ``tag_ids`` is None while plain text is read."""

    def __init__(self, known_ids: Container[str] | None) -> None:
        self.known_ids = known_ids
        self.claims: list[Claim] = []
        self.problems: Counter[Problem] = Counter()
        self.tag_ids: tuple[str, ...] | None = None
        self.span_problems: dict[Problem, None] = {}
        self.pieces: list[str] = []

    def note(self, problem: Problem) -> None:
        """A problem of the span that is being read; plain text carries none of its own."""
        if self.tag_ids is None:
            self.problems[problem] += 1
        else:
            self.span_problems[problem] = None

    def tag(self, tag: Tag) -> None:
        if tag.name != "snippet" or not tag.lower_case:
            self.note(Problem.FOREIGN_TAG)
            self.pieces.append(" ")
        elif not tag.closing:
            nested = self.tag_ids is not None
            if nested:
                self.note(Problem.NESTED_TAG)
            self.end_span()
            attributes = read_attributes(tag.attributes)
            self.tag_ids = attributes.ids
            self.span_problems = dict.fromkeys(attributes.problems)
            if nested:
                self.note(Problem.NESTED_TAG)
        elif self.tag_ids is None:
            self.note(Problem.STRAY_CLOSE)
            self.pieces.append(" ")
        else:
            self.end_span()

    def end_span(self) -> None:
        text = "".join(self.pieces).strip()
        self.pieces = []
        if self.tag_ids is None:
            if says_something(text):
                self.claims.append(Claim(text))
            return
        if not says_something(text):
            self.note(Problem.EMPTY_CLAIM)
        if self.known_ids is not None and any(i not in self.known_ids for i in self.tag_ids):
            self.note(Problem.UNKNOWN_ID)
        self.problems.update(self.span_problems.keys())
        self.claims.append(Claim(text, self.tag_ids, True, tuple(self.span_problems)))
        self.tag_ids, self.span_problems = None, {}


def _block(text: str) -> tuple[int, int, Problem | None]:
    """Start and end of the inside of the single answer block, or why there is none."""
    opening: list[re.Match[str]] = []
    closing: list[re.Match[str]] = []
    for tag in _ANSWER_TAG.finditer(text):
        (closing if tag[1] else opening).append(tag)
        if len(opening) > 1 or len(closing) > 1:
            return 0, 0, Problem.MANY_ANSWERS
    if not opening:
        return 0, 0, Problem.NO_ANSWER
    if not closing or closing[0].start() < opening[0].end():
        return 0, 0, Problem.UNCLOSED_ANSWER
    return opening[0].end(), closing[0].start(), None


def parse_answer(text: str, known_ids: Container[str] | None = None) -> ParsedAnswer:
    """Read an answer, in time linear in its length.

    Parameters
    ----------
    text
        What the policy wrote, special tokens taken out.
    known_ids
        The ids of the prompt's evidence. With None, ids are not checked.

    Returns
    -------
    ParsedAnswer
        What each fault leads to is said at :class:`Problem`. Text between tags that holds neither
        letter nor digit (blanks, a full stop) is no claim.
    """
    start, end, problem = _block(text)
    if problem is not None:
        return ParsedAnswer(None, (), bool(text.strip()), {problem: 1})
    before = text.rfind("<", 0, start)
    after = text.index(">", end) + 1
    outside = bool(text[:before].strip() or text[after:].strip())

    builder = _Builder(known_ids)
    position = start
    for tag in scan_tags(text, start, end):
        if not tag.complete:
            builder.note(Problem.BROKEN_TAG)
            continue
        builder.pieces.append(text[position : tag.start])
        builder.tag(tag)
        position = tag.end
    builder.pieces.append(text[position:end])
    if builder.tag_ids is not None:
        builder.note(Problem.UNCLOSED_TAG)
    builder.end_span()

    body = text[start:end]
    if not any(says_something(claim.text) for claim in builder.claims):
        builder.problems[Problem.EMPTY_ANSWER] += 1
    return ParsedAnswer(body, tuple(builder.claims), outside, dict(builder.problems))
