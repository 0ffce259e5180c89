"""Numbers of tables and of ``model-index`` that cannot be: totals, shares, ranges, pass@k.

In: tables and the quantities read from them, and the numbers of the front matter. Out: findings,
each about one line. A share of n cases is a whole number of n-ths, as printed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import comb, lcm

from refiner_core.cards.lint.form import IndexValue
from refiner_core.cards.lint.markdown import Document, Finding, Table
from refiner_core.cards.lint.quantities import (
    Figure,
    Metric,
    Quantity,
    agree,
    can_be_share,
    case_columns,
    figures_of,
    metric_of,
    names_change,
    nearest_shares,
    parse_figure,
    repeats_in,
    scale,
    total_kind,
    uneven_in,
    words,
)

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
    yield from _wrong_pass_at_k(known)


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
    """Total that the parts give instead; empty where the total is right, or nobody can tell."""
    values = [p.value for p in parts]
    slack = (whole.unit + max(p.unit for p in parts)) / 2
    added = sum(values, Fraction(0))
    room = whole.unit / 2 + sum((p.unit for p in parts), Fraction(0)) / 2
    counts = all(p.is_count for p in parts) and whole.is_count
    exact = is_cases or (counts and not _MEASURED.search(header))
    if abs(whole.value - added) <= (0 if exact else room):
        return ""
    if is_cases:
        return "" if kind == "mean" else f"the parts sum to {_shown(added, whole)}"
    mean = added / len(values)
    if abs(whole.value - mean) <= slack:
        return ""
    if weights and sum(weights):
        products = (v * w for v, w in zip(values, weights, strict=True))
        weighted = sum(products, Fraction(0)) / sum(weights)
        if abs(whole.value - weighted) <= slack:
            return ""
        if metric_of(header) is not None:
            return f"its parts, weighted by their numbers, give {_shown(weighted, whole)}"
        return ""
    if kind == "sum" and counts and not metric_of(header) and max(values) > 1:
        return f"the parts sum to {_shown(added, whole)}"
    return ""


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


def _wrong_pass_at_k(known: Sequence[Quantity]) -> Iterator[Finding]:
    """More tries pass at least as often, in every row, and all of more tries at most as often."""
    for every in (False, True):
        tries = {id(q): q.metric.every if every else q.metric.k for q in known}
        for group in _by_row([q for q in known if tries[id(q)] is not None]):
            ordered = sorted(group, key=lambda q: tries[id(q)] or 0)
            for less, more in pairwise(ordered):
                small, large = (more, less) if every else (less, more)
                if tries[id(less)] != tries[id(more)] and _falls(small.figure, large.figure):
                    cannot = "all of more tries cannot pass more" if every else (
                        "more tries cannot pass less"
                    )  # fmt: skip
                    yield Finding(
                        more.line,
                        "pass-at-k",
                        f"{small.metric.key} of {small.shown} is more than {large.metric.key} of "
                        f"{large.shown}: {cannot} often",
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


_FIX = (
    "say on how many cases, and with how many tries each, it was measured; or measure it again, as "
    "the others were"
)
_YES_NO = re.compile(r"(?i)pass\s?@|accura|success|solved|correct|exact match")
_OF_CASES = re.compile(
    r"(?<![\d.,])(?P<share>\d+(?:\.\d+)?\s?%)\W{0,4}"
    r"(?:\(?\s*[nN]\s*=\s*(?P<n>\d[\d,]*)\b(?!\.\d)"
    r"|of\s+(?:the\s+|all\s+)?(?P<cases>\d[\d,]*)\s+(?:[a-z-]+\s+){0,2}?"
    r"(?:tasks|questions|problems|prompts|examples|rows|cases|instances|items)\b)"
)


def impossible_shares(
    document: Document, known: Sequence[Quantity]
) -> Iterator[tuple[Finding, Quantity | None]]:
    """Findings, each with the number of a table that it is about."""
    repeats, uneven = repeats_in(document.text), uneven_in(document.text)
    highest = max((q.metric.drawn or 1 for q in known), default=1)
    for q in known:
        if q.n is None or not q.metric.yes_no or q.figure.hedged or not 0 < q.n <= 10**7:
            continue
        whole = scale(q.figure, fractions=q.fractions)
        if not 0 <= q.figure.value <= whole:
            continue
        stated = _denominators(q.metric, q.n, repeats)
        if stated is not None and uneven is not None:
            stated.append(q.n * _common(q.metric.drawn or 1, uneven))
        if can_be_share(q.figure, stated or _usual(q.metric, q.n, highest), whole):
            continue
        surely = stated is not None
        yield (
            Finding(
                q.line,
                "percentage-impossible",
                _message(q, whole, surely),
                _FIX,
                "error" if surely else "warning",
            ),
            q,
        )
    yield from ((finding, None) for finding in _in_prose(document, repeats))


def _denominators(metric: Metric, n: int, repeats: frozenset[int]) -> list[int] | None:
    """All that a share of ``n`` cases can be a fraction of; None where the card does not say how
    often each case was tried and that is usual for the metric."""
    k = metric.drawn
    if metric.once:
        return [n]
    if k is not None and not repeats:
        return None
    if k in (None, 1):
        return [n, *(n * r for r in repeats)]
    return [n, *(n * comb(r, k) for r in repeats if r > k)]


def _common(k: int, most: int) -> int:
    """Common denominator of all shares of cases with 1 to ``most`` tries, ``k`` of them drawn."""
    return lcm(*(comb(tries, k) for tries in range(k, most + 1)))


def _usual(metric: Metric, n: int, highest: int) -> list[int]:
    """As nobody says how often each case was tried: pass@k of k tries, and pass@1 of the same;
    pass^k of as many as the largest k."""
    if metric.every is not None:
        return [n, n * comb(highest, metric.every)]
    return [n, n * highest] if metric.k == 1 else [n]


def _message(q: Quantity, whole: int, surely: bool) -> str:
    assert q.n is not None
    where = f" (line {q.n_line})" if q.n_line and q.n_line != q.line else ""
    text = f"{q.shown} is no share of n = {q.n}{where}: {nearest_shares(q.figure, q.n, whole)}"
    return text if surely else text + "; it does not say how often each was tried"


def _in_prose(document: Document, repeats: frozenset[int]) -> Iterator[Finding]:
    for paragraph in document.paragraphs:
        for found in _OF_CASES.finditer(paragraph.without_code):
            figure = parse_figure(found["share"])
            n = int((found["n"] or found["cases"]).replace(",", ""))
            if figure is None or not 0 < n <= 10**7 or figure.value > 100:
                continue
            if found["n"] and not _counts(paragraph.text):
                continue
            if not can_be_share(figure, [n, *(n * r for r in repeats)], 100):
                yield Finding(
                    paragraph.line_of(found.start()),
                    "percentage-impossible",
                    f"{figure.text} is no share of n = {n}: {nearest_shares(figure, n, 100)}",
                    _FIX,
                )


@lru_cache(maxsize=1)
def _counts(text: str) -> bool:
    """True if a paragraph is about something that each case has or has not."""
    return _YES_NO.search(text) is not None


def index_findings(index: Sequence[IndexValue], known: Sequence[Quantity]) -> Iterator[Finding]:
    """All findings about ``model-index``."""
    for entry in index:
        figure, metric = parse_figure(entry.text), _index_metric(entry)
        if figure is None:
            continue
        there = _same(entry, metric, known) if metric else []
        if there and not any(agree(figure, q.figure) for q in there):
            what = f"{entry.name or entry.type} is {entry.text} here"
            message = f"{what} and {there[0].shown} in line {there[0].line}"
            yield Finding(entry.line, "model-index", message, "correct one of them")


def _index_metric(entry: IndexValue) -> Metric | None:
    return metric_of(entry.type.replace("_", " ")) or metric_of(entry.name)


def _same(entry: IndexValue, metric: Metric, known: Sequence[Quantity]) -> list[Quantity]:
    """The numbers of the tables that an entry is to be: of its metric, its own model, and of the
    words in parentheses or of its data set."""
    there = [q for q in known if q.metric.key == metric.key and q.role != "base"]
    there = [q for q in there if not q.compares or q.role == "own"]
    said = words(" ".join(re.findall(r"\(([^)]*)\)", entry.name)))
    exact = [q for q in there if said and q.name and q.name <= said]
    if exact:
        return exact
    dataset = words(re.sub(r"\([^)]*\)", "", entry.dataset))
    of_set = [
        q for q in there if dataset and dataset <= words(f"{q.label} {' '.join(q.table.headings)}")
    ]
    return [q for q in of_set if not said and not (q.name - dataset)]
