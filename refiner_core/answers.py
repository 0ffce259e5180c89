"""Parsing of evidence in prompts and of claims in answers.

In: the text of a prompt, the text that a policy sampled. Out: :class:`ParsedEvidence` (id to text)
and :class:`ParsedAnswer` (claims, their ids, all problems). Imports only the standard library;
knows nothing of judges or rewards.

The same tag marks evidence in a prompt and claims in an answer, so the two parsers are separate:
:func:`parse_evidence` is only used for the prompt, :func:`parse_answer` only for the answer. Claims
are the spans in ``<snippet id=…>`` tags *and* the plain text between them (DR Tulu counts both), in
order; two claims with the same text are two claims.

Every character is read a bounded number of times, for any text: a tag ends at the next ``<`` or
``>``, and the patterns do not backtrack.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Problem(StrEnum):
    """Every possible problem of an answer, each with a defined result.

    The first four make an answer malformed: there is nothing to judge. The others are faults of
    single tags; the answer is still judged, and the faults cost format.
    """

    NO_ANSWER = "no_answer"
    """No ``<answer>`` at all."""
    UNCLOSED_ANSWER = "unclosed_answer"
    """One ``<answer>`` without its ``</answer>``, or a closing tag before the opening one."""
    MANY_ANSWERS = "many_answers"
    """More than one opening or closing answer tag, nested ones included."""
    EMPTY_ANSWER = "empty_answer"
    """One block without content: no letter or digit outside tags."""
    IDS_ATTRIBUTE = "ids_attribute"
    """``ids=`` instead of ``id=``. Its ids are ignored: the claim cites nothing."""
    NO_ID = "no_id"
    """A snippet tag without an id (``<snippet>``, ``id=""``). The claim cites nothing."""
    BAD_ATTRIBUTES = "bad_attributes"
    """An open quote, an unknown attribute, stray characters. Ids read up to there count."""
    BROKEN_TAG = "broken_tag"
    """A tag without ``>``. It stays in the text."""
    NESTED_TAG = "nested_tag"
    """A claim opened inside a claim: the first ends there, and both carry this."""
    UNCLOSED_TAG = "unclosed_tag"
    """A claim still open at the end of the answer, where it ends."""
    STRAY_CLOSE = "stray_close"
    """``</snippet>`` where nothing is open. Ignored otherwise."""
    FOREIGN_TAG = "foreign_tag"
    """A tag of prompts (``<webpage>``, ``<tool_output>``), or one in capitals; its text is kept."""
    EMPTY_CLAIM = "empty_claim"
    """A snippet tag around nothing (no letter or digit)."""
    UNKNOWN_ID = "unknown_id"
    """The claim cites an id that is not in the prompt's evidence."""


#: Problems after which there is no single answer to judge.
FATAL = frozenset(
    {Problem.NO_ANSWER, Problem.UNCLOSED_ANSWER, Problem.MANY_ANSWERS, Problem.EMPTY_ANSWER}
)

_TAG = re.compile(r"<(/?)(snippet|webpage|tool_output|answer)(?![\w-])([^<>]*+)(>?)", re.IGNORECASE)
_NAME = re.compile(r"\s*+([^\s=\"'/]++)\s*+=\s*+")
_QUOTED = re.compile(r"\"([^\"]*+)\"|'([^']*+)'")
_ID_LIST = re.compile(r"[^\s\"'=,/]++(?:\s*+,\s*+[^\s\"'=,/]++)*+,?")
_WORD = re.compile(r"[^\s\"']++")


class Tag(NamedTuple):
    """One tag: its lower-case name, whether it closes, and its position."""

    name: str
    closing: bool
    attributes: str
    complete: bool
    lower_case: bool
    start: int
    end: int


class Attributes(NamedTuple):
    """The ids in a tag, distinct and in order, and its problem."""

    ids: tuple[str, ...]
    problems: tuple[Problem, ...]


def scan_tags(text: str, start: int = 0, end: int | None = None) -> Iterator[Tag]:
    """The tags of ``text[start:end]`` in order, including broken ones (without ``>``)."""
    for match in _TAG.finditer(text, start, len(text) if end is None else end):
        name = match[2].lower()
        yield Tag(
            name=name,
            closing=bool(match[1]),
            attributes=match[3],
            complete=bool(match[4]),
            lower_case=name == match[2],
            start=match.start(),
            end=match.end(),
        )


def read_attributes(text: str) -> Attributes:
    """Parse the text between a tag's name and its ``>``.

    ``id=a``, ``id='a'``, ``id="a,b"``, ``id="a, b"`` and ``id=a, b`` all name their ids; blanks
    around ids are dropped.
    """
    # Groups of rollouts repeat their ids; texts that no id needs are not worth caching.
    return _read_known(text) if len(text) <= 200 else _read(text)


