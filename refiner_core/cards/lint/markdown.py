"""A README as its parts (front matter, prose, code, tables), and findings about them.

In: text. Out: a :class:`Document`, in which everything knows the line that it stands in, counted
from 1. This is no renderer: what it does not understand is prose.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

# Cards are anybody's: no pattern here may look at a character more than a few times.
_FENCE = re.compile(r"^(?P<indent>[\s>]*+)(?P<mark>`{3,}+|~{3,}+)[ \t]*+(?P<info>[^`\n]*+)$")
_HEADING = re.compile(r"^\s{0,3}(#{1,6})\s++(.*)$")
_DELIMITER = re.compile(r"^\s*+\|?\s*+:?-++:?\s*+(?:\|\s*+:?-++:?\s*+)*+\|?\s*+$")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s")
_BLOCK = re.compile(r"^[\s>]*+(```|~~~)")
_TICKS = re.compile(r"`+|\n")
_LINK = re.compile(r"!?\[([^\[\]]*+)\]\((?:[^()]|\([^()]*+\))*+\)")
_TAG = re.compile(r"</?[A-Za-z][^<>]*+>")
#: Characters of the paragraph before a table that are looked at as its caption.
_CAPTION = 2000
_RUN = re.compile(r"[^\S\n]{65,}|[\d,.]{65,}")
_EMPHASIS = re.compile(r"\*++|(?<!\w)_++|(?<!_)_++(?!\w)|~~")


@dataclass(frozen=True)
class Fence:
    """A code block: its language (lower case, may be empty), the line of its opening mark, and
    its lines. ``heading`` is the section that it stands in."""

    language: str
    line: int
    lines: tuple[str, ...]
    closed: bool
    heading: str = ""


@dataclass(frozen=True)
class Paragraph:
    """Consecutive lines of prose; ``text`` keeps its line ends."""

    line: int
    text: str
    headings: tuple[str, ...] = ()

    def line_of(self, offset: int) -> int:
        """The line in which a character of ``text`` stands."""
        return self.line + bisect_left(self._ends, offset)

    @cached_property
    def _ends(self) -> list[int]:
        return [place for place, sign in enumerate(self.text) if sign == "\n"]

    @cached_property
    def without_code(self) -> str:
        """``text`` with inline code blanked, every character where it was."""
        return _without_runs(_with_code(self.text, lambda span, _: " " * len(span)))


@dataclass(frozen=True)
class Cell:
    """One cell: as a reader sees it, and whether it stands out."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    line: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """A table, with the headings that it stands under (outermost first) and the paragraph before
    it."""

    line: int
    header: tuple[str, ...]
    rows: tuple[Row, ...]
    headings: tuple[str, ...] = ()
    caption: str = ""


@dataclass
class Document:
    """A README. ``front`` is the text between the two lines of ``---`` (None where there is no such
    block), and ``front_line`` the line of its first character."""

    text: str
    front: str | None = None
    front_line: int = 0
    fences: list[Fence] = field(default_factory=list)
    paragraphs: list[Paragraph] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)

    @cached_property
    def title(self) -> str:
        """The first heading."""
        return self.headings[0][1] if self.headings else ""


def read_document(text: str) -> Document:
    """Take a README apart."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    document = Document(text)
    lines = text.split("\n")
    start = 0
    if lines[0].rstrip() == "---":
        end = next((i for i in range(1, len(lines)) if lines[i].rstrip() == "---"), None)
        if end is not None:
            document.front, document.front_line = "\n".join(lines[1:end]), 2
            start = end + 1
    _Reader(document, _without_comments(lines, start), start).read()
    return document


def _without_comments(lines: list[str], start: int) -> list[str]:
    """Lines with HTML comments blanked, outside of code blocks."""
    found, block, inside = lines[:start], "", False
    for line in lines[start:]:
        mark = _BLOCK.match(line) if not inside else None
        if mark and block in ("", mark[1]):
            block = "" if block else mark[1]
        elif not block:
            line, inside = _uncommented(line, inside)
        found.append(line)
    return found


