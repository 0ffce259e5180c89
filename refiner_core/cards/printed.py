"""Text of a card that remembers where its numbers come from.

In: facts, by the modules that put them into words. Out: :class:`Line`, which prints as its text and
knows for each number in it the dotted path of the fact behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

#: What stands where there is no number.
MISSING = "—"
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
#: What no card may hold: characters that end a line where no reader of the source sees one, turn
#: the direction of text, or command a terminal.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Printed(NamedTuple):
    """A number as it stands in the card, and the dotted path of the fact that it shows."""

    text: str
    fact: str


@dataclass(frozen=True)
class Line:
    """Some words of a card, and the numbers of facts in them, in their order."""

    text: str
    numbers: tuple[Printed, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Line | str) -> Line:
        added = as_line(other)
        return Line(self.text + added.text, self.numbers + added.numbers)

    def __radd__(self, other: str) -> Line:
        return as_line(other) + self

    @property
    def sentence(self) -> Line:
        """The same with a capital letter at its front."""
        return Line(self.text[:1].upper() + self.text[1:], self.numbers)


def as_line(text: Line | str) -> Line:
    """Words without numbers of facts, as a line; a line as it is."""
    return text if isinstance(text, Line) else Line(text)


def number(text: Any, fact: str) -> Line:
    """One number."""
    return Line(str(text), (Printed(str(text), fact),))


def counted(value: Any, fact: str, one: str, many: str = "") -> Line:
    """``1 step``, ``8 steps``; ``many`` is ``one`` with an s where it is not given."""
    return number(value, fact) + f" {one if value == 1 else many or one + 's'}"


def joined(parts: Iterable[Line | str], between: str = ", ") -> Line:
    """Several lines as one."""
    whole = Line("")
    for position, part in enumerate(parts):
        whole = whole + (between if position else "") + part
    return whole


def quoted(text: str, fact: str) -> Line:
    """A text of a fact that may hold numbers (the name of a machine)."""
    return Line(text, tuple(Printed(found, fact) for found in _DIGITS.findall(text)))
