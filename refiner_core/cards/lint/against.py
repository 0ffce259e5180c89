"""A card against its evidence: what it should say, line by line, and where each number comes from.

In: the text of a card and of the ``refiner.json`` that belongs to it. Out: findings. The card is
made again from the facts; whatever differs is found, numbers or words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from refiner_core.cards.build import build_card
from refiner_core.cards.evidence import Evidence, load_evidence
from refiner_core.cards.facts import CardFacts, record_of
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.proof import inconsistencies
from refiner_core.cards.numbers import CardNumber, card_numbers
from refiner_core.cards.settings import flag_of
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.marks import walk

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?|[^\W\d]+|\s+|.", re.DOTALL)
_NAMED = re.compile(r"(?:--)?([A-Za-z_][\w.]*)\s*[ =]\s*$")
_FIX = "take the card that the evidence gives, or publish again"


def evidence_findings(text: str, evidence: str) -> list[Finding]:
    """Differences between a card and what its evidence gives; empty where there is none."""
    try:
        read = load_evidence(evidence)
        expected = build_card(read.facts)
    except RefinerError as error:
        return [Finding(1, "evidence", f"its evidence cannot be used: {error.what}", error.fix)]
    return [*inconsistencies(read), *differences(text, expected, read)]


def differences(text: str, expected: str, evidence: Evidence) -> Iterator[Finding]:
    """One finding per line that differs, with the number that does where it is one."""
    if text == expected:
        return
    have, want = text.split("\n"), expected.split("\n")
    origin = _Origin(evidence.facts, want)
    matcher = SequenceMatcher(None, have, want, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        paired = min(i2 - i1, j2 - j1)
        for offset in range(paired):
            yield _changed(i1 + offset + 1, have[i1 + offset], j1 + offset, origin)
        for i in range(i1 + paired, i2):
            yield Finding(
                i + 1, "evidence", f"the evidence gives no line {_short(have[i])!r}", _FIX
            )
        for j in range(j1 + paired, j2):
            line = min(i2, len(have) - 1) + 1
            yield Finding(
                line, "evidence", f"here the evidence gives the line {_short(want[j])!r}", _FIX
            )


def _changed(line: int, have: str, place: int, origin: _Origin) -> Finding:
    """What differs between two lines: the first number or word that does."""
    want = origin.lines[place]
    ours, theirs = _TOKEN.findall(have), _TOKEN.findall(want)
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        stands, should = "".join(ours[i1:i2]), "".join(theirs[j1:j2])
        start = len("".join(theirs[:j1]))
        source = origin.of(place, start, start + max(len(should), 1))
        told = f"{_short(stands)!r} stands here" if stands else "something is missing here"
        message = (
            f"{told}, and the evidence gives {_short(should)!r}"
            if should
            else (f"{told}, and the evidence gives nothing")
        )
        return Finding(line, "evidence", f"{message}{source}{_beside(theirs, j1, j2)}", _FIX)
    return Finding(line, "evidence", f"this is not the line {_short(want)!r}", _FIX)


def _beside(tokens: Sequence[str], first: int, last: int) -> str:
    """What stands around a place, so that it is found in a long line."""
    text = "".join(tokens[max(0, first - 6) : last + 4]).strip()
    return f": …{text}…" if text else ""


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"


@dataclass(frozen=True)
class _Origin:
    """Which fact each number of the card comes from."""

    facts: CardFacts
    lines: Sequence[str]

    def of(self, line: int, start: int, end: int) -> str:
        """`` (fact evaluations.3.value, from stages/…)``; empty where no number stands there."""
        for first, last, number in self._placed.get(line, ()):
            if first < end and start < last:
                return _source(number.fact, number.record)
        path = self._setting(self.lines[line][:start])
        if path is None:
            return ""
        return _source(f"config.{path}", record_of(self.facts, f"config.{path}"))

    @cached_property
    def _placed(self) -> Mapping[int, list[tuple[int, int, CardNumber]]]:
        """Numbers of facts by the line that they stand in: each is the next one of its section
        that prints so."""
        waiting: dict[str, list[CardNumber]] = {}
        for number in card_numbers(self.facts):
            waiting.setdefault(number.section, []).append(number)
        placed: dict[int, list[tuple[int, int, CardNumber]]] = {}
        section = ""
        for place, line in enumerate(self.lines):
            if place == 0 and line == "---":
                section = "front matter"
            elif line == "---" or line.startswith("## "):
                section = line.removeprefix("## ") if line != "---" else ""
            at = 0
            while numbers := waiting.get(section):
                found = _standing_alone(numbers[0].text, line, at)
                if found is None:
                    break
                at = found + len(numbers[0].text)
                placed.setdefault(place, []).append((found, at, numbers.pop(0)))
        return placed

    def _setting(self, before: str) -> str | None:
        """The configuration field that is named right before a value."""
        found = _NAMED.search(before)
        if found is None:
            return None
        name = found[1]
        return _fields().get(name) or _fields().get(f"--{name}")


def _source(fact: str, record: str | None) -> str:
    return f" (fact {fact}, from {record})" if record else f" (fact {fact})"


def _standing_alone(text: str, line: str, start: int) -> int | None:
    """Where a printed number stands in a line and is no part of a longer one."""
    found = re.compile(rf"(?<![\w.]){re.escape(text)}(?![\d\w]|\.\d)").search(line, start)
    return found.start() if found else None


def _fields() -> dict[str, str]:
    """Names that a card gives to configuration fields: overrides, flags, and bare names that only
    one field has."""
    paths = [path for path, _ in walk(RecipeConfig)]
    flags = [(flag_of(path), path) for path in paths]
    return {path: path for path in paths} | {flag: path for flag, path in flags if flag}