def _uncommented(line: str, inside: bool) -> tuple[str, bool]:
    """A line with its comments blanked; ``inside``: it begins, and then ends, within one."""
    parts, at = [], 0
    while at < len(line):
        end = line.find("-->" if inside else "<!--", at)
        stop = len(line) if end < 0 else end + (3 if inside else 0)
        parts.append(" " * (stop - at) if inside else line[at:stop])
        at = stop
        if end < 0:
            break
        inside = not inside
    return "".join(parts), inside


class _Reader:
    """Goes through the lines once."""

    def __init__(self, document: Document, lines: list[str], start: int) -> None:
        self.document, self.lines, self.at = document, lines, start
        self.stack: list[tuple[int, str]] = []
        self.held: list[str] = []
        self.caption = ""

    def read(self) -> None:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            fence, heading = _FENCE.match(line), _HEADING.match(line)
            if fence:
                self._flush()
                self._read_fence(fence)
            elif heading:
                self._flush()
                self._open_section(len(heading.group(1)), visible(_heading(heading.group(2))).text)
            elif self._starts_table():
                self._flush()
                self._read_table()
            elif not line.strip():
                self._flush()
                self.at += 1
            else:
                if _ITEM.match(line):
                    self._flush()
                self.held.append(line)
                self.at += 1
        self._flush()

    @property
    def _headings(self) -> tuple[str, ...]:
        return tuple(text for _, text in self.stack)

    def _flush(self) -> None:
        if self.held:
            text = _without_runs("\n".join(self.held))
            self.document.paragraphs.append(
                Paragraph(self.at - len(self.held) + 1, text, self._headings)
            )
            self.caption, self.held = text[-_CAPTION:], []

    def _open_section(self, level: int, text: str) -> None:
        self.stack = [(n, t) for n, t in self.stack if n < level] + [(level, text)]
        self.document.headings.append((self.at + 1, text))
        self.document.paragraphs.append(
            Paragraph(self.at + 1, _without_runs(self.lines[self.at]), self._headings[:-1])
        )
        self.caption = ""
        self.at += 1

    def _read_fence(self, opening: re.Match[str]) -> None:
        mark, first, indent = opening["mark"], self.at, len(opening["indent"])
        inside: list[str] = []
        closed = False
        self.at += 1
        while self.at < len(self.lines) and not closed:
            line = self.lines[self.at].rstrip()
            end = line.lstrip("> \t")
            near = len(line) - len(end) <= indent + 3  # further in, it belongs to what is inside
            closed = near and end.startswith(mark) and not end.strip(mark[0])
            if not closed:
                inside.append(self.lines[self.at])
            self.at += 1
        words = opening.group("info").strip().strip("{}").split()
        language = words[0].lower().lstrip(".") if words else ""
        heading = self.stack[-1][1] if self.stack else ""
        self.document.fences.append(Fence(language, first + 1, tuple(inside), closed, heading))

    def _starts_table(self) -> bool:
        if self.at + 1 >= len(self.lines) or "|" not in self.lines[self.at]:
            return False
        below = self.lines[self.at + 1]
        if "|" not in below or not _DELIMITER.match(below):
            return False
        return len(split_row(self.lines[self.at])) == len(split_row(below))

    def _read_table(self) -> None:
        first, header = self.at, split_row(self.lines[self.at])
        rows = []
        self.at += 2
        while self.at < len(self.lines) and "|" in self.lines[self.at]:
            cells = [visible(cell) for cell in split_row(self.lines[self.at])]
            cells += [Cell("")] * (len(header) - len(cells))
            rows.append(Row(self.at + 1, tuple(cells[: len(header)])))
            self.at += 1
        self.document.tables.append(
            Table(
                first + 1,
                tuple(visible(cell).text for cell in header),
                tuple(rows),
                self._headings,
                self.caption,
            )
        )
        self.caption = ""


def _heading(text: str) -> str:
    """Without the signs that may close it."""
    return text.rstrip().rstrip("#").rstrip()


