"""Evidence out of prompts, claims out of answers.

In: the text of a prompt, the text that a policy sampled. Out: :class:`ParsedEvidence` (id to text)
and :class:`ParsedAnswer` (claims, their ids, everything that is wrong with them). Imports nothing
but the standard library; knows nothing of judges or rewards.

The same tag marks evidence in a prompt and claims in an answer, so the two readers are separate:
:func:`parse_evidence` is only ever given the prompt, :func:`parse_answer` only the answer. Claims
are the spans in ``<snippet id=…>`` tags *and* the plain text between them (DR Tulu counts both), in
order; two claims with the same text are two claims.

Nothing looks at a character more than a fixed number of times, whatever the text: a tag ends at the
next ``<`` or ``>``, and the patterns do not backtrack.
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
    """Everything that can be wrong with an answer, each with a defined result.

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
    """One block that says nothing: no letter or digit once the tags are taken away."""
    IDS_ATTRIBUTE = "ids_attribute"
    """``ids=`` instead of ``id=``. The ids in it are not taken: the claim cites nothing."""
    NO_ID = "no_id"
    """A snippet tag that names no id (``<snippet>``, ``id=""``). The claim cites nothing."""
    BAD_ATTRIBUTES = "bad_attributes"
    """An open quote, an unknown attribute, stray characters. Ids read up to there count."""
    BROKEN_TAG = "broken_tag"
    """A tag without ``>``. It stays in the text as it is."""
    NESTED_TAG = "nested_tag"
    """A claim opened inside a claim: the first ends there, and both carry this."""
    UNCLOSED_TAG = "unclosed_tag"
    """A claim still open where the answer ends; it reaches to there."""
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
    """One tag: its lower-case name, whether it closes, and where it stands."""

    name: str
    closing: bool
    attributes: str
    complete: bool
    lower_case: bool
    start: int
    end: int


class Attributes(NamedTuple):
    """The ids that a tag names, without repeats and in order, and what is wrong with it."""

    ids: tuple[str, ...]
    problems: tuple[Problem, ...]


def scan_tags(text: str, start: int = 0, end: int | None = None) -> Iterator[Tag]:
    """The tags of ``text[start:end]`` in order, the broken ones (without ``>``) included."""
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
    """Read what stands between a tag's name and its ``>``.

    ``id=a``, ``id='a'``, ``id="a,b"``, ``id="a, b"`` and ``id=a, b`` all name their ids; blanks
    around ids are dropped.
    """
    # Groups of rollouts repeat their ids; texts that no id needs are not worth keeping.
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


class _Compared(dict[int, str | int]):
    """By code point, what a character is in a comparison; found when it first occurs."""

    def __missing__(self, code: int) -> str | int:
        category = unicodedata.category(chr(code))
        found: str | int = code
        if category == "Cf":  # zero-width blanks, soft hyphens, marks of direction
            found = ""
        elif category[0] in "PZC" or category == "Sk":
            found = " "
        self[code] = found
        return found


_COMPARED = _Compared()


def compared(text: str) -> str:
    """Equal for texts that differ in case, punctuation, quotes or blanks alone.

    A text of nothing else is compared as it stands.
    """
    bare = unicodedata.normalize("NFKC", text.casefold()).translate(_COMPARED)
    return " ".join(bare.split()) or text.strip()


class _Joined(Mapping[str, str]):
    """Texts by id, put together when they are asked for.

    Text that thousands of ids share is kept once, however often the same ids stand in the prompt:
    joining all of it at once could take more memory than anybody has.
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
    """What may be cited.

    ``texts`` maps an id to its text, tags taken out; an id that stands at several places has their
    texts joined by line breaks. Ids are case-sensitive. ``differing`` counts ids whose texts are
    not the same at all their places: a source that writes tags can so add to another's.
    """

    texts: Mapping[str, str]
    differing: int = 0

    def __bool__(self) -> bool:
        return bool(self.texts)

    def text_of(self, ids: tuple[str, ...]) -> str:
        """The texts of the known ones among ``ids``, in that order, a blank line between them."""
        return "\n\n".join(self.texts[i] for i in ids if i in self.texts)


@dataclass
class _Open:
    """An element that is being read."""

    ids: tuple[str, ...]
    inside: bool
    around: bool = False
    pieces: list[str] = field(default_factory=list)


class _Reader:
    """One pass over the tags. At most one snippet and one web page are open at a time."""

    def __init__(self) -> None:
        self.in_tool_output = False
        self.saw_tool_output = False
        self.open: dict[str, _Open] = {}
        self.inside: list[_Open] = []
        self.anywhere: list[_Open] = []

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
                self.open[tag.name] = _Open(ids, inside=self.in_tool_output)

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

    def finish(self) -> list[_Open]:
        for name in list(self.open):
            self._end(name, properly=False)
        return self.inside if self.saw_tool_output else self.anywhere


def parse_evidence(prompt: str) -> ParsedEvidence:
    """Read the evidence of a prompt, in time linear in its length.

    - Only tool output counts: elements inside ``<tool_output>``, and web pages around one. So an
      example of the notation in the instructions is no evidence. A prompt without any
      ``<tool_output>`` tag is taken to be tool output as a whole.
    - An element that is not closed (search results are cut) reaches to the next one of its kind, to
      the end of its tool output, or to the end of the prompt.
    - A web page may hold snippets: their text belongs to both.
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
        text = known.setdefault(text, text)  # so that equal ones are told without reading them
        for name in element.ids:
            parts = texts.setdefault(name, [])
            if parts and parts[0] is not text:
                differing.add(name)
            parts.append(text)
    return ParsedEvidence(_Joined(texts), len(differing))


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
        """Say whether the span names at least one id, known or not."""
        return bool(self.ids)

    @property
    def well_formed(self) -> bool:
        """Say whether the span is a tag that says something, closed, with all ids known."""
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
    """Say whether ``text`` holds a letter or a digit."""
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
