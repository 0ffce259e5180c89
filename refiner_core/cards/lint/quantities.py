"""The numbers of a card's tables, each with what it measures, of which model, on how many cases.

In: a :class:`Document`. Out: one :class:`Quantity` per number whose metric is known. Rows may be
models and columns metrics, or the other way round.
A printed number (:class:`Figure`) stands for all values that round to it; whether two agree, and
whether one can be a share of n, follows from that alone. Labels say what is meant only where that
is beyond doubt (:func:`metric_of`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from typing import Literal, NamedTuple

from refiner_core.cards.lint.markdown import Document, Table

_NUMBER = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?"
_FIGURE = re.compile(
    rf"(?P<hedge>[~≈<>≤≥]\s*)?(?P<value>{_NUMBER})\s*(?P<unit>%)?"
    rf"(?:\s*(?:±|\+/-)\s*{_NUMBER}\s*%?)?"
    rf"(?:\s*[\[(]{_NUMBER}\s*%?\s*(?:,|;|–|—|-|to|\.\.)\s*{_NUMBER}\s*%?[\])])?"
    r"(?:\s*,?\s*\(?[nN]\s*=\s*(?P<n>\d[\d,]*)\)?)?"
)
_N = re.compile(r"(?<![A-Za-z])[nN]\s*=\s*(\d[\d,]*)(?![\d.])")


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
    if found is None:
        return None
    number = parse_number(found["value"])
    if number is None:
        return None
    return Figure(
        text=text.strip(),
        value=number[0],
        decimals=number[1],
        percent=bool(found["unit"]),
        hedged=bool(found["hedge"]),
        n=int(found["n"].replace(",", "")) if found["n"] else None,
    )


def parse_number(text: str) -> tuple[Fraction, int] | None:
    """Value and number of decimals of a printed number, exactly."""
    plain = text.strip().replace(",", "").replace("−", "-")
    if not any(c.isdigit() for c in plain):
        return None
    mantissa, _, exponent = plain.lower().partition("e")
    if abs(int(exponent or 0)) > 300:
        return None
    decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return Fraction(plain), decimals


def stated_n(text: str) -> int | None:
    """The n in a heading, header or label such as ``GSM8K (n = 1,319)``; None where there is none
    or more than one."""
    found = {int(n.replace(",", "")) for n in _N.findall(text)}
    return found.pop() if len(found) == 1 else None


def agree(a: Figure, b: Figure) -> bool:
    """True if two printed numbers can be one value; 0.59 and 59 % can."""
    slack = (a.unit + b.unit) / 2
    if abs(a.value - b.value) <= slack:
        return True
    for one, other in ((a, b), (b, a)):
        if abs(one.value) <= 1 < abs(other.value):
            return abs(one.value * 100 - other.value) <= (one.unit * 100 + other.unit) / 2
    return False


def scale(figure: Figure, *, fractions: bool) -> int:
    """One whole in a share: 100 for percentages, 1 where ``fractions`` are printed."""
    return 1 if fractions and not figure.percent else 100


def can_be_share(figure: Figure, denominators: Iterable[int], whole: int) -> bool:
    """True if some k of one of ``denominators`` prints as the figure, rounded or cut off."""
    low = figure.value - figure.unit / 2
    high = figure.value + figure.unit
    for denominator in denominators:
        k = math.ceil(low * denominator / whole)
        if Fraction(k * whole, denominator) < high or k * whole == low * denominator:
            return True
    return False


def nearest_shares(figure: Figure, n: int, whole: int) -> str:
    """``14 of 100 are 14.0 %, 15 are 15.0 %``, for messages."""
    k = math.floor(figure.value * n / whole)
    sign = " %" if whole == 100 else ""
    below, above = (
        f"{float(Fraction(i * whole, n)):.{max(figure.decimals, 1)}f}" for i in (k, k + 1)
    )
    return f"{k} of {n} are {below}{sign}, {k + 1} are {above}{sign}"


#: Nobody tries a case more often; binomials of larger numbers fill a machine.
_MOST_TRIES = 10_000
#: Different numbers of tries that a card may tell of.
_MOST_REPEATS = 20
#: Numbers of agents beside pass@k: the first attempt alone, and all of k attempts.
_FIRST = re.compile(r"\bpass\s?@\s?1[_ ]first\b", re.IGNORECASE)
_PASS = re.compile(r"\bpass\s?([@^])\s?(\d+)(?![\w.])", re.IGNORECASE)
#: Each case counts as 0 or 1, so that a mean of n is a whole number of n-ths.
_YES_NO = re.compile(
    r"\b(?:accuracy|acc|success rate|exact match|solve rate|resolve rate|resolved)\b",
    re.IGNORECASE,
)
#: A share of a whole, but not of cases.
_SHARE = re.compile(
    r"\b(?:f1|precision|recall|win rate|error rate|pass rate|percentage|proportion|share)\b",
    re.IGNORECASE,
)
_CHANGE = re.compile(
    r"Δ|\bdelta\b|\bgain|improve|\bdiff|change|speed|increase|\brelative\b|\bvs\b|[↑↓]\s*\d|overhead",
    re.IGNORECASE,
)
_CASES = re.compile(
    r"(?:#|no\.? of|num(?:ber)?(?: of)?|n|total)?\s*"
    r"(?:tasks?|questions?|problems?|prompts?|instances|cases|n|items)",
    re.IGNORECASE,
)
_SUM = re.compile(r"(?:grand )?total|sum", re.IGNORECASE)
_WHOLE = re.compile(r"(?:overall|total|all|combined|micro[- ]?(?:avg|average))", re.IGNORECASE)
_MEAN = re.compile(r"(?:macro[- ]?)?(?:average|avg\.?|mean)", re.IGNORECASE)
_OWN = re.compile(r"\bthis (?:model|work|checkpoint)\b|\bours?\b|\bour model\b", re.IGNORECASE)
_BASE = re.compile(
    r"\bbase(?:line)?\b|\bbefore (?:training|fine-?tuning)\b|\bvanilla\b|\bpre-?trained\b",
    re.IGNORECASE,
)
_REPEATS = re.compile(
    r"\b(?:num|n)_?samples\b`?\s*[=:]\s*`?(\d+)"
    r"|\b(?:avg|mean|average)\s?@\s?(\d+)"
    r"|\b(?:average[ds]?|mean)\s+(?:over|of|across)\s+(\d+)\s+"
    r"(?:independent |random |different )?"
    r"(?:runs|seeds|trials|samples|generations|attempts|rollouts)"
    r"|\b(\d+)\s+(?:samples|attempts|trials|rollouts|runs|generations|completions|responses)\s+"
    r"(?:per|for each|for every)\s+(?:task|prompt|question|problem|query)"
    r"|\b(\d+)\s+(?:runs|seeds|trials)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[a-z0-9+^@]+")

Role = Literal["own", "base", ""]


#: Attempts were lost, so that tasks have different numbers of them.
_UNEVEN = re.compile(r"fewer than (\d+) valid attempts", re.IGNORECASE)


class _Metric(NamedTuple):
    """Measure behind a number. ``drawn`` is k of pass@k and pass^k; ``yes_no`` says that each case
    counts as 0 or 1, ``once`` that it was tried once."""

    key: str
    drawn: int | None = None
    yes_no: bool = False
    once: bool = False


def metric_of(label: str) -> _Metric | None:
    """The metric that a label names; None where it names none that is known, or a difference."""
    if _CHANGE.search(label):
        return None
    if _FIRST.search(label):
        return _Metric("pass@1_first", yes_no=True, once=True)
    if found := _PASS.search(label):
        k = min(int(found[2]), _MOST_TRIES)
        return _Metric(f"pass{found[1]}{k}", k, yes_no=True)
    if yes_no := _YES_NO.search(label):
        key = yes_no.group().lower()
        return _Metric("accuracy" if key == "acc" else key, yes_no=True)
    if share := _SHARE.search(label):
        return _Metric(share.group().lower())
    return None


def metrics_in(text: str) -> frozenset[str]:
    """Keys of all metrics that a sentence names."""
    patterns = (_FIRST, _PASS, _YES_NO, _SHARE)
    found = [m.group() for p in patterns for m in p.finditer(text)]
    return frozenset(m.key for m in map(metric_of, found) if m is not None)


def without_metric(label: str) -> frozenset[str]:
    """The words of a label beside its metric: what sets it apart from others of its kind."""
    for pattern in (_FIRST, _PASS, _YES_NO, _SHARE, _OWN):
        label = pattern.sub(" ", label)
    return words(label)


def words(text: str) -> frozenset[str]:
    """Lower-case words."""
    return frozenset(_WORD.findall(text.lower()))


def counts_cases(header: str) -> bool:
    """True if a column says how many cases its rows have."""
    return _CASES.fullmatch(header.strip()) is not None


def total_kind(label: str) -> Literal["sum", "whole", "mean", ""]:
    """Role of a row beside the others, by its label."""
    text = label.strip().strip(":").strip()
    if _SUM.fullmatch(text):
        return "sum"
    if _WHOLE.fullmatch(text):
        return "whole"
    return "mean" if _MEAN.fullmatch(text) else ""


def role_of(label: str) -> Role:
    """True if a label is that of the card's own model, or of the one that it is compared with."""
    if _OWN.search(label):
        return "own"
    return "base" if _BASE.search(label) else ""


