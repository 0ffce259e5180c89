"""The four tags of the refiner's language, scanned in one pass.

In: any text. Out: its tags in order (:func:`scan_tags`), with the ids that they name and what is
wrong with them. Neither function looks at a character more than a fixed number of times, whatever
the text: a tag ends at the next ``<`` or ``>``, and the patterns do not backtrack.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
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
