"""Numbers in sentences: counts, quantities that stand twice, and improvements that are claimed.

In: prose and :class:`Quantity` values. Out: findings. A claim is looked at where the card's tables
have both numbers: that of its own model and that of the one before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from refiner_core.cards.lint.markdown import Document, Finding, Paragraph, Severity
from refiner_core.cards.lint.quantities import (
    Quantity,
    agree,
    metrics_in,
    parse_figure,
    parse_number,
    role_of,
    same_elsewhere,
)

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
_POINTS = re.compile(
    r"(?P<hedge>~|≈|\b(?:over|more than|nearly|almost|about|around|up to|roughly)\s)?\s*"
    r"(?<![\d.])\+?(?P<value>\d+(?:\.\d+)?)\s?(?:%[- ]points?|percentage[- ]points?|pp|points?)\b"
    rf"[^.\n]{{0,30}}?\b(?:{_BETTER}|over|above)\b",
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


@dataclass(frozen=True)
class Claim:
    """``4x improvement``: a factor, or a difference in points."""

    text: str
    line: int
    value: Fraction
    decimals: int
    hedged: bool
    is_factor: bool
    sentence: str

    def given_by(self, own: Quantity, base: Quantity) -> Fraction:
        """Factor or difference that two numbers give."""
        if self.is_factor:
            return own.figure.value / base.figure.value
        points = own.figure.value - base.figure.value
        return points * 100 if own.fractions and not own.figure.percent else points

    def holds(self, own: Quantity, base: Quantity) -> bool:
        """True if two numbers of tables, as printed, can give the claim."""
        whole = own.fractions and not own.figure.percent and not self.is_factor
        step = Fraction(10) ** -self.decimals
        room = step if self.hedged else step / 2
        a, b, ua, ub = (
            x * (100 if whole else 1)
            for x in (own.figure.value, base.figure.value, own.figure.unit, base.figure.unit)
        )
        if self.is_factor:
            low, high = (a - ua / 2) / (b + ub / 2), (a + ua / 2) / max(b - ub / 2, ub / 100)
        else:
            low, high = a - b - (ua + ub) / 2, a - b + (ua + ub) / 2
        return low - room <= self.value <= high + room


def claim_findings(
    document: Document, known: Sequence[Quantity], impossible: Collection[Quantity]
) -> Iterator[Finding]:
    """One finding per claim that does not stand."""
    for claim in islice(_claims(document), _MOST_CLAIMS):
        yield from _judge(claim, known, impossible)


def _claims(document: Document) -> Iterator[Claim]:
    for paragraph in document.paragraphs:
        text = paragraph.without_code
        for pattern, is_factor in ((_FACTOR, True), (_BY_FACTOR, True), (_POINTS, False)):
            for found in pattern.finditer(text):
                number = parse_number(found["value"])
                if number is None or number[0] <= 0 or _OF_ELSE.search(found.group()):
                    continue
                yield Claim(
                    " ".join(found.group().split()),
                    paragraph.line_of(found.start("value")),
                    *number,
                    bool(found["hedge"]),
                    is_factor,
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


def _judge(
    claim: Claim, known: Sequence[Quantity], impossible: Collection[Quantity]
) -> Iterator[Finding]:
    pairs = _pairs(claim, known)
    holding = [(own, base) for own, base in pairs if claim.holds(own, base)]
    clean = [p for p in holding if not set(p) & set(impossible)]
    if clean:
        own, base = clean[0]
        yield from _across(claim, own, base)
    elif holding:
        own, base = holding[0]
        (bad, *_) = [q for q in (base, own) if q in impossible]
        yield Finding(
            claim.line,
            "comparison-built-on",
            f"{claim.text!r} is {_computed(claim, own, base)}, and {bad.shown} (line {bad.line}) "
            f"cannot be for n = {bad.n}",
            "measure both under one protocol, and compute it again",
        )
    elif pairs and _names_metric(claim, pairs):
        own, base = pairs[0]
        also = next((q for q in (base, own) if q in impossible), None)
        more = f"; {also.shown} cannot be for n = {also.n}" if also else ""
        yield Finding(
            claim.line,
            "comparison",
            f"{claim.text!r} does not recompute: {_computed(claim, own, base)}{more}",
            "say what it was computed from, or correct it",
        )


def _pairs(claim: Claim, known: Sequence[Quantity]) -> list[tuple[Quantity, Quantity]]:
    """Own number and base number of one metric: of one table, else of two; those that the sentence
    is about come first."""
    own = [q for q in known if q.role == "own"]
    base = [q for q in known if q.role == "base" and q.figure.value > 0]
    alike: dict[tuple[str, frozenset[str]], list[Quantity]] = {}
    for b in base:
        alike.setdefault((b.metric.key, b.name), []).append(b)
    others = [*own, *(q for q in known if not q.compares)]
    same = (
        (a, b) for a in own for b in alike.get((a.metric.key, a.name), ()) if a.table is b.table
    )
    across = (
        (a, b)
        for a in others
        for b in alike.get((a.metric.key, a.name), ())
        if a.table is not b.table
    )
    for found in (same, across):
        pairs = list(islice(found, _MOST_PAIRS))
        named = [p for p in pairs if _mentions(claim.sentence, p[0])]
        if named or pairs:
            return named or pairs
    return []


def _mentions(sentence: str, q: Quantity) -> bool:
    return q.metric.key in metrics_in(sentence)


def _names_metric(claim: Claim, pairs: Sequence[tuple[Quantity, Quantity]]) -> bool:
    """True if it is beyond doubt which numbers the claim is about."""
    about_base = role_of(claim.sentence) == "base" or "over" in claim.sentence.lower()
    return about_base and len(pairs) == 1 and _mentions(claim.sentence, pairs[0][0])


def _computed(claim: Claim, own: Quantity, base: Quantity) -> str:
    sign = "/" if claim.is_factor else "-"
    result = float(claim.given_by(own, base))
    return f"{own.shown} (line {own.line}) {sign} {base.shown} (line {base.line}) = {result:.2f}"


def _across(claim: Claim, own: Quantity, base: Quantity) -> Iterator[Finding]:
    """A claim that recomputes may still compare what cannot be compared."""
    fix = "measure both under one protocol, on the same cases"
    severity: Severity = "error"
    if own.n is not None and base.n is not None and own.n != base.n:
        said = f"compares n = {own.n} (line {own.line}) with n = {base.n} (line {base.line})"
    elif own.table is not base.table:
        said = f"compares numbers of two tables (lines {own.line} and {base.line})"
        fix = f"say that both are of one protocol, or {fix}"
        severity = "error" if _protocols(own) != _protocols(base) else "warning"
    elif own.n is None or base.n is None:
        said = f"is {_computed(claim, own, base)}, and nothing says on how many cases"
        fix, severity = "add n, and intervals", "warning"
    else:
        return
    yield Finding(claim.line, "comparison", f"{claim.text!r} {said}", fix, severity)


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
_REASONS = re.compile(
    rf"(?<![\d.,])(?P<part>{_COUNT})\s+of\s+(?:{_COUNT})\s+[^:.\n]{{1,60}}:\s+"
    rf"(?P<list>(?:{_COUNT})\s+`[^`\n]+`(?:,\s+(?:and\s+)?(?:{_COUNT})\s+`[^`\n]+`)*)"
)
_TOO_MUCH = re.compile(
    r"(?<![\d.,])(?P<value>\d+(?:\.\d+)?)\s?%\s+"
    r"(?:pass\s?@\s?\d+|accuracy|precision|recall|F1)\b",
    re.IGNORECASE,
)


def prose_findings(document: Document, known: Sequence[Quantity]) -> Iterator[Finding]:
    """All findings in sentences, and between them and tables."""
    for paragraph in document.paragraphs:
        yield from _counts(paragraph)
    for table in document.tables:
        for row in table.rows:
            for found in _QUOTED.finditer(" ".join(f"{cell.text}\t" for cell in row.cells)):
                yield from _quotient(row.line, found)
    yield from _twice(known)


# ---------------------------------------------------------------- parts of a whole


def _counts(paragraph: Paragraph) -> Iterator[Finding]:
    text = paragraph.without_code
    for found in _OF.finditer(text):
        part, whole = _int(found["part"]), _int(found["whole"])
        if part > whole:
            yield Finding(
                paragraph.line_of(found.start()), "parts", f"{found.group()}: more than there are"
            )
    for found in _QUOTED.finditer(text):
        yield from _quotient(paragraph.line_of(found.start()), found)
    for found in _REASONS.finditer(paragraph.text):
        counts = [_int(n) for n in re.findall(rf"({_COUNT})\s+`", found["list"])]
        if sum(counts) != _int(found["part"]):
            yield Finding(
                paragraph.line_of(found.start()),
                "parts",
                f"{found['part']} are listed as {' + '.join(map(str, counts))} = {sum(counts)}",
            )
    for found in _TOO_MUCH.finditer(text):
        if Fraction(found["value"]) > 100:
            yield Finding(
                paragraph.line_of(found.start()),
                "out-of-range",
                f"{found.group()} is no share of anything",
            )


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


def _twice(known: Sequence[Quantity]) -> Iterator[Finding]:
    for q in known:
        for other in same_elsewhere(q, known):
            if other.line < q.line and not agree(q.figure, other.figure):
                yield Finding(
                    q.line,
                    "two-values",
                    f"{q.metric.key} of {q.label} is {q.shown} here and {other.shown} in line "
                    f"{other.line}",
                    "correct one of them",
                )
