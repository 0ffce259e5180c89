"""The numbers of a card's tables, each with what it measures, of which model, on how many cases.

In: a :class:`Document`. Out: one :class:`Quantity` per number whose metric is known. Rows may be
models and columns metrics, or the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from refiner_core.cards.lint.figures import Figure, agree, parse_figure, stated_n
from refiner_core.cards.lint.markdown import Document, Table
from refiner_core.cards.lint.names import (
    Metric,
    Role,
    counts_cases,
    metric_of,
    role_of,
    without_metric,
    words,
)

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

    metric: Metric
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
    every = (q for table in tables for q in _of_table(table, document.title))
    found = list(islice(every, _MOST))
    return [_with_n(q, found) for q in found]


def figures_of(table: Table) -> list[list[Figure | None]]:
    """The numbers of a table, by row and column."""
    return [[parse_figure(cell.text) for cell in row.cells] for row in table.rows]


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


def own_and_base(labels: Sequence[str], bold: Sequence[bool], title: str) -> list[Role]:
    """Which of several labels is the card's own model, which the one before it."""
    roles = [role_of(label) for label in labels]
    if "base" in roles and "own" not in roles:
        named = [i for i, label in enumerate(labels) if title and label.lower() == title.lower()]
        stands_out = [i for i, is_bold in enumerate(bold) if is_bold]
        for chosen in (named, stands_out):
            if len(chosen) == 1 and not roles[chosen[0]]:
                roles[chosen[0]] = "own"
                break
    return roles


def _of_table(table: Table, title: str) -> list[Quantity]:
    by_column = [metric_of(header) for header in table.header]
    if any(by_column[1:]):
        return _metrics_in_columns(table, by_column, title)
    if len(table.header) > 1 and any(
        row.cells and metric_of(row.cells[0].text) for row in table.rows
    ):
        return _metrics_in_rows(table, title)
    return []


def _metrics_in_columns(table: Table, metrics: list[Metric | None], title: str) -> list[Quantity]:
    figures, cases = figures_of(table), case_columns(table)
    labels = [row.cells[0].text if row.cells else "" for row in table.rows]
    bold = [any(cell.bold for cell in row.cells) for row in table.rows]
    roles = own_and_base(labels, bold, title)
    compares = any(roles)
    found = []
    for r, row in enumerate(table.rows):
        for c, metric in enumerate(metrics):
            figure = figures[r][c] if c else None
            if metric is None or figure is None:
                continue
            name = without_metric(table.header[c])
            n = next((_count(figures[r][i]) for i in cases if figures[r][i]), None)
            in_words = (
                figure.n or stated_n(labels[r]) or stated_n(table.header[c]) or _around(table)
            )
            found.append(
                Quantity(
                    metric,
                    name if compares else name | words(labels[r]),
                    labels[r],
                    figure,
                    row.line,
                    table,
                    roles[r],
                    compares,
                    n or in_words or _around(table),
                    row.line if n or figure.n or stated_n(labels[r]) else table.line,
                    _are_fractions([line[c] for line in figures]),
                )
            )
    return found


def _metrics_in_rows(table: Table, title: str) -> list[Quantity]:
    figures = figures_of(table)
    columns = list(table.header[1:])
    roles = own_and_base(columns, [False] * len(columns), title)
    compares = any(roles)
    found = []
    for r, row in enumerate(table.rows):
        metric = metric_of(row.cells[0].text)
        if metric is None:
            continue
        name = without_metric(row.cells[0].text)
        for c, column in enumerate(columns, start=1):
            figure = figures[r][c]
            if figure is None or counts_cases(column):
                continue
            n = figure.n or stated_n(row.cells[0].text) or stated_n(column) or _around(table)
            found.append(
                Quantity(
                    metric,
                    name if compares else name | words(column),
                    column,
                    figure,
                    row.line,
                    table,
                    roles[c - 1],
                    compares,
                    n,
                    row.line if figure.n else table.line,
                    _are_fractions(figures[r][1:]),
                )
            )
    return found


def _count(figure: Figure | None) -> int | None:
    return None if figure is None else int(figure.value)


def _around(table: Table) -> int | None:
    """n as the nearest heading or the paragraph before the table says it."""
    return stated_n(table.headings[-1] if table.headings else "") or stated_n(table.caption)


def _are_fractions(figures: Sequence[Figure | None]) -> bool:
    """Whether shares are printed as fractions of 1."""
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
