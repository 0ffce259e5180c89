"""A README as its parts (front matter, prose, code, tables), and findings about them.

In: text. Out: a :class:`Document` whose parts know their lines, counted from 1. Blocks and inline
marks are those of markdown-it; prose is kept as a reader sees it. Nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

# Cards are untrusted: patterns here read each character only a few times.
_MARKUP = re.compile(r"<!--.*?(?:-->|\Z)|</?[A-Za-z][^<>]*+>", re.DOTALL)
_RUN = re.compile(r"\s{65,}|[\d,.]{65,}")
#: Characters of the paragraph before a table that are used as its caption.
_CAPTION = 2000


class _Paragraph(NamedTuple):
    """Prose of a block, or a row of a table, as shown; inline code is blanked."""

    line: int
    text: str

    def line_of(self, offset: int) -> int:
        """The line of a character of ``text``."""
        return self.line + self.text.count("\n", 0, offset)


class _TableRow(NamedTuple):
    """One row of a table: its line, and its cells as shown."""

    line: int
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table, with its headings (outermost first) and the paragraph before
    it."""

    line: int
    header: tuple[str, ...]
    rows: tuple[_TableRow, ...]
    headings: tuple[str, ...] = ()
    caption: str = ""


@dataclass
class Document:
    """A README. ``front`` is the text between the two lines of ``---``; None without such a
    block."""

    text: str
    front: str | None = None
    paragraphs: list[_Paragraph] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)

    def texts(self) -> Iterator[_Paragraph]:
        """Paragraphs, and rows of tables as such."""
        yield from self.paragraphs
        for row in (row for table in self.tables for row in table.rows):
            cells = "".join(f"{cell}\t" for cell in row.cells)
            yield _Paragraph(row.line, cells)


@cache
def _markdown() -> MarkdownIt:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"])


def read_document(text: str) -> Document:
    """Parse a README."""
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    document, lines, start = Document(text), text.split("\n"), 0
    if lines[0].rstrip() == "---":
        end = next((i for i in range(1, len(lines)) if lines[i].rstrip() == "---"), None)
        if end is not None:
            document.front, start = "\n".join(lines[1:end]), end + 1
    sections: list[tuple[int, str]] = []
    caption = ""
    tokens = iter(_markdown().parse("\n".join(lines[start:])))
    for token in tokens:
        line = start + 1 + (token.map or [0])[0]
        if token.type == "html_block":
            text = _MARKUP.sub(_blank, token.content.removesuffix("\n"))
            document.paragraphs.append(_Paragraph(line, _without_runs(text)))
        elif token.type == "heading_open":
            inline = next(tokens)
            title, level = " ".join(_seen(inline, code=True).split()), int(token.tag[1])
            sections = [(n, t) for n, t in sections if n < level] + [(level, title)]
            document.headings.append(title)
            document.paragraphs.append(_Paragraph(line, _seen(inline)))
            caption = ""
        elif token.type == "table_open":
            headings = tuple(title for _, title in sections)
            document.tables.append(_table(tokens, line, start + 1, headings, caption))
            caption = ""
        elif token.type == "inline":
            document.paragraphs.append(_Paragraph(line, _seen(token)))
            caption = document.paragraphs[-1].text[-_CAPTION:]
    return document


def _table(
    tokens: Iterator[Token], line: int, first: int, headings: tuple[str, ...], caption: str
) -> Table:
    rows: list[_TableRow] = []
    cells: list[str] = []
    for token in tokens:
        if token.type == "table_close":
            break
        if token.type == "inline":
            cells.append(" ".join(_seen(token, code=True).split()))
        elif token.type == "tr_open":
            cells = []
            at = first + (token.map or [line - first])[0]
        elif token.type == "tr_close":
            rows.append(_TableRow(at, tuple(cells)))
    return Table(line, rows[0].cells, tuple(rows[1:]), headings, caption)