def uneven_in(text: str) -> int | None:
    """The largest number of attempts at a case, where a text says that some have fewer."""
    found = [int(m[1]) for m in _UNEVEN.finditer(text) if len(m[1]) < 6]
    return max(found) if found and max(found) <= 64 else None


def repeats_in(text: str) -> frozenset[int]:
    """Numbers of tries of each case, as far as a text says so."""
    found = (next(filter(None, m.groups())) for m in _REPEATS.finditer(text))
    known = {int(n) for n in found if len(n) < 6 and 1 < int(n) <= _MOST_TRIES}
    return frozenset(sorted(known)[:_MOST_REPEATS])


#: Numbers, and rows and columns of their tables, that are held against each other: a card with
#: more is for no reader.
_MOST, _ROWS, _COLUMNS = 2000, 300, 60
#: Words of a name that set nothing apart.
OVERALL = frozenset({"overall", "total", "all", "average", "avg", "mean"})


@dataclass(frozen=True)
class Quantity:
    """One number of a table.

    Attributes
    ----------
    metric
        What it measures.
    name
        The other words of its labels, such as ``{overall}``; models are no part of it.
    label
        Its row (or column, where rows are metrics), as printed.
    role
        Whose it is, where the table compares models.
    compares
        Whether its table compares models.
    n, n_line
        Number of cases and the line that says so; None where nobody does.
    """

    metric: _Metric
    name: frozenset[str]
    label: str
    figure: Figure
    line: int
    table: Table
    role: Role = ""
    compares: bool = False
    n: int | None = None
    n_line: int = 0
    fractions: bool = field(default=False, compare=False)

    @property
    def shown(self) -> str:
        """Its text, for messages."""
        return self.figure.text


