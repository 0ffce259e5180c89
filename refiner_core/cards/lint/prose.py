"""Numbers in sentences, and numbers that stand twice: prose against itself and against tables.

In: a :class:`Document` and the quantities of its tables. Out: findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice

from refiner_core.cards.lint.figures import agree, parse_figure
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.markdown import Document, Paragraph
from refiner_core.cards.lint.names import metric_of, words
from refiner_core.cards.lint.quantities import OVERALL, Quantity, same_elsewhere

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
_MENTION = re.compile(
    r"(?<![\d.,/])(?:(?P<before>\d+(?:\.\d+)?)\s?%\**\s+\**(?P<metric>pass\s?@\s?\d+|accuracy|F1)\b"
    r"|\b(?P<name>pass\s?@\s?\d+|accuracy|F1)\**\s+(?:score\s+)?(?:of|:|=|is)\s+\**"
    r"(?P<after>\d+(?:\.\d+)?)\s?%)",
    re.IGNORECASE,
)
#: Numbers in sentences that are looked for in tables.
_MOST_MENTIONS = 200
_OWN_WORDS = re.compile(
    r"(?i)\b(?:this|our|the) model\b|\bachiev|\breach|\battain|\bwe (?:get|obtain)"
)
_ON = re.compile(r"[\s*_<>/a-z]*?\bon\s+(?:the\s+)?[\s*_`\[]*(?P<what>[\w.+-]+)", re.IGNORECASE)
_TOO_MUCH = re.compile(
    r"(?<![\d.,])(?P<value>\d+(?:\.\d+)?)\s?%\**\s+"
    r"(?:pass\s?@\s?\d+|accuracy|precision|recall|F1)\b",
    re.IGNORECASE,
)


def prose_findings(document: Document, known: Sequence[Quantity]) -> Iterator[Finding]:
    """All findings in sentences, and between them and tables."""
    for paragraph in document.paragraphs:
        yield from _counts(paragraph)
    mentions = ((p, m) for p in document.paragraphs for m in _MENTION.finditer(p.without_code))
    for paragraph, found in islice(mentions, _MOST_MENTIONS):
        yield from _mentioned(paragraph, found, known)
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
                f"{found.group().replace('*', '')} is no share of anything",
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


# ---------------------------------------------------------------- one quantity, one value


def _mentioned(
    paragraph: Paragraph, found: re.Match[str], known: Sequence[Quantity]
) -> Iterator[Finding]:
    """``59% Pass@4`` is one of the table's numbers of that metric."""
    metric = metric_of(found["metric"] or found["name"])
    figure = parse_figure((found["before"] or found["after"]) + "%")
    there = [q for q in known if metric and q.metric.key == metric.key]
    if figure is None or not there or any(agree(figure, q.figure) for q in there):
        return
    named = [q for q in there if _named(q, paragraph.text)]
    ours = _OWN_WORDS.search(paragraph.text)
    after = paragraph.without_code[found.end() : found.end() + 200]
    if named or (ours and _is_of(there, paragraph.text, after)):
        other = (named or there)[0]
        yield Finding(
            paragraph.line_of(found.start()),
            "two-values",
            f"{found.group().replace('*', '')} stands in no table; "
            f"{other.label or 'there'} has {other.shown} (line {other.line})",
            "correct one of them",
        )


def _named(q: Quantity, text: str) -> bool:
    label = words(q.label)
    return len(q.label) > 3 and not q.compares and bool(label) and label <= words(text)


def _is_of(there: Sequence[Quantity], sentence: str, after: str) -> bool:
    """Whether a number can only be one of these: they stand in one section, and what the sentence
    says that it was measured on is named there."""
    sections = {q.table.headings[:2] for q in there}
    on = _ON.match(after)
    places = [words(" ".join([*q.table.headings, *q.name])) for q in there]
    if on is not None:
        return len(sections) == 1 and any(words(on["what"]) <= place for place in places)
    return len(sections) == 1 and all(q.name <= words(sentence) | OVERALL for q in there)


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