def _seen(inline: Token, *, code: bool = False) -> str:
    """The visible text, with inline ``code`` or with blanks in its place."""
    parts = []
    for token in inline.children or ():
        if token.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif token.type == "html_inline":
            parts.append(_MARKUP.sub(_blank, token.content))
        else:
            hidden = token.type == "code_inline" and not code
            parts.append(" " if hidden else token.content)
    return _without_runs("".join(parts))


def _blank(found: re.Match[str]) -> str:
    return "\n" * found.group().count("\n") or " "


def _without_runs(text: str) -> str:
    """A text of the same length without very long runs of blanks or digits, which prose patterns
    would scan again from each of their characters."""
    return _RUN.sub(lambda m: m.group()[:64] + "·" * (len(m.group()) - 64), text)


Severity = Literal["error", "warning"]


@dataclass(frozen=True, order=True)
class CardFinding:
    """One problem of a card.

    Attributes
    ----------
    line
        Its line, counted from 1.
    rule
        Its short name, such as ``percentage-impossible``; see below.
    message
        The text found and why it is wrong.
    fix
        How to fix it; empty if obvious.
    severity
        An ``error`` is wrong; a ``warning`` cannot be checked, or misleads.

    The rules, each with its requirement:

    - ``too-large``: a card has at most a million characters
    - ``front-matter``: the block between two lines of --- is there, is YAML, and is a mapping
    - ``licence-missing``: the front matter names a licence
    - ``base-model-missing``: the front matter names the base model
    - ``secret``: no access token or key
    - ``machine-path``: a card of refiner names no local path
    - ``control-character``: no invisible character
    - ``percentage-impossible``: a percentage of n is a whole number of cases, as printed
    - ``total``: totals and averages recompute from their parts
    - ``parts``: parts sum to their whole, x of y is at most y, a / b is as stated
    - ``comparison``: an improvement recomputes, from two numbers of one protocol and one n
    - ``comparison-built-on``: an improvement is not based on an impossible number
    - ``evidence``: the card equals the one made from its evidence, number by number
    - ``evidence-inconsistent``: the evidence is consistent
    - ``evidence-missing``: cards of refiner have evidence beside them
    - ``file-differs``: the files of a publication are those in its evidence
    """

    line: int
    rule: str
    message: str
    fix: str = ""
    severity: Severity = "error"

    @property
    def is_error(self) -> bool:
        """True if the finding forbids publication."""
        return self.severity == "error"


# ---------------------------------------------------------------- front matter

#: Limit on a front matter's characters; YAML is slow to parse.
_LARGEST = 100_000
#: The line after the first ---.
_FIRST_LINE = 2


def front_findings(block: str | None, *, unknown_base: bool = False) -> Iterator[CardFinding]:
    """Problems of a front matter.

    Parameters
    ----------
    block
        The text; None if there is none.
    unknown_base
        The card states that the base model was not recorded.
    """
    line, wrong = 1, ""
    matter: Any = None
    if block is None:
        wrong = "there is no front matter (a block between two lines of ---)"
    elif len(block) > _LARGEST:
        wrong = f"the front matter has {len(block)} characters, at most {_LARGEST} are read"
    else:
        line = _FIRST_LINE
        try:
            # A few lines of aliases can expand to gigabytes.
            for token in yaml.scan(block):
                if isinstance(token, yaml.AliasToken):
                    raise yaml.MarkedYAMLError(problem="an alias", problem_mark=token.start_mark)
            matter = yaml.safe_load(block)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
            line += mark.line if mark else 0
            wrong = f"the front matter is not YAML that cards may have: {reason}"
    if not wrong and not isinstance(matter, dict):
        wrong = "the front matter is not a mapping"
    if wrong:
        fix = "begin the file with a block between two lines of ---: license, base_model, …"
        yield CardFinding(line, "front-matter", wrong, fix)
        return
    for key, rule in (("license", "licence-missing"), ("base_model", "base-model-missing")):
        if not matter.get(key):
            severity: Severity = "warning" if unknown_base and key == "base_model" else "error"
            what = f"the front matter has no {key}"
            yield CardFinding(1, rule, what, f"add `{key}:`", severity)
