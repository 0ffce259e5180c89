"""Number formats of reports, shared by page, Markdown and terminal.

In: numbers, None for missing ones. Out: text. The number of digits follows from the precision:
two significant digits of half the interval. A missing number is a dash, never a 0
and never ``nan``.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

MISSING = "—"
MINUS = "\u2212"
_MOST_DECIMALS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Characters special to Markdown: brackets only before a link, an underscore only at a word's edge.
_SPECIAL = re.compile(r"([\\`*|~#]|\[(?=[^\]]*\][(\[])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")


def finite(value: Any) -> float | None:
    """The number, or None if it is not finite."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


def decimals_for(width: float | None, value: float | None = None) -> int:
    """Decimals that show two significant digits of half an interval's ``width``; without one,
    three of the ``value``."""
    decimals = 3
    if width is not None and math.isfinite(width) and width > 0:
        decimals = 1 - math.floor(math.log10(width / 2))
    elif value and math.isfinite(value):
        decimals = 2 - math.floor(math.log10(abs(value)))
    return max(0, min(_MOST_DECIMALS, decimals))


def decimals_of(value: float | None, low: float | None, high: float | None) -> int:
    """Decimals for a number with its interval."""
    width = None if finite(low) is None or finite(high) is None else high - low  # type: ignore[operator]
    return decimals_for(width, value)


def number(value: float | None, decimals: int = 3, *, signed: bool = False) -> str:
    """``0.612``, ``+0.031``, ``−0.031``; a dash if missing."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value:{'+' if signed else ''}.{decimals}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def short(value: float | None) -> str:
    """``0.6123``: four significant digits."""
    return MISSING if finite(value) is None else f"{value:.4g}".replace("-", MINUS)


def interval(low: float | None, high: float | None, decimals: int = 3) -> str:
    """``[0.59, 0.63]``, or nothing if either end is missing."""
    if finite(low) is None or finite(high) is None:
        return ""
    return f"[{number(low, decimals)}, {number(high, decimals)}]"


def with_interval(
    value: float | None,
    low: float | None,
    high: float | None,
    decimals: int = 3,
    *,
    signed: bool = False,
) -> str:
    """``+0.031 [0.012, 0.050]``."""
    return f"{number(value, decimals, signed=signed)} {interval(low, high, decimals)}".strip()


def estimate(
    value: float | None, low: float | None, high: float | None, *, signed: bool = False
) -> str:
    """A number with its interval, with as many digits as are known."""
    return with_interval(value, low, high, decimals_of(value, low, high), signed=signed)


def measured(entry: Mapping[str, Any], missing: str = "-") -> str:
    """``0.512 [0.480, 0.543]`` for a recorded number, in terminals and messages."""
    value, low, high = (entry.get(key) for key in ("value", "low", "high"))
    if value is None:
        return missing
    return f"{value:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def p_text(p: float | None) -> str:
    """``0.21``, ``0.004``, ``< 0.001``."""
    if p is None or not math.isfinite(p):
        return MISSING
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_phrase(p: float | None) -> str:
    """``= 0.21``, ``< 0.001``: for use after ``p``."""
    text = p_text(p)
    return text if text.startswith("<") else f"= {text}"


def spark(values: Iterable[float | None], low: float, high: float) -> str:
    """A curve of blocks between two values; a space for a missing one."""
    drawn = ""
    for value in values:
        share = 0.0 if value is None or high <= low else (value - low) / (high - low)
        block = _BLOCKS[max(0, min(len(_BLOCKS) - 1, int(share * len(_BLOCKS))))]
        drawn += " " if value is None else block
    return drawn


def hours(value: float | None) -> str:
    """Hours as text."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 0 < value < 0.001:
        return "< 0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"


def duration(seconds: float | None) -> str:
    """``12 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if 0 < seconds < 1:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for above, unit, size, small, below in (
        (86400, "d", 86400, "h", 3600),
        (3600, "h", 3600, "min", 60),
        (60, "min", 60, "s", 1),
    ):
        if whole >= above:
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def size(count: int | None) -> str:
    """``3.0 GiB``, ``12.0 MiB``: bytes, in binary units."""
    if count is None:
        return MISSING
    for unit, above in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= above:
            return f"{count / above:,.1f} {unit}"
    return f"{count / 1024:,.0f} KiB"


def clock(seconds: float) -> str:
    """``7.2 s``, ``3 min 05 s``, ``2 h 04 min``: of similar width, for columns."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count(value: int | None) -> str:
    """``12 800``: digits in groups of three, with non-breaking spaces."""
    return MISSING if value is None else f"{value:,}".replace(",", "\u202f")


def counted(value: int, one: str, many: str = "") -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def label(note: str, tags: Iterable[str]) -> str:
    """``try beta 0.05 #keep``, on one line."""
    return " ".join([*note.split(), *(f"#{tag}" for tag in tags)])


def total(values: Iterable[float | None]) -> float | None:
    """The sum of the known values; None if none is known."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(known) if known else None


def moment(at: str) -> str:
    """``2026-11-21 12:34 UTC``; text that is no time stays unchanged."""
    try:
        found = datetime.fromisoformat(at)
    except ValueError:
        return at
    return f"{found:%Y-%m-%d %H:%M}" + (" UTC" if found.utcoffset() is not None else "")


def whole(text: str) -> str:
    """Text without unpaired surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def plain(text: str) -> str:
    """Text that is safe for files and terminals: control characters and unpaired surrogates are
    replaced by a sign."""
    return text.translate(_SIGNS)


def escaped(text: str) -> str:
    """Text escaped for Markdown, on one line."""
    line = " ".join(plain(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", line).replace("@", "&#64;")


def piped(text: str) -> str:
    """Trusted text, on one line, that does not end a cell of Markdown."""
    return " ".join(text.replace("|", "\\|").split())


def table(
    header: Collection[str], rows: Iterable[Iterable[str]], cell: Callable[[str], str] = escaped
) -> str:
    """A table in Markdown; ``cell`` escapes the text of a cell."""
    head, *body = ("| " + " | ".join(map(cell, row)) + " |" for row in (header, *rows))
    return "\n".join([head, "|" + "---|" * len(header), *body])


def folded(text: str, head: str = "", width: int = 98) -> str:
    """Text after its head, wrapped with a hanging indent."""
    lines = textwrap.fill(
        text, width, initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return lines or head.rstrip()


def table_lines(
    rows: Iterable[Sequence[str]], header: Sequence[str] = (), indent: str = ""
) -> Iterator[str]:
    """A plain table: columns padded, the last one unlimited."""
    # A line end within a cell would look like a row.
    said = ([header] if header else []) + list(rows)
    cells = [[" ".join(str(cell).splitlines()) for cell in row] for row in said]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield indent + "  ".join(padded).rstrip()


_SIGNS = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
    | dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)
)


class Section(NamedTuple):
    """A heading, words, and a table that may be empty."""

    title: str
    words: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def document(title: str, lead: str, sections: Iterable[Section]) -> str:
    """Sections in Markdown, of trusted text."""
    parts = [f"# {title}", lead]
    for section in sections:
        parts += [f"## {section.title}", *section.words]
        if section.rows:
            parts.append(table(section.header, section.rows, piped))
    return "\n\n".join(parts) + "\n"
