"""Numbers of a card's tables, each with its metric, model and number of cases; and impossible ones:
totals, shares of n cases, counts in sentences, improvements.

In: a :class:`Document`. Out: one :class:`_Quantity` per number with a known metric; findings, each
about one line. Rows may be models and columns metrics, or the other way round. A printed number
stands for all values that round to it. Labels are interpreted only if they are unambiguous
(:func:`metric_of`).

A share of n cases is a whole number of n-ths, as printed, rounded or truncated. A claim is checked
if the tables have both numbers: that of the card's own model and that of the one before it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from typing import Literal, NamedTuple

from refiner_core.cards.lint.markdown import CardFinding, Document, Table

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
class _PrintedNumber:
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


def _parse_figure(text: str) -> _PrintedNumber | None:
    """The number that makes up a cell, or None for anything else."""
    found = _FIGURE.fullmatch(text.strip())
    if found is None or not any(c.isdigit() for c in found["value"]):
        return None
    plain = found["value"].replace(",", "").replace("−", "-")
    return _PrintedNumber(
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
class _Quantity:
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
    figure: _PrintedNumber
    line: int
    table: Table
    role: Role = ""
    compares: bool = False
    n: int | None = None
    n_line: int = 0
    whole: int = 100


def quantities(document: Document) -> list[_Quantity]:
    """All table numbers with a known metric, with n carried over between tables."""
    tables = (replace(t, rows=t.rows[:_ROWS]) for t in document.tables if len(t.header) <= _COLUMNS)
    found = list(islice((q for table in tables for q in _of_table(table)), _MOST))
    return [_with_n(q, found) for q in found]


def _figures_of(table: Table) -> list[list[_PrintedNumber | None]]:
    """The numbers of a table, by row and column."""
    return [[_parse_figure(cell) for cell in row.cells] for row in table.rows]


def _of_table(table: Table) -> Iterator[_Quantity]:
    """The numbers of a table whose columns, or else whose rows, are metrics."""
    columns, rows = list(table.header[1:]), [row.cells[0] for row in table.rows]
    grid = [row[1:] for row in _figures_of(table)]
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
            yield _Quantity(
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


def _with_n(quantity: _Quantity, others: Sequence[_Quantity]) -> _Quantity:
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


_TOTAL = re.compile(
    r"(?i)\s*(?:(?:grand )?total|sum|overall|all|combined"
    r"|(?P<mean>(?:micro[- ]?|macro[- ]?)?(?:average|avg\.?|mean)))\s*:?\s*"
)


def totals(table: Table) -> Iterator[CardFinding]:
    """Check rows that sum up others, column by column: counts are sums, and in a table with
    counts, metrics are means (or sums) of their parts."""
    labels = [_TOTAL.fullmatch(row.cells[0]) for row in table.rows]
    summed = [r for r, found in enumerate(labels) if found]
    figures = _figures_of(table)
    if len(summed) != 1 or len(figures) < 3:
        return
    ((at, found),) = ((r, found) for r, found in enumerate(labels) if found)
    columns = list(zip(*figures, strict=True))
    counted = [
        c
        for c, header in enumerate(table.header)
        if counts_cases(header) and all(f is not None and f.is_count for f in columns[c])
    ]
    for c, header in enumerate(table.header[1:], start=1):
        whole, parts = columns[c][at], [f for r, f in enumerate(columns[c]) if r != at and f]
        if whole is None or whole.hedged or len(parts) < len(figures) - 1:
            continue
        added = sum((p.value for p in parts), Fraction(0))
        if c in counted:
            fits, said = [added, *([whole.value] if found["mean"] else [])], "the parts sum to"
            wrong = whole.value not in fits
        elif counted and metric_of(header):
            weights = [f.value for r, f in enumerate(columns[counted[0]]) if r != at and f]
            means = [added / len(parts)]
            if sum(weights):
                products = (p.value * w for p, w in zip(parts, weights, strict=True))
                means.append(sum(products, Fraction(0)) / sum(weights))
            room = (whole.unit + max(p.unit for p in parts)) / 2
            wrong = all(abs(whole.value - fit) > room for fit in (*means, added))
            added, said = means[-1], "its parts, weighted by their numbers, give"
        else:
            continue
        if wrong:
            shown = f"{float(added):.{whole.decimals}f}" + (" %" if whole.percent else "")
            what = f"{table.rows[at].cells[0]} of {header} is {whole.text}, but {said} {shown}"
            yield CardFinding(table.rows[at].line, "total", what, "correct it, or the parts")


# ---------------------------------------------------------------- shares of n

_FIX = (
    "say on how many cases, and with how many tries each, it was measured; or measure it again, as "
    "the others were"
)
_COUNT = r"\d{1,3}(?:,\d{3})+|\d+"
_COUNTS = re.compile(r"(?i)pass\s?@|accura|success|solved|correct|exact match")
_OF_CASES = re.compile(
    r"(?<![\d.,])(?P<share>\d+(?:\.\d+)?\s?%)\W{0,4}"
    r"(?:\(?\s*[nN]\s*=\s*(?P<n>\d[\d,]*)\b(?!\.\d)"
    r"|of\s+(?:the\s+|all\s+)?(?P<cases>\d[\d,]*)\s+(?:[a-z-]+\s+){0,2}?"
    r"(?:tasks|questions|problems|prompts|examples|rows|cases|instances|items)\b)"
)
_REPEATS = re.compile(
    r"(?i)\b(?:num|n)_?samples\b`?\s*[=:]\s*`?(\d{1,4})\b|\b(?:avg|mean|average)\s?@\s?(\d{1,4})\b"
    r"|\b(\d{1,4})\s+(?:independent |random |different )?"
    r"(?:runs|seeds|trials|samples|attempts|rollouts|generations|completions|responses)\b"
)
#: Lost attempts, so that tasks have different numbers of them.
_UNEVEN = re.compile(r"(?i)fewer than \d+ valid attempts")
#: Limits on different numbers of tries, and on cases.
_MOST_REPEATS, _MOST_CASES = 20, 10**7


def impossible_shares(
    document: Document, known: Sequence[_Quantity]
) -> Iterator[tuple[CardFinding, _Quantity | None]]:
    """Findings, each with its number in a table."""
    said = {int(next(filter(None, m.groups()))) for m in _REPEATS.finditer(document.text)}
    repeats = sorted(said - {0, 1})[:_MOST_REPEATS]
    uneven = _UNEVEN.search(document.text) is not None
    for q in known:
        if not q.n or q.n > _MOST_CASES or not q.metric.yes_no or q.figure.hedged:
            continue
        drawn = q.metric.drawn
        tries = (
            [1, *repeats]
            if drawn == 1
            else [1, *(math.comb(r, drawn) for r in repeats if r > drawn)]
        )
        if q.metric.once:
            tries = [1]
        elif uneven or (q.metric.key.startswith("pass") and not repeats):
            continue  # undecidable
        if why := _no_share(q.figure, q.n, tries, q.whole):
            where = f" (line {q.n_line})" if q.n_line not in (0, q.line) else ""
            what = f"{q.figure.text} is no share of n = {q.n}{where}: {why}"
            yield CardFinding(q.line, "percentage-impossible", what, _FIX), q
    for paragraph in document.paragraphs:
        counts = _COUNTS.search(paragraph.text) is not None
        for found in _OF_CASES.finditer(paragraph.text):
            figure, n = _parse_figure(found["share"]), whole_number(found["n"] or found["cases"])
            if figure is None or not 0 < n <= _MOST_CASES or (found["n"] and not counts):
                continue
            if figure.value <= 100 and (why := _no_share(figure, n, [1, *repeats], 100)):
                what = f"{figure.text} is no share of n = {n}: {why}"
                line = paragraph.line_of(found.start())
                yield CardFinding(line, "percentage-impossible", what, _FIX), None


def _no_share(figure: _PrintedNumber, n: int, tries: Sequence[int], whole: int) -> str:
    """Reason why no number of ``n`` cases with so many tries each prints as the figure; empty if
    one does."""
    if not 0 <= figure.value <= whole:
        return "it is more than all of them, or less than none"
    low, high = figure.value - figure.unit / 2, figure.value + figure.unit
    for count in (n * t for t in tries):
        k = math.ceil(low * count / whole)
        if Fraction(k * whole, count) < high or k * whole == low * count:
            return ""
    k, sign = math.floor(figure.value * n / whole), " %" if whole == 100 else ""
    decimals = max(figure.decimals, 1)
    below, above = (f"{float(Fraction(i * whole, n)):.{decimals}f}" for i in (k, k + 1))
    return f"{k} of {n} are {below}{sign}, {k + 1} are {above}{sign}"


# ---------------------------------------------------------------- claims

_FACTOR = re.compile(
    r"(?P<hedge>~|≈|\b(?:over|more than|nearly|almost|about|around|up to|roughly)\s)?\s*"
    r"(?P<value>\d+(?:\.\d+)?)\s?(?:[x×]|-?fold\b|\s?times\b)\s+(?:[a-z]+\s+){0,2}?"
    r"(?:improvement|better|higher|increase|gain|boost|more accurate)\b",
    re.IGNORECASE,
)
_PROTOCOL = re.compile(
    r"(?i)protocol `?[0-9a-f]{8,}|greedy|sampled|temperature\W+[\d.]+|n\s*=\s*\d+|\d+-shot"
)
#: A card has fewer claims than this; checking more would take hours.
_MOST_CLAIMS, _MOST_PAIRS = 100, 1000
#: Characters before and after a claim that give its context.
_NEAR = 300


def claim_findings(
    document: Document, known: Sequence[_Quantity], impossible: Collection[_Quantity]
) -> Iterator[CardFinding]:
    """One finding per false claim, such as ``4x improvement``."""
    claims = ((p, m) for p in document.paragraphs for m in _FACTOR.finditer(p.text))
    pairs = _pairs(known)
    for paragraph, found in islice(claims, _MOST_CLAIMS):
        around = paragraph.text[max(0, found.start() - _NEAR) : found.end() + _NEAR]
        if problem := _problem(found, around, pairs, impossible):
            rule, said = problem
            fix = "measure both under one protocol, on the same cases, and compute it again"
            line, claim = paragraph.line_of(found.start("value")), " ".join(found.group().split())
            yield CardFinding(line, rule, f"{claim!r} {said}", fix)


def _pairs(known: Sequence[_Quantity]) -> list[tuple[_Quantity, _Quantity]]:
    """Own and base number of one metric, from one table if possible."""
    base: dict[tuple[str, frozenset[str]], list[_Quantity]] = defaultdict(list)
    for q in known:
        if q.role == "base" and q.figure.value > 0:
            base[q.metric.key, q.name].append(q)
    own = (q for q in known if q.role == "own" or not q.compares)
    every = ((a, b) for a in own for b in base.get((a.metric.key, a.name), ()))
    pairs = list(islice(every, _MOST_PAIRS))
    return [(a, b) for a, b in pairs if a.table is b.table] or pairs


def _problem(
    claim: re.Match[str],
    around: str,
    pairs: Sequence[tuple[_Quantity, _Quantity]],
    impossible: Collection[_Quantity],
) -> tuple[str, str] | None:
    """Rule and fault; None if the claim is possible or undecidable. A claim that recomputes may
    still compare numbers that are not comparable."""
    named = metrics_in(around)
    pairs = [pair for pair in pairs if pair[0].metric.key in named] or pairs
    holding = [pair for pair in pairs if _holds(claim, *pair)]
    clean = [pair for pair in holding if not {*pair} & {*impossible}]
    if clean:
        own, base = clean[0]
        if own.n and base.n and own.n != base.n:
            said = f"compares n = {own.n} (line {own.line}) with n = {base.n} (line {base.line})"
            return "comparison", said
        if own.table is not base.table and _protocol(own.table) != _protocol(base.table):
            said = f"compares numbers of two protocols (lines {own.line} and {base.line})"
            return "comparison", said
        return None
    for own, base in (holding or pairs)[:1]:
        result = float(own.figure.value / base.figure.value)
        said = f"{own.figure.text} (line {own.line}) / {base.figure.text} (line {base.line}) = "
        said += f"{result:.2f}"
        if holding:
            bad = base if base in impossible else own
            said += f", and {bad.figure.text} (line {bad.line}) cannot be for n = {bad.n}"
            return "comparison-built-on", f"is {said}"
        about_base = role_of(around) == "base" or " over " in around.lower()
        if about_base and len(pairs) == 1 and own.metric.key in named:
            return "comparison", f"does not recompute: {said}"
    return None


def _holds(claim: re.Match[str], own: _Quantity, base: _Quantity) -> bool:
    """True if two printed numbers can give the claim."""
    value = Fraction(claim["value"])
    room = Fraction(10) ** -len(claim["value"].partition(".")[2])
    room = room if claim["hedge"] else room / 2
    (a, ua), (b, ub) = ((f.value, f.unit / 2) for f in (own.figure, base.figure))
    return (a - ua) / (b + ub) - room <= value <= (a + ua) / max(b - ub, ub / 50) + room


def _protocol(table: Table) -> frozenset[str]:
    """Marks of a table's protocol in its heading and caption."""
    text = " ".join([*table.headings[-1:], table.caption])
    return frozenset(mark.lower() for mark in _PROTOCOL.findall(text))