def _with_code(text: str, said: Callable[[str, str], str]) -> str:
    """A text with each inline code replaced; ``said`` is given it with and without its marks. A
    mark is closed by the next one of its length in the same line."""
    marks = list(_TICKS.finditer(text))
    closing: list[int | None] = [None] * len(marks)
    later: dict[int, int] = {}
    for place in range(len(marks) - 1, -1, -1):
        if marks[place].group() == "\n":
            later = {}
        else:
            length = len(marks[place].group())
            closing[place] = later.get(length)
            later[length] = place
    parts, at, place = [], 0, 0
    while place < len(marks):
        mark, end = marks[place], closing[place]
        place += 1
        if end is not None:
            close = marks[end]
            whole = text[mark.start() : close.end()]
            parts += [text[at : mark.start()], said(whole, text[mark.end() : close.start()])]
            at, place = close.end(), end + 1
    return "".join([*parts, text[at:]])


def split_row(line: str) -> list[str]:
    """The raw cells of a row; a pipe in code or behind a backslash is no border."""
    covered = _with_code(line.strip(), lambda span, _: span.replace("|", "\x00"))
    covered = covered.replace(r"\|", "\x00").removeprefix("|").removesuffix("|")
    return [cell.replace("\x00", "|").strip() for cell in covered.split("|")]


def visible(raw: str) -> Cell:
    """A cell or heading without marks of Markdown and HTML."""
    bold = "**" in raw or "__" in raw or "<b>" in raw or "<strong>" in raw
    text = _with_code(raw, lambda _, code: code)
    text = _TAG.sub(" ", _LINK.sub(lambda m: m.group(1), text))
    text = _EMPHASIS.sub("", text)
    return Cell(_without_runs(" ".join(text.replace("&nbsp;", " ").split())), bold)


def _without_runs(text: str) -> str:
    """A text of the same length without runs of blanks or digits that are longer than anybody
    writes: patterns of prose look at those anew from each of their characters."""
    return _RUN.sub(lambda m: m.group()[:64] + "·" * (len(m.group()) - 64), text)


Severity = Literal["error", "warning"]


@dataclass(frozen=True, order=True)
class Finding:
    """One problem of a card.

    Attributes
    ----------
    line
        Where it stands, counted from 1.
    rule
        Its short name, such as ``percentage-impossible``; see below.
    message
        What stands there and why it cannot be.
    fix
        What mends it; empty where that is plain.
    severity
        An ``error`` is wrong as it stands; a ``warning`` cannot be checked, or misleads.

    The rules, each with what it asks of a card:

    - ``too-large``: a card has at most a million characters
    - ``front-matter``: the block between two lines of --- is there, is YAML, and is a mapping
    - ``licence-missing``: the front matter names a licence
    - ``base-model-missing``: the front matter names the base model
    - ``not-finite``: no NaN or infinity where a number should stand
    - ``not-a-number``: the values of model-index are numbers
    - ``secret``: no access token or key
    - ``machine-path``: no path of some machine
    - ``control-character``: no character that nobody sees
    - ``command``: commands parse; those of refiner name recipes and fields that there are
    - ``out-of-range``: no share above 100 % or below 0
    - ``percentage-impossible``: a percentage of n is a whole number of cases, as printed
    - ``total``: totals and averages recompute from the parts beside them
    - ``parts``: parts sum to their whole, x of y is x of more, a / b is what it is said to be
    - ``interval``: intervals hold their value, low before high
    - ``pass-at-k``: pass@k does not fall as k grows
    - ``two-values``: one quantity has one value
    - ``model-index``: the numbers of model-index are those of the tables
    - ``comparison``: an improvement recomputes, from two numbers of one protocol and one n
    - ``comparison-built-on``: an improvement is not built on a number that cannot be
    - ``evidence``: the card is what its evidence gives, number by number
    - ``evidence-inconsistent``: the evidence agrees with itself
    - ``evidence-missing``: numbers of our own cards have evidence beside them
    - ``file-differs``: the files of a publication are those that its evidence names
    """

    line: int
    rule: str
    message: str
    fix: str = ""
    severity: Severity = "error"

    @property
    def is_error(self) -> bool:
        """True if a card with it is unfit to be published."""
        return self.severity == "error"

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return asdict(self)