def quantities(document: Document) -> list[Quantity]:
    """All numbers of all tables whose metric is known, with n carried over between tables."""
    tables = (replace(t, rows=t.rows[:_ROWS]) for t in document.tables if len(t.header) <= _COLUMNS)
    every = (q for table in tables for q in _of_table(table))
    found = list(islice(every, _MOST))
    return [_with_n(q, found) for q in found]


def figures_of(table: Table) -> list[list[Figure | None]]:
    """The numbers of a table, by row and column."""
    return [[parse_figure(cell) for cell in row.cells] for row in table.rows]


def case_columns(table: Table) -> list[int]:
    """Columns that say how many cases each row has."""
    figures = figures_of(table)
    return [
        c
        for c, header in enumerate(table.header)
        if c > 0
        and counts_cases(header)
        and any(row[c] for row in figures)
        and all(row[c] is None or row[c].is_count for row in figures)  # type: ignore[union-attr]
    ]


def _of_table(table: Table) -> Iterator[Quantity]:
    """The numbers of a table whose columns, or else whose rows, are metrics: each belongs to the
    row, or the column, that is no metric."""
    figures, cases = figures_of(table), case_columns(table)
    rows = [row.cells[0] if row.cells else "" for row in table.rows]
    of_columns = [None, *(metric_of(header) for header in table.header[1:])]
    in_columns = any(of_columns)
    of_rows = [None if in_columns else metric_of(label) for label in rows]
    roles = [role_of(label) for label in (rows if in_columns else table.header)]
    for r, row in enumerate(table.rows):
        for c, header in enumerate(table.header):
            metric, figure = of_columns[c] if in_columns else of_rows[r], figures[r][c]
            if c == 0 or metric is None or figure is None:
                continue
            if not in_columns and counts_cases(header):
                continue
            called, label = (header, rows[r]) if in_columns else (rows[r], header)
            if _CHANGE.search(label):  # it may be more than 100 %, and below 0
                continue
            name, stated = without_metric(called), figure.n or stated_n(rows[r])
            counted = None
            if in_columns:
                counted = next((int(f.value) for i in cases if (f := figures[r][i])), None)
                beside = [line[c] for line in figures]
            else:
                beside = figures[r][1:]
            yield Quantity(
                metric,
                name if any(roles) else name | words(label),
                label,
                figure,
                row.line,
                table,
                roles[r if in_columns else c],
                any(roles),
                counted or stated or stated_n(header) or _around(table),
                row.line if counted or figure.n or (in_columns and stated) else table.line,
                _are_fractions(beside),
            )


