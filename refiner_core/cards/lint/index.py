"""The numbers of ``model-index`` against those of the tables.

In: what stands in the front matter, and the tables of a card. Out: findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from refiner_core.cards.lint.figures import Figure, agree, parse_figure
from refiner_core.cards.lint.findings import Finding
from refiner_core.cards.lint.front import IndexValue
from refiner_core.cards.lint.markdown import Document
from refiner_core.cards.lint.names import Metric, metric_of, role_of, words
from refiner_core.cards.lint.quantities import Quantity, figures_of

_MARK = re.compile(r"\b[0-9a-f]{12,64}\b")
_DECODING = re.compile(r"\b(?:greedy|sampled)\b")


def index_findings(
    document: Document, index: Sequence[IndexValue], known: Sequence[Quantity]
) -> Iterator[Finding]:
    """All findings about ``model-index``."""
    for entry in index:
        figure, metric = parse_figure(entry.text), _index_metric(entry)
        if figure is None:
            continue
        there = [(q.figure, q.line) for q in _same(entry, metric, known)] if metric else []
        there = there or _by_label(entry, document)
        if there and not any(agree(figure, printed) for printed, _ in there):
            printed, line = there[0]
            what = f"{entry.name or entry.type} is {entry.text} here"
            message = f"{what} and {printed.text} in line {line}"
            yield Finding(entry.line, "model-index", message, "correct one of them")
    yield from _pass_at_k(index)


def _by_label(entry: IndexValue, document: Document) -> list[tuple[Figure, int]]:
    """Numbers of the card's own model in rows that are called as the entry's type, under a heading
    that names the fingerprint in its data set's name, and the decoding in its own."""
    marks = _MARK.findall(entry.dataset) + _DECODING.findall(entry.name)
    found = []
    for table in document.tables:
        heading = " ".join(table.headings[-1:])
        if not _MARK.search(entry.dataset) or not all(mark in heading for mark in marks):
            continue
        own = [c for c, label in enumerate(table.header) if role_of(label) == "own"]
        for row, figures in zip(table.rows, figures_of(table), strict=True):
            if row.cells[0].text == entry.type:
                found += [(f, row.line) for c in own if (f := figures[c]) is not None]
    return found


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


def _pass_at_k(index: Sequence[IndexValue]) -> Iterator[Finding]:
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
