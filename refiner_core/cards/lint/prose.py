"""Numbers in sentences, and numbers that stand twice: prose against itself, tables and model-index.

In: a :class:`Document` and the quantities of its tables. Out: findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from refiner_core.cards.lint.figures import Figure, agree, parse_figure
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.front import IndexValue
from refiner_core.cards.lint.markdown import Document, Paragraph
from refiner_core.cards.lint.names import Metric, metric_of, words
from refiner_core.cards.lint.quantities import Quantity, same_elsewhere

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
_OWN_WORDS = re.compile(
    r"(?i)\b(?:this|our|the) model\b|\bachiev|\breach|\battain|\bwe (?:get|obtain)"
)
_TOO_MUCH = re.compile(
    r"(?<![\d.,])(?P<value>\d+(?:\.\d+)?)\s?%\**\s+"
    r"(?:pass\s?@\s?\d+|accuracy|precision|recall|F1)\b",
    re.IGNORECASE,
)


def prose_findings(
    document: Document, known: Sequence[Quantity], index: Sequence[IndexValue]
) -> Iterator[Finding]:
    """All findings in sentences, and between them and tables."""
    for paragraph in document.paragraphs:
        yield from _counts(paragraph)
        yield from _mentions(paragraph, known)
    yield from _twice(known)
    yield from _index(index, known)


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
        yield from _quotient(paragraph, found)
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


def _quotient(paragraph: Paragraph, found: re.Match[str]) -> Iterator[Finding]:
    part, whole = _int(found["part"]), _int(found["whole"])
    figure = parse_figure(found["share"])
    if figure is None or whole == 0 or part > whole:
        return
    share = Fraction(100 * part, whole)
    room = figure.unit * (2 if found["hedge"] else 1)
    fits = [abs(figure.value - s) < room for s in (share, 100 - share)]
    if not any(fits):
        yield Finding(
            paragraph.line_of(found.start()),
            "parts",
            f"{found.group().rstrip()}: {part} of {whole} are "
            f"{float(share):.{max(figure.decimals, 1)}f} %",
        )


# ---------------------------------------------------------------- one quantity, one value


def _mentions(paragraph: Paragraph, known: Sequence[Quantity]) -> Iterator[Finding]:
    """``59% Pass@4`` is one of the table's numbers of that metric."""
    for found in _MENTION.finditer(paragraph.without_code):
        metric = metric_of(found["metric"] or found["name"])
        figure = parse_figure((found["before"] or found["after"]) + "%")
        there = [q for q in known if metric and q.metric.key == metric.key]
        if figure is None or not there or any(agree(figure, q.figure) for q in there):
            continue
        named = [q for q in there if _named(q, paragraph.text)]
        if named or (_OWN_WORDS.search(paragraph.text) and _is_of(there, paragraph)):
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


def _is_of(there: Sequence[Quantity], paragraph: Paragraph) -> bool:
    """Whether the metric is measured in one place only, so that it can be no other benchmark's."""
    sections = {q.table.headings[:2] for q in there}
    return len(sections) == 1 and metric_of(paragraph.text) is not None


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


# ---------------------------------------------------------------- model-index


def _index(index: Sequence[IndexValue], known: Sequence[Quantity]) -> Iterator[Finding]:
    for entry in index:
        figure = parse_figure(entry.text)
        metric = _index_metric(entry)
        if figure is None or metric is None:
            continue
        there = _same(entry, metric, known)
        if there and not any(_equal(figure, q.figure) for q in there):
            yield Finding(
                entry.line,
                "model-index",
                f"{entry.name or entry.type} is {entry.text} here and {there[0].shown} in line "
                f"{there[0].line}",
                "correct one of them",
            )
    yield from _index_pass_at_k(index)


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


def _equal(figure: Figure, printed: Figure) -> bool:
    """Whether the index's number, which has more digits, prints as the table's."""
    return agree(figure, printed)


def _index_pass_at_k(index: Sequence[IndexValue]) -> Iterator[Finding]:
    groups: dict[Any, list[tuple[int, IndexValue, Figure]]] = {}
    for entry in index:
        metric, figure = _index_metric(entry), parse_figure(entry.text)
        if metric is not None and metric.k is not None and figure is not None:
            name = re.sub(r"(?i)pass\s?@\s?\d+", "", entry.name).strip().lower()
            groups.setdefault((entry.dataset, name), []).append((metric.k, entry, figure))
    for group in groups.values():
        ordered = sorted(group, key=lambda g: g[0])
        for (k, _, less), (more_k, entry, more) in pairwise(ordered):
            if k != more_k and less.value > more.value:
                yield Finding(
                    entry.line,
                    "pass-at-k",
                    f"pass@{k} of {less.text} is more than pass@{more_k} of {more.text}",
                    "correct one of them",
                )
