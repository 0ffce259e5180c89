"""Numbers that cannot be: totals, shares of n cases, counts in sentences, improvements.

In: tables, prose and the quantities read from tables. Out: findings, each about one line. A share
of n cases is a whole number of n-ths, as printed. A claim is looked at where the tables have both
numbers: that of the card's own model and that of the one before it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import chain, islice
from math import comb, lcm
from typing import NamedTuple

from refiner_core.cards.lint.markdown import Document, Finding, Paragraph, Table
from refiner_core.cards.lint.quantities import (
    Figure,
    Quantity,
    can_be_share,
    case_columns,
    figures_of,
    metric_of,
    metrics_in,
    nearest_shares,
    parse_figure,
    parse_number,
    repeats_in,
    role_of,
    scale,
    total_kind,
    uneven_in,
)

#: Whole numbers that were rounded, unlike counts.
_MEASURED = re.compile(r"(?i)[(\[]|hour|min|sec|time|size|byte|[kmgt]i?b\b|cost|param|token|score")


def totals(table: Table) -> Iterator[Finding]:
    """Rows that sum up others, column by column."""
    labels = [row.cells[0] if row.cells else "" for row in table.rows]
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


# ---------------------------------------------------------------- shares of n

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
    for q in known:
        if q.n is None or not q.metric.yes_no or q.figure.hedged or not 0 < q.n <= 10**7:
            continue
        whole, stated = scale(q.figure, fractions=q.fractions), _denominators(q, repeats)
        if not stated or q.figure.value < 0:
            continue
        if uneven is not None:
            stated.append(q.n * _common(q.metric.drawn or 1, uneven))
        if q.figure.value > whole or not can_be_share(q.figure, stated, whole):
            where = f" (line {q.n_line})" if q.n_line and q.n_line != q.line else ""
            nearest = "more than all of them"
            if q.figure.value <= whole:
                nearest = nearest_shares(q.figure, q.n, whole)
            what = f"{q.shown} is no share of n = {q.n}{where}: {nearest}"
            yield Finding(q.line, "percentage-impossible", what, _FIX), q
    yield from ((finding, None) for finding in _in_prose(document, repeats))


def _denominators(q: Quantity, repeats: frozenset[int]) -> list[int]:
    """All that a share can be a fraction of; none where the card does not say how often each case
    was tried and that is usual for the metric."""
    n, k = q.n or 0, q.metric.drawn
    if q.metric.once:
        return [n]
    if k is not None and not repeats:
        return []
    if k in (None, 1):
        return [n, *(n * r for r in repeats)]
    return [n, *(n * comb(r, k) for r in repeats if r > k)]


def _common(k: int, most: int) -> int:
    """Common denominator of all shares of cases with 1 to ``most`` tries, ``k`` of them drawn."""
    return lcm(*(comb(tries, k) for tries in range(k, most + 1)))


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


# ---------------------------------------------------------------- claims and sentences

_BETTER = r"(?:improvement|better|higher|increase|gain|boost|more accurate)"
_FACTOR = re.compile(
    rf"(?P<hedge>~|≈|\b(?:over|more than|nearly|almost|about|around|up to|roughly)\s)?\s*"
    rf"(?P<value>\d+(?:\.\d+)?)\s?(?:[x×]|-?fold\b|\s?times\b)\s+(?:[a-z]+\s+){{0,2}}?{_BETTER}\b",
    re.IGNORECASE,
)
_BY_FACTOR = re.compile(
    r"\b(?:improv\w+|increas\w+)\b[^.\n]{0,60}?\bby\s+"
    r"(?P<hedge>~|≈|(?:over|more than|nearly|almost|about|around|up to|roughly)\s)?\s*"
    r"(?:a factor of\s+(?:about\s+)?(?=\d)|(?=\d+(?:\.\d+)?\s?(?:[x×]|-?fold\b|times\b)))"
    r"(?P<value>\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
_PROTOCOL = re.compile(
    r"protocol `?[0-9a-f]{8,}|greedy|sampled|temperature\W+[\d.]+|n\s*=\s*\d+|\d+-shot"
)
#: More than these are no claims of a card: looking at each would take hours.
_MOST_CLAIMS, _MOST_PAIRS = 100, 1000
#: Characters before and after a claim that its sentence is looked for in.
_NEAR = 2000
_OF_ELSE = re.compile(r"(?i)speed|fast|through|memory|latency|cost|small|context|length|token")


class _Claim(NamedTuple):
    """``4x improvement``."""

    text: str
    line: int
    value: Fraction
    decimals: int
    hedged: bool
    sentence: str


def _holds(claim: _Claim, own: Quantity, base: Quantity) -> bool:
    """True if two numbers of tables, as printed, can give the claim."""
    step = Fraction(10) ** -claim.decimals
    room = step if claim.hedged else step / 2
    a, b, ua, ub = own.figure.value, base.figure.value, own.figure.unit, base.figure.unit
    low, high = (a - ua / 2) / (b + ub / 2), (a + ua / 2) / max(b - ub / 2, ub / 100)
    return low - room <= claim.value <= high + room


def claim_findings(
    document: Document, known: Sequence[Quantity], impossible: Collection[Quantity]
) -> Iterator[Finding]:
    """One finding per claim that does not stand."""
    for claim in islice(_claims(document), _MOST_CLAIMS):
        if said := _problem(claim, known, impossible):
            rule, words, fix = said
            yield Finding(claim.line, rule, f"{claim.text!r} {words}", fix)


def _claims(document: Document) -> Iterator[_Claim]:
    for paragraph in document.paragraphs:
        text = paragraph.without_code
        for found in chain(_FACTOR.finditer(text), _BY_FACTOR.finditer(text)):
            number = parse_number(found["value"])
            if number is None or number[0] <= 0 or _OF_ELSE.search(found.group()):
                continue
            yield _Claim(
                " ".join(found.group().split()),
                paragraph.line_of(found.start("value")),
                *number,
                bool(found["hedge"]),
                _context(paragraph, found.start()),
            )


def _context(paragraph: Paragraph, offset: int) -> str:
    """The sentence of a claim and the one before it."""
    begin = max(0, offset - _NEAR)
    text = paragraph.text[begin : offset + _NEAR]
    offset -= begin
    starts = [0, *(m.end() for m in re.finditer(r"[.!?]\s+", text))]
    before = [s for s in starts if s <= offset][-2:]
    end = re.compile(r"[.!?](?:\s|$)").search(text, offset)
    return text[before[0] : end.start() if end else len(text)]


def _problem(
    claim: _Claim, known: Sequence[Quantity], impossible: Collection[Quantity]
) -> tuple[str, str, str] | None:
    """Rule, what is wrong, and what mends it; None where the claim can be, or nobody can tell. One
    that recomputes may still compare what cannot be compared."""
    pairs = _pairs(claim, known)
    holding = [pair for pair in pairs if _holds(claim, *pair)]
    clean = next((pair for pair in holding if not {*pair} & {*impossible}), None)
    if clean is not None:
        own, base = clean
        said = ""
        if own.n is not None and base.n is not None and own.n != base.n:
            said = f"compares n = {own.n} (line {own.line}) with n = {base.n} (line {base.line})"
        elif own.table is not base.table and _protocols(own) != _protocols(base):
            said = f"compares numbers of two protocols (lines {own.line} and {base.line})"
        fix = "measure both under one protocol, on the same cases"
        return ("comparison", said, fix) if said else None
    if holding:
        own, base = holding[0]
        bad = base if base in impossible else own
        said = f"is {_computed(own, base)}, and {bad.shown} (line {bad.line}) cannot be"
        fix = "measure both under one protocol, and compute it again"
        return "comparison-built-on", f"{said} for n = {bad.n}", fix
    about_base = role_of(claim.sentence) == "base" or "over" in claim.sentence.lower()
    if about_base and len(pairs) == 1 and pairs[0][0].metric.key in metrics_in(claim.sentence):
        said = f"does not recompute: {_computed(*pairs[0])}"
        return "comparison", said, "say what it was computed from, or correct it"
    return None


def _pairs(claim: _Claim, known: Sequence[Quantity]) -> list[tuple[Quantity, Quantity]]:
    """Own number and base number of one metric: of one table, else of two; those that the sentence
    is about come first."""
    base: dict[tuple[str, frozenset[str]], list[Quantity]] = defaultdict(list)
    for q in known:
        if q.role == "base" and q.figure.value > 0:
            base[q.metric.key, q.name].append(q)
    own = (q for q in known if q.role == "own" or not q.compares)
    every = ((a, b) for a in own for b in base.get((a.metric.key, a.name), ()))
    pairs = list(islice(every, _MOST_PAIRS))
    pairs = [(a, b) for a, b in pairs if a.table is b.table] or pairs
    named = metrics_in(claim.sentence)
    return [pair for pair in pairs if pair[0].metric.key in named] or pairs


def _computed(own: Quantity, base: Quantity) -> str:
    result = own.figure.value / base.figure.value
    return f"{own.shown} (line {own.line}) / {base.shown} (line {base.line}) = {float(result):.2f}"


def _protocols(q: Quantity) -> frozenset[str]:
    """Marks of a table's protocol, as far as its heading and caption say."""
    text = " ".join([*q.table.headings[-1:], q.table.caption]).lower()
    return frozenset(_PROTOCOL.findall(text))