def _read(text: str) -> Attributes:
    ids: dict[str, None] = {}
    problems: dict[Problem, None] = {}
    position = 0
    while name := _NAME.match(text, position):
        key = name[1].lower()
        value = _QUOTED.match(text, name.end())
        if value is None:
            pattern = _ID_LIST if key in ("id", "ids") else _WORD
            value = pattern.match(text, name.end())
        if value is None:
            position = name.end()
            problems[Problem.BAD_ATTRIBUTES] = None
            break
        position = value.end()
        if key == "id":
            listed = value[value.lastindex] if value.lastindex else value[0]
            ids.update(dict.fromkeys(i.strip() for i in listed.split(",") if i.strip()))
        else:
            problems[Problem.IDS_ATTRIBUTE if key == "ids" else Problem.BAD_ATTRIBUTES] = None
    if text[position:].strip():
        problems[Problem.BAD_ATTRIBUTES] = None
    if not ids and Problem.IDS_ATTRIBUTE not in problems:
        problems[Problem.NO_ID] = None
    return Attributes(tuple(ids), tuple(problems))


_read_known = functools.lru_cache(maxsize=4096)(_read)


class _CodePoints(dict[int, str | int]):
    """By code point, a character's form in comparisons; computed on first use."""

    def __missing__(self, code: int) -> str | int:
        category = unicodedata.category(chr(code))
        found: str | int = code
        if category == "Cf":  # zero-width blanks, soft hyphens, marks of direction
            found = ""
        elif category[0] in "PZC" or category == "Sk":
            found = " "
        self[code] = found
        return found


_COMPARED = _CodePoints()


def compared(text: str) -> str:
    """Equal for texts that differ in case, punctuation, quotes or blanks alone.

    A text of nothing else is compared verbatim.
    """
    bare = unicodedata.normalize("NFKC", text.casefold()).translate(_COMPARED)
    return " ".join(bare.split()) or text.strip()


class _LazyTexts(Mapping[str, str]):
    """Texts by id, joined on demand.

    Text shared by thousands of ids is stored once, however often the same ids occur in the prompt:
    joining all of it at once could exhaust memory.
    """

    def __init__(self, parts: dict[str, list[str]]) -> None:
        self._parts = parts

    def __getitem__(self, key: str) -> str:
        parts = self._parts[key]
        if len(parts) > 1:
            parts[:] = ["\n".join(parts)]
        return parts[0]

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class ParsedEvidence:
    """Citable evidence.

    ``texts`` maps an id to its text, without tags; the texts of an id that occurs several times are
    joined by line breaks. Ids are case-sensitive. ``differing`` counts ids whose texts are not the
    same at all occurrences: a source that writes tags could so add to another one's.
    """

    texts: Mapping[str, str]
    differing: int = 0

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text_of(self, ids: tuple[str, ...]) -> str:
        """The texts of the known ``ids``, in that order, with a blank line between them."""
        return "\n\n".join(self.texts[i] for i in ids if i in self.texts)


@dataclass
class _OpenElement:
    """An element being parsed."""

    ids: tuple[str, ...]
    inside: bool
    around: bool = False
    pieces: list[str] = field(default_factory=list)


class _Reader:
    """One pass over the tags. At most one snippet and one web page are open at a time."""

    def __init__(self) -> None:
        self.in_tool_output = False
        self.saw_tool_output = False
        self.open: dict[str, _OpenElement] = {}
        self.inside: list[_OpenElement] = []
        self.anywhere: list[_OpenElement] = []

    def text(self, piece: str) -> None:
        if piece:
            for element in self.open.values():
                element.pieces.append(piece)

    def tag(self, tag: Tag) -> None:
        if tag.name == "tool_output":
            self._tool_output(tag)
        elif tag.name in ("snippet", "webpage"):
            self._end(tag.name, properly=tag.closing)
            if not tag.closing:
                ids = read_attributes(tag.attributes).ids
                self.open[tag.name] = _OpenElement(ids, inside=self.in_tool_output)

    def _tool_output(self, tag: Tag) -> None:
        self.in_tool_output = not tag.closing
        self.saw_tool_output = True
        for name, element in list(self.open.items()):
            if element.inside:
                self._end(name, properly=False)
            else:
                element.around = True

    def _end(self, name: str, *, properly: bool) -> None:
        element = self.open.pop(name, None)
        if element is None:
            return
        self.anywhere.append(element)
        if element.inside or (element.around and properly):
            self.inside.append(element)

    def finish(self) -> list[_OpenElement]:
        for name in list(self.open):
            self._end(name, properly=False)
        return self.inside if self.saw_tool_output else self.anywhere


