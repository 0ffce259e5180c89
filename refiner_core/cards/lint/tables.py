"""What is wrong inside a table: totals, ranges, intervals, pass@k.

In: tables and the quantities read from them. Out: findings, each about one line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from refiner_core.cards.lint.figures import Figure
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.markdown import Document, Table
from refiner_core.cards.lint.names import metric_of, names_change, total_kind, words
from refiner_core.cards.lint.quantities import Quantity, case_columns, figures_of

_INTERVAL_WORDS = re.compile(r"(?i)\bCI\b|interval|confidence|credible")
#: Whole numbers that were rounded, unlike counts.
_MEASURED = re.compile(r"(?i)[(\[]|hour|min|sec|time|size|byte|[kmgt]i?b\b|cost|param|token|score")
_SHARES = re.compile(r"(?i)^(?:share|percentage|percent|proportion|fraction|%|% of total)$")


def table_findings(document: Document, known: Sequence[Quantity]) -> Iterator[Finding]:
    """All findings that one table is enough for."""
    intervals = bool(_INTERVAL_WORDS.search(document.text))
    for table in document.tables:
        yield from totals(table)
        yield from shares_of_a_whole(table)
        for row, figures in zip(table.rows, figures_of(table), strict=True):
            for figure in figures:
                if figure is not None:
                    yield from bad_interval(figure, row.line, intervals)
    yield from out_of_range(known)
    yield from falling_pass_at_k(known)
    yield from rising_pass_hat_k(known)


# ---------------------------------------------------------------- totals


def totals(table: Table) -> Iterator[Finding]:
    """Rows that sum up others, column by column."""
    labels = [row.cells[0].text if row.cells else "" for row in table.rows]
    kinds = [total_kind(label) for label in labels]
    summed = [r for r, kind in enumerate(kinds) if kind]
    parts = [r for r, kind in enumerate(kinds) if not kind]
    if len(summed) != 1 or len(parts) < 2:
        return
    figures, (total,) = figures_of(table), summed
    cases = case_columns(table)
    for c in range(1, len(table.header)):
        whole = figures[total][c]
        inside = [figures[r][c] for r in parts]
        present = [f for f in inside if f is not None]
        if whole is None or whole.hedged or len(present) != len(parts):
            continue
        n = next((i for i in cases if all(figures[r][i] for r in [total, *parts])), None)
        weights = None if n is None else [figures[r][n].value for r in parts]  # type: ignore[union-attr]
        wrong = _wrong_total(
            kinds[total], table.header[c], whole, present, weights, is_cases=c in cases
        )
        if wrong:
            yield Finding(
                table.rows[total].line,
                "total",
                f"{labels[total]} of {table.header[c] or 'its column'} is {whole.text}, but "
                f"{wrong}",
                "correct it, or the parts",
            )


def _wrong_total(
    kind: str,
    header: str,
    whole: Figure,
    parts: Sequence[Figure],
    weights: Sequence[Fraction] | None,
    *,
    is_cases: bool,
) -> str:
    """What the parts give instead; empty where the total is right, or nobody can tell."""
    values = [p.value for p in parts]
    slack = (whole.unit + max(p.unit for p in parts)) / 2
    added = sum(values, Fraction(0))
    room = whole.unit / 2 + sum((p.unit for p in parts), Fraction(0)) / 2
    counts = all(p.is_count for p in parts) and whole.is_count
    exact = is_cases or (counts and not _MEASURED.search(header))
    is_sum = abs(whole.value - added) <= (0 if exact else room)
    if is_sum:
        return ""
    if is_cases:
        return "" if kind == "mean" else f"the parts sum to {_shown(added, whole)}"
    mean = added / len(values)
    if abs(whole.value - mean) <= slack:
        return ""
    weighted = _weighted(values, weights)
    if weighted is not None:
        if abs(whole.value - weighted) <= slack:
            return ""
        if metric_of(header) is not None:
            return f"its parts, weighted by their numbers, give {_shown(weighted, whole)}"
        return ""
    if kind == "sum" and counts and not metric_of(header) and max(values) > 1:
        return f"the parts sum to {_shown(added, whole)}"
    return ""


def _weighted(values: Sequence[Fraction], weights: Sequence[Fraction] | None) -> Fraction | None:
    if not weights or not sum(weights):
        return None
    return sum((v * w for v, w in zip(values, weights, strict=True)), Fraction(0)) / sum(weights)


def _shown(value: Fraction, like: Figure) -> str:
    return f"{float(value):.{max(like.decimals, 0)}f}" + (" %" if like.percent else "")


def shares_of_a_whole(table: Table) -> Iterator[Finding]:
    """A column of shares sums to 100 %."""
    figures = figures_of(table)
    for c, header in enumerate(table.header):
        column = [row[c] for row in figures]
        known = [f for f in column if f is not None and f.percent and not f.hedged]
        if c == 0 or not _SHARES.match(header.strip()) or len(known) != len(column) < 100:
            continue
        rows = [row for row in table.rows if not total_kind(row.cells[0].text)]
        inside = [f for f, r in zip(known, table.rows, strict=True) if r in rows]
        added = sum((f.value for f in inside), Fraction(0))
        room = sum((f.unit for f in inside), Fraction(0)) / 2
        if len(inside) > 2 and 80 < added < 120 and abs(added - 100) > room:
            yield Finding(
                table.line,
                "parts",
                f"the parts of {header} sum to {float(added):g} %, not to 100 %",
                "correct them, or say what is missing or counted twice",
            )


# ---------------------------------------------------------------- ranges


def bad_interval(figure: Figure, line: int, intervals: bool) -> Iterator[Finding]:
    """An interval holds its value; what looks like one is one only if the card has intervals."""
    if figure.low is None or figure.high is None:
        return
    whole = figure.low.denominator == figure.high.denominator == 1
    if whole and not intervals:
        return  # [12, 13] may be references
    if figure.low > figure.high:
        yield Finding(line, "interval", f"{figure.text}: its interval ends before it begins")
    elif not figure.low - figure.unit / 2 <= figure.value <= figure.high + figure.unit / 2:
        yield Finding(
            line, "interval", f"{figure.text}: the value does not lie in its own interval"
        )


def out_of_range(known: Sequence[Quantity]) -> Iterator[Finding]:
    """Shares lie between 0 and 100 %."""
    for q in known:
        header = " ".join([*q.table.header, q.label])
        if not q.metric.share or names_change(header):
            continue
        too_much = q.figure.value > 100 and (q.figure.percent or q.metric.yes_no)
        if too_much or q.figure.value < 0:
            yield Finding(
                q.line, "out-of-range", f"{q.metric.key} of {q.shown} is no share of anything"
            )


def falling_pass_at_k(known: Sequence[Quantity]) -> Iterator[Finding]:
    """More tries pass at least as often, in every row."""
    for group in _by_row([q for q in known if q.metric.k is not None]):
        for less, more in pairwise(sorted(group, key=lambda q: q.metric.k or 0)):
            if less.metric.k != more.metric.k and _falls(less.figure, more.figure):
                yield Finding(
                    more.line,
                    "pass-at-k",
                    f"{less.metric.key} of {less.shown} is more than {more.metric.key} of "
                    f"{more.shown}: more tries cannot pass less often",
                    "were they measured under one protocol? correct one of them",
                )


def rising_pass_hat_k(known: Sequence[Quantity]) -> Iterator[Finding]:
    """All of more tries pass at most as often."""
    for group in _by_row([q for q in known if q.metric.every is not None]):
        for less, more in pairwise(sorted(group, key=lambda q: q.metric.every or 0)):
            if less.metric.every != more.metric.every and _falls(more.figure, less.figure):
                yield Finding(
                    more.line,
                    "pass-at-k",
                    f"{more.metric.key} of {more.shown} is more than {less.metric.key} of "
                    f"{less.shown}: all of more tries cannot pass more often",
                    "were they measured under one protocol? correct one of them",
                )


def _by_row(known: Sequence[Quantity]) -> Iterable[list[Quantity]]:
    """Numbers of one model that differ in k alone, and count the same cases."""
    groups: dict[object, list[Quantity]] = defaultdict(list)
    for q in known:
        by_column = any(metric_of(h) for h in q.table.header[1:])
        name = q.name - words(q.label) if by_column else q.name
        groups[id(q.table), q.label, q.line if by_column else None, name, q.n].append(q)
    return groups.values()


def _falls(less: Figure, more: Figure) -> bool:
    same = less.percent == more.percent and not less.hedged and not more.hedged
    return same and less.value - less.unit / 2 > more.value + more.unit / 2
