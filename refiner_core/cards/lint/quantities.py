"""Numbers of a card's tables, each with its metric, model and number of cases.

In: a :class:`Document`. Out: one :class:`Quantity` per number with a known metric. Rows may be
models and columns metrics, or the other way round. A printed number (:class:`PrintedNumber`) stands
for all values that round to it. Labels are interpreted only if they are unambiguous
(:func:`metric_of`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Literal, NamedTuple

from refiner_core.cards.lint.markdown import Document, Table

_NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_FIGURE = re.compile(
    rf"(?P<hedge>[~≈<>≤≥]\s*)?(?P<value>{_NUMBER})\s*(?P<unit>%)?"
    rf"(?:\s*(?:±|\+/-)\s*{_NUMBER}\s*%?)?"
    rf"(?:\s*[\[(]{_NUMBER}\s*%?\s*(?:,|;|–|—|-|to|\.\.)\s*{_NUMBER}\s*%?[\])])?"
    r"(?:\s*,?\s*\(?[nN]\s*=\s*(?P<n>\d[\d,]*)\)?)?"
)
_N = re.compile(r"(?<![A-Za-z])[nN]\s*=\s*(\d[\d,]*)(?![\d.])")
#: Metrics of agents beside pass@k: the first attempt alone, and all of k attempts.
_FIRST = re.compile(r"(?i)\bpass\s?@\s?1[_ ]first\b")
_PASS = re.compile(r"(?i)\bpass\s?([@^])\s?(\d{1,4})(?![\w.])")
#: Each case counts as 0 or 1, so that a mean of n is a whole number of n-ths.
_YES_NO = re.compile(
    r"(?i)\b(?:accuracy|acc|success rate|exact match|solve rate|resolve rate|resolved)\b"
)
#: A share of a whole, but not of cases.
_SHARE = re.compile(r"(?i)\b(?:f1|precision|recall|win rate|error rate|pass rate)\b")
_CHANGE = re.compile(
    r"(?i)Δ|\bdelta\b|\bgain|improve|\bdiff|change|speed|increase|\brelative\b|\bvs\b|[↑↓]\s*\d"
)
_CASES = re.compile(
    r"(?i)(?:#|no\.? of|num(?:ber)?(?: of)?|n|total)?\s*"
    r"(?:tasks?|questions?|problems?|prompts?|instances|cases|n|items|rows|examples)"
)
_OWN = re.compile(r"(?i)\bthis (?:model|work|checkpoint)\b|\bours?\b|\bour model\b")
_BASE = re.compile(
    r"(?i)\bbase(?:line)?\b|\bbefore (?:training|fine-?tuning)\b|\bvanilla\b|\bpre-?trained\b"
)
_WORD = re.compile(r"[a-z0-9+^@]+")
#: Words of a name that distinguish nothing.
_OVERALL = frozenset({"overall", "total", "all", "average", "avg", "mean"})
#: Limits on compared numbers, and rows and columns of their tables: no real card has more.
_MOST, _ROWS, _COLUMNS = 2000, 300, 60

Role = Literal["own", "base", ""]


@dataclass(frozen=True)
class PrintedNumber:
    """One printed number.

    Attributes
    ----------
    text
        As printed.
    value, decimals
        The number, and its digits after the point.
    percent
        It is followed by %.
    hedged
        It is stated as approximate, or as a bound.
    n
        As printed beside it.
    """

    text: str
    value: Fraction
    decimals: int
    percent: bool = False
    hedged: bool = False
    n: int | None = None

    @property
    def unit(self) -> Fraction:
        """Value of one step of its last digit."""
        return Fraction(10) ** -self.decimals

    @property
    def is_count(self) -> bool:
        """A whole number without a unit."""
        return self.decimals == 0 and not self.percent and not self.hedged and self.value >= 0


def parse_figure(text: str) -> PrintedNumber | None:
    """The number that makes up a cell, or None for anything else."""
    found = _FIGURE.fullmatch(text.strip())
    if found is None or not any(c.isdigit() for c in found["value"]):
        return None
    plain = found["value"].replace(",", "").replace("−", "-")
    return PrintedNumber(
        text=text.strip(),
        value=Fraction(plain),
        decimals=len(plain.partition(".")[2]),
        percent=bool(found["unit"]),
        hedged=bool(found["hedge"]),
        n=whole_number(found["n"]) if found["n"] else None,
    )


def whole_number(text: str) -> int:
    """A count in printed form: ``1,319``."""
    return int(text.replace(",", ""))


def _stated_n(*texts: str) -> int | None:
    """The n in the first text such as ``GSM8K (n = 1,319)`` that has exactly one."""
    found = ({whole_number(n) for n in _N.findall(text)} for text in texts)
    return next((n for ns in found if len(ns) == 1 for n in ns), None)


class Metric(NamedTuple):
    """Metric of a number. ``drawn`` is k of pass@k and pass^k; ``yes_no``: each case
    counts as 0 or 1, ``once``: with one try."""

    key: str
    drawn: int = 1
    yes_no: bool = True
    once: bool = False


def metric_of(label: str) -> Metric | None:
    """The metric in a label; None for an unknown one, or a difference."""
    if _CHANGE.search(label):
        return None
    if _FIRST.search(label):
        return Metric("pass@1_first", once=True)
    if found := _PASS.search(label):
        return Metric(f"pass{found[1]}{found[2]}", int(found[2]))
    if yes_no := _YES_NO.search(label):
        return Metric(yes_no.group().lower().replace("accuracy", "acc"))
    share = _SHARE.search(label)
    return Metric(share.group().lower(), yes_no=False) if share else None


def metrics_in(text: str) -> frozenset[str]:
    """Keys of all metrics in a sentence."""
    patterns = (_FIRST, _PASS, _YES_NO, _SHARE)
    found = (metric_of(m.group()) for p in patterns for m in p.finditer(text))
    return frozenset(m.key for m in found if m is not None)


def role_of(label: str) -> Role:
    """The model of a label: the card's own, the one it is compared with, or any other."""
    return "own" if _OWN.search(label) else "base" if _BASE.search(label) else ""