def parse_evidence(prompt: str) -> ParsedEvidence:
    """Parse the evidence of a prompt, in time linear in its length.

    - Only tool output counts: elements inside ``<tool_output>``, and web pages around one. So an
      example of the notation in the instructions is no evidence. A prompt without any
      ``<tool_output>`` tag counts as tool output as a whole.
    - An unclosed element (search results are cut) extends to the next one of its kind, to
      the end of its tool output, or to the end of the prompt.
    - A web page may contain snippets: their text belongs to both.
    - An element without an id cannot be cited and is skipped.
    """
    reader = _Reader()
    position = 0
    for tag in scan_tags(prompt):
        if not tag.complete:
            continue
        reader.text(prompt[position : tag.start])
        reader.tag(tag)
        position = tag.end
    reader.text(prompt[position:])
    texts: dict[str, list[str]] = {}
    known: dict[str, str] = {}
    differing: set[str] = set()
    for element in reader.finish():
        text = "".join(element.pieces).strip()
        text = known.setdefault(text, text)  # interned, so that comparing equal ones is fast
        for name in element.ids:
            parts = texts.setdefault(name, [])
            if parts and parts[0] is not text:
                differing.add(name)
            parts.append(text)
    return ParsedEvidence(_LazyTexts(texts), len(differing))


_ANSWER_TAG = re.compile(r"<(/?)answer\s*+>")
_SAYS_SOMETHING = re.compile(r"[^\W_]")


@dataclass(frozen=True)
class Claim:
    """One span of an answer: in a snippet tag if ``tagged``, else plain text."""

    text: str
    ids: tuple[str, ...] = ()
    tagged: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def well_formed(self) -> bool:
        """True if the span is a closed tag with content, with all ids known."""
        return self.tagged and not self.problems


@dataclass(frozen=True)
class ParsedAnswer:
    """The content of an answer, and its problems.

    ``body`` is the text inside the single answer block, tags as sampled; None if there is no
    single block. ``claims`` is then empty. ``outside``: text before or after the block, which is
    a fault only under ``answer_only``, so not among the ``problems`` (with their counts).
    """

    body: str | None
    claims: tuple[Claim, ...]
    outside: bool
    problems: Mapping[Problem, int]

    @property
    def malformed(self) -> bool:
        """No single answer block, or an empty one: there is nothing to judge."""
        return any(problem in FATAL for problem in self.problems)

    @property
    def well_formed(self) -> bool:
        """One answer block without any problem and with at least one cited claim."""
        return not self.problems and any(claim.ids for claim in self.claims)

    @property
    def tagged_claims(self) -> tuple[Claim, ...]:
        """The spans in snippet tags, sound or not."""
        return tuple(claim for claim in self.claims if claim.tagged)

    @property
    def cited_ids(self) -> tuple[str, ...]:
        """All distinct cited ids, in the order of their first use."""
        return tuple(dict.fromkeys(i for claim in self.claims for i in claim.ids))


def says_something(text: str) -> bool:
    """True if ``text`` contains a letter or a digit."""
    return _SAYS_SOMETHING.search(text) is not None


def strip_tags(text: str) -> str:
    """``text`` with each complete known tag replaced by a blank; text in tags is dropped."""
    pieces, position = [], 0
    for tag in scan_tags(text):
        if tag.complete:
            pieces += [text[position : tag.start], " "]
            position = tag.end
    pieces.append(text[position:])
    return "".join(pieces)


class _Builder:
    """Splits a body into claims. ``tag_ids`` is None in plain text."""

    def __init__(self, known_ids: Container[str] | None) -> None:
        self.known_ids = known_ids
        self.claims: list[Claim] = []
        self.problems: Counter[Problem] = Counter()
        self.tag_ids: tuple[str, ...] | None = None
        self.span_problems: dict[Problem, None] = {}
        self.pieces: list[str] = []

    def note(self, problem: Problem) -> None:
        """Record a problem of the current span; plain text has none of its own."""
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
    """Start and end of the single answer block's content, or the problem."""
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
    """Parse an answer, in time linear in its length.

    Parameters
    ----------
    text
        The policy's text, without special tokens.
    known_ids
        The ids of the prompt's evidence. With None, ids are not checked.

    Returns
    -------
    ParsedAnswer
        For the effect of each fault see :class:`Problem`. Text between tags without any letter or
        digit (blanks, a full stop) is no claim.
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