# ---------------------------------------------------------------- parts of a whole

_OF = re.compile(
    rf"(?<![\d.,/:@-])(?P<part>{_COUNT})\s+(?:out\s+)?of\s+(?:the\s+|all\s+)?(?P<whole>{_COUNT})"
    r"(?![\d.,]*\d|[\w%-])"
)
_QUOTED = re.compile(
    rf"(?<![\d.,/:-])(?P<part>{_COUNT})\s*(?:/|of|out of)\s*(?:the\s+)?(?P<whole>{_COUNT})"
    r"(?![\d.,]*\d|/)(?:\s+[A-Za-z-]+){0,3}\s*(?:=|≈|\(|:|,\s+or|\s+or)\s*(?P<hedge>[~≈]|about )?"
    r"(?P<share>\d+(?:\.\d+)?)\s?%"
)


def part_findings(document: Document) -> Iterator[CardFinding]:
    """Parts that exceed their whole, or whose share is stated wrongly, in sentences and
    in cells."""
    for part in document.texts():
        for found in _OF.finditer(part.text):
            if whole_number(found["part"]) > whole_number(found["whole"]):
                said = f"{found.group()}: more than there are"
                yield CardFinding(part.line_of(found.start()), "parts", said)
        for found in _QUOTED.finditer(part.text):
            if share := _another_share(found):
                said = f"{found.group().rstrip()}: {found['part']} of {found['whole']} are {share}"
                yield CardFinding(part.line_of(found.start()), "parts", said)


def _another_share(found: re.Match[str]) -> str:
    """The share of part and whole, if it differs from the stated one."""
    part, whole = whole_number(found["part"]), whole_number(found["whole"])
    figure = _parse_figure(found["share"])
    if figure is None or whole == 0 or part > whole or 1900 < part <= whole < 2100:
        return ""  # the latter are years
    share = Fraction(100 * part, whole)
    room = figure.unit * (2 if found["hedge"] else 1)
    fits = any(abs(figure.value - s) < room for s in (share, 100 - share))
    return "" if fits else f"{float(share):.{max(figure.decimals, 1)}f} %"