def counts_cases(header: str) -> bool:
    """True if a column has the numbers of cases of its rows."""
    return _CASES.fullmatch(header.strip()) is not None


@dataclass(frozen=True)
class Quantity:
    """One number of a table.

    Attributes
    ----------
    metric
        Its metric.
    name
        The other words of its labels, such as ``{overall}``, without models.
    role
        Its model, if the table compares models.
    compares
        Whether its table compares models.
    n, n_line
        Number of cases and the line that states it; None if not stated.
    whole
        Value of all cases together: 100 for percentages, 1 for fractions.
    """

    metric: Metric
    name: frozenset[str]
    figure: PrintedNumber
    line: int
    table: Table
    role: Role = ""
    compares: bool = False
    n: int | None = None
    n_line: int = 0
    whole: int = 100


def quantities(document: Document) -> list[Quantity]:
    """All table numbers with a known metric, with n carried over between tables."""
    tables = (replace(t, rows=t.rows[:_ROWS]) for t in document.tables if len(t.header) <= _COLUMNS)
    found = list(islice((q for table in tables for q in _of_table(table)), _MOST))
    return [_with_n(q, found) for q in found]


def figures_of(table: Table) -> list[list[PrintedNumber | None]]:
    """The numbers of a table, by row and column."""
    return [[parse_figure(cell) for cell in row.cells] for row in table.rows]


def _of_table(table: Table) -> Iterator[Quantity]:
    """The numbers of a table whose columns, or else whose rows, are metrics."""
    columns, rows = list(table.header[1:]), [row.cells[0] for row in table.rows]
    grid = [row[1:] for row in figures_of(table)]
    lines = [[row.line] * len(columns) for row in table.rows]
    cases = next((c for c, header in enumerate(columns) if counts_cases(header)), None)
    counts = [None if cases is None else row[cases] for row in grid]
    if not any(map(metric_of, columns)):  # rows are metrics: transpose
        columns, rows, counts = rows, columns, [None] * len(columns)
        grid, lines = ([list(line) for line in zip(*of, strict=True)] for of in (grid, lines))
    roles = [role_of(label) for label in rows]
    around = _stated_n(*table.headings[-1:], table.caption)
    for c, header in enumerate(columns):
        if (metric := metric_of(header)) is None:
            continue
        beside = [f for line in grid if (f := line[c]) is not None]
        fractions = all(f.value <= 1 and f.decimals and not f.percent for f in beside)
        for r, label in enumerate(rows):
            figure, count = grid[r][c], counts[r]
            # A difference may be more than 100 %, and below 0.
            if figure is None or _CHANGE.search(label) or counts_cases(label):
                continue
            own_n = figure.n or (int(count.value) if count and count.is_count else None)
            n = own_n or _stated_n(label, header) or around
            yield Quantity(
                metric,
                _words(header) if any(roles) else _words(header) | _words(label),
                figure,
                lines[r][c],
                table,
                roles[r],
                any(roles),
                n,
                lines[r][c] if own_n else table.line,
                1 if fractions and not figure.percent else 100,
            )


def _words(label: str) -> frozenset[str]:
    """The words of a label beside its metric, which distinguish it from similar ones."""
    for pattern in (_FIRST, _PASS, _YES_NO, _SHARE, _OWN):
        label = pattern.sub(" ", label)
    return frozenset(_WORD.findall(label.lower()))


def _with_n(quantity: Quantity, others: Sequence[Quantity]) -> Quantity:
    """Add a missing n: a table that compares models on one metric uses the cases of its own row,
    which may be stated where the own row's number is repeated, in a table of that model alone."""
    if quantity.n is not None or not quantity.compares or not quantity.name & _OVERALL:
        return quantity
    alike = [q for q in others if (q.metric, q.name) == (quantity.metric, quantity.name)]
    own = [q.figure.value for q in alike if q.table is quantity.table and q.role == "own"]
    told = {q.n: q.n_line for q in alike if not q.compares and q.n and q.figure.value in own}
    if len(own) != 1 or len(told) != 1:
        return quantity
    ((n, line),) = told.items()
    return replace(quantity, n=n, n_line=line)
