"""Numbers of a card's tables, each with what it measures, of which model, on how many cases.

In: a :class:`Document`. Out: one :class:`Quantity` per number whose metric is known. Rows may be
models and columns metrics, or the other way round. A printed number (:class:`Figure`) stands for
all values that round to it. Labels say what is meant only where that is beyond doubt
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
#: Numbers of agents beside pass@k: the first attempt alone, and all of k attempts.
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
#: Words of a name that set nothing apart.
_OVERALL = frozenset({"overall", "total", "all", "average", "avg", "mean"})
#: Numbers, and rows and columns of their tables, that are held against each other: a card with
#: more is for no reader.
_MOST, _ROWS, _COLUMNS = 2000, 300, 60

Role = Literal["own", "base", ""]


@dataclass(frozen=True)
class Figure:
    """One printed number.

    Attributes
    ----------
    text
        As it was printed.
    value, decimals
        The number, and how many digits stand after the point.
    percent
        A % stood behind it.
    hedged
        It is said to be about, below or above that.
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
        """Worth of one step of its last digit."""
        return Fraction(10) ** -self.decimals

    @property
    def is_count(self) -> bool:
        """A whole number without a unit."""
        return self.decimals == 0 and not self.percent and not self.hedged and self.value >= 0


def parse_figure(text: str) -> Figure | None:
    """The number that a cell consists of, or None where it is anything else."""
    found = _FIGURE.fullmatch(text.strip())
    if found is None or not any(c.isdigit() for c in found["value"]):
        return None
    plain = found["value"].replace(",", "").replace("−", "-")
    return Figure(
        text=text.strip(),
        value=Fraction(plain),
        decimals=len(plain.partition(".")[2]),
        percent=bool(found["unit"]),
        hedged=bool(found["hedge"]),
        n=whole_number(found["n"]) if found["n"] else None,
    )


def whole_number(text: str) -> int:
    """A count as it is printed: ``1,319``."""
    return int(text.replace(",", ""))


def _stated_n(*texts: str) -> int | None:
    """The n in the first of some texts such as ``GSM8K (n = 1,319)`` that has one, and only one."""
    found = ({whole_number(n) for n in _N.findall(text)} for text in texts)
    return next((n for ns in found if len(ns) == 1 for n in ns), None)


class Metric(NamedTuple):
    """Measure behind a number. ``drawn`` is k of pass@k and pass^k; ``yes_no`` says that each case
    counts as 0 or 1, ``once`` that it was tried once."""

    key: str
    drawn: int = 1
    yes_no: bool = True
    once: bool = False


def metric_of(label: str) -> Metric | None:
    """The metric that a label names; None where it names none that is known, or a difference."""
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
    """Keys of all metrics that a sentence names."""
    patterns = (_FIRST, _PASS, _YES_NO, _SHARE)
    found = (metric_of(m.group()) for p in patterns for m in p.finditer(text))
    return frozenset(m.key for m in found if m is not None)


def role_of(label: str) -> Role:
    """The model of a label: the card's own, the one that it is compared with, or any other."""
    return "own" if _OWN.search(label) else "base" if _BASE.search(label) else ""


def counts_cases(header: str) -> bool:
    """True if a column says how many cases its rows have."""
    return _CASES.fullmatch(header.strip()) is not None


@dataclass(frozen=True)
class Quantity:
    """One number of a table.

    Attributes
    ----------
    metric
        What it measures.
    name
        The other words of its labels, such as ``{overall}``; models are no part of it.
    role
        Whose it is, where the table compares models.
    compares
        Whether its table compares models.
    n, n_line
        Number of cases and the line that says so; None where nobody does.
    whole
        What all cases together are: 100 for percentages, 1 where fractions are printed.
    """

    metric: Metric
    name: frozenset[str]
    figure: Figure
    line: int
    table: Table
    role: Role = ""
    compares: bool = False
    n: int | None = None
    n_line: int = 0
    whole: int = 100


def quantities(document: Document) -> list[Quantity]:
    """All numbers of all tables whose metric is known, with n carried over between tables."""
    tables = (replace(t, rows=t.rows[:_ROWS]) for t in document.tables if len(t.header) <= _COLUMNS)
    found = list(islice((q for table in tables for q in _of_table(table)), _MOST))
    return [_with_n(q, found) for q in found]


def figures_of(table: Table) -> list[list[Figure | None]]:
    """The numbers of a table, by row and column."""
    return [[parse_figure(cell) for cell in row.cells] for row in table.rows]


def _of_table(table: Table) -> Iterator[Quantity]:
    """The numbers of a table whose columns, or else whose rows, are metrics."""
    columns, rows = list(table.header[1:]), [row.cells[0] for row in table.rows]
    grid = [row[1:] for row in figures_of(table)]
    lines = [[row.line] * len(columns) for row in table.rows]
    cases = next((c for c, header in enumerate(columns) if counts_cases(header)), None)
    counts = [None if cases is None else row[cases] for row in grid]
    if not any(map(metric_of, columns)):  # rows are metrics: the same the other way round
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
    """The words of a label beside its metric: what sets it apart from others of its kind."""
    for pattern in (_FIRST, _PASS, _YES_NO, _SHARE, _OWN):
        label = pattern.sub(" ", label)
    return frozenset(_WORD.findall(label.lower()))


def _with_n(quantity: Quantity, others: Sequence[Quantity]) -> Quantity:
    """A table that compares models on one metric measures them on the cases of its own row; those
    may be told where the own row's number stands once more, in a table about the model alone."""
    if quantity.n is not None or not quantity.compares or not quantity.name & _OVERALL:
        return quantity
    alike = [q for q in others if (q.metric, q.name) == (quantity.metric, quantity.name)]
    own = [q.figure.value for q in alike if q.table is quantity.table and q.role == "own"]
    told = {q.n: q.n_line for q in alike if not q.compares and q.n and q.figure.value in own}
    if len(own) != 1 or len(told) != 1:
        return quantity
    ((n, line),) = told.items()
    return replace(quantity, n=n, n_line=line)