def _around(table: Table) -> int | None:
    """n as the nearest heading or the paragraph before the table says it."""
    return stated_n(table.headings[-1] if table.headings else "") or stated_n(table.caption)


def _are_fractions(figures: Sequence[Figure | None]) -> bool:
    """True if shares are printed as fractions of 1."""
    known = [f for f in figures if f is not None]
    return bool(known) and all(f.value <= 1 and f.decimals and not f.percent for f in known)


# ---------------------------------------------------------------- one quantity in two tables


def same_elsewhere(quantity: Quantity, others: Sequence[Quantity]) -> list[Quantity]:
    """The same quantity of the same model in other tables of the same section.

    A table that compares models has its own row; one that does not is about the own model.
    """
    if quantity.compares and quantity.role != "own":
        return []
    return [
        other
        for other in others
        if other.table is not quantity.table
        and other.metric.key == quantity.metric.key
        and other.compares != quantity.compares
        and (not other.compares or other.role == "own")
        and other.name == quantity.name
        and other.name & OVERALL
        and _section(other.table) == _section(quantity.table)
    ]


def _section(table: Table) -> tuple[str, ...]:
    return table.headings[:2]


def _with_n(quantity: Quantity, others: Sequence[Quantity]) -> Quantity:
    """A table that compares models on one metric measures them on the cases of its own row; those
    may be told where the own row's number stands once more."""
    if quantity.n is not None or not quantity.compares:
        return quantity
    own = [
        q
        for q in others
        if q.table is quantity.table
        and q.metric.key == quantity.metric.key
        and q.name == quantity.name
        and q.role == "own"
    ]
    told = {
        (q.n, q.n_line)
        for mine in own
        for q in same_elsewhere(mine, others)
        if q.n is not None and agree(q.figure, mine.figure)
    }
    if len(own) != 1 or len({n for n, _ in told}) != 1:
        return quantity
    n, line = min(told, key=lambda pair: pair[1])
    return replace(quantity, n=n, n_line=line)