_COUNT = r"\d{1,3}(?:,\d{3})+|\d+"
_OF = re.compile(
    rf"(?<![\d.,/:@-])(?P<part>{_COUNT})\s+(?:out\s+)?of\s+(?:the\s+|all\s+)?(?P<whole>{_COUNT})"
    r"(?![\d.,]*\d|[\w%-])"
)
_QUOTED = re.compile(
    rf"(?<![\d.,/:-])(?P<part>{_COUNT})\s*(?P<sign>/|of|out of)\s*(?:the\s+)?(?P<whole>{_COUNT})"
    r"(?![\d.,]*\d|/)(?:\s+[A-Za-z-]+){0,3}\s*(?:=|≈|\(|:|,\s+or|\s+or)\s*(?P<hedge>[~≈]|about )?"
    r"(?P<share>\d+(?:\.\d+)?)\s?%"
)


def prose_findings(document: Document) -> Iterator[Finding]:
    """Parts of a whole, in sentences and in cells."""
    for paragraph in document.paragraphs:
        text = paragraph.without_code
        for found in _OF.finditer(text):
            if _int(found["part"]) > _int(found["whole"]):
                line = paragraph.line_of(found.start())
                yield Finding(line, "parts", f"{found.group()}: more than there are")
        for found in _QUOTED.finditer(text):
            yield from _quotient(paragraph.line_of(found.start()), found)
    for table in document.tables:
        for row in table.rows:
            for found in _QUOTED.finditer(" ".join(f"{cell}\t" for cell in row.cells)):
                yield from _quotient(row.line, found)


def _int(text: str) -> int:
    return int(text.replace(",", ""))


def _quotient(line: int, found: re.Match[str]) -> Iterator[Finding]:
    part, whole = _int(found["part"]), _int(found["whole"])
    figure = parse_figure(found["share"])
    if figure is None or whole == 0 or part > whole or 1900 < part <= whole < 2100:
        return  # the last are years
    share = Fraction(100 * part, whole)
    room = figure.unit * (2 if found["hedge"] else 1)
    fits = [abs(figure.value - s) < room for s in (share, 100 - share)]
    if not any(fits):
        yield Finding(
            line,
            "parts",
            f"{found.group().rstrip()}: {part} of {whole} are "
            f"{float(share):.{max(figure.decimals, 1)}f} %",
        )
