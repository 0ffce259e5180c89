"""Which number of a card shows which fact.

In: :class:`CardFacts`. Out: every number that the shipped template prints of results, the front
matter's ``model-index``, the training curve, cost, counts of the set-up and notes, with the dotted
path of the fact and the record that it was read from. Settings (``beta = 0.001``) are not listed:
they stand under ``config`` in the evidence by their own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from refiner_core.cards.cost import cost_lines
from refiner_core.cards.curve import training_curve
from refiner_core.cards.evidence import published_facts
from refiner_core.cards.facts import CardFacts, finite, record_of
from refiner_core.cards.notes import known_notes
from refiner_core.cards.printed import Line
from refiner_core.cards.results import (
    Table,
    index_metric,
    own_entries,
    preferred_step,
    progression_tables,
    result_tables,
)
from refiner_core.cards.setup import before_lines, setup_lines


class CardNumber(NamedTuple):
    """A number of a card.

    Attributes
    ----------
    text
        As it is printed, without a unit: ``0.512``, ``2 h 02 min``.
    section
        Title of the section that it stands in, or ``front matter``.
    fact
        Dotted path in the facts of the evidence, such as ``evaluations.3.low``. A number that is
        made from several facts (a sum) has their common front, or the first of them.
    record
        Where that fact was read; None if nobody has said.
    """

    text: str
    section: str
    fact: str
    record: str | None


def card_numbers(facts: CardFacts) -> list[CardNumber]:
    """All numbers of facts in a card, in the order of the shipped template."""
    facts = published_facts(facts)
    return [
        CardNumber(text, section, fact, record_of(facts, fact))
        for section, text, fact in _printed(facts)
    ]


def _printed(facts: CardFacts) -> Iterator[tuple[str, str, str]]:
    yield from _front_matter(facts)
    preferred = preferred_step(facts)
    yield from _of("Intended use", [preferred] if preferred else [])
    yield from _of("Training set-up", [*setup_lines(facts), *before_lines(facts)])
    curve = training_curve(facts)
    if curve is not None:
        cells = [cell for row in curve.rows for cell in row]
        yield from _of("Training curve", [*cells, *curve.lines])
    for table in (*result_tables(facts), *progression_tables(facts)):
        yield from _of("Results", _lines_of(table))
    yield from _of("Hardware and cost", cost_lines(facts))
    yield from _of("Known notes", known_notes(facts))


def _lines_of(table: Table) -> list[Line]:
    return [table.title, *(cell for row in table.rows for cell in row)]


def _of(section: str, lines: Iterable[Line]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        for text, fact in line.numbers:
            yield section, text, fact


def _front_matter(facts: CardFacts) -> Iterator[tuple[str, str, str]]:
    for entry in own_entries(facts):
        metric, place = index_metric(entry), f"evaluations.{entry.place}"
        if metric is None:
            continue
        yield "front matter", str(entry.values["n"]), f"{place}.n"
        low, high = (finite(entry.values.get(key)) for key in ("low", "high"))
        if low is not None and high is not None:
            yield "front matter", f"{low:.3f}", f"{place}.low"
            yield "front matter", f"{high:.3f}", f"{place}.high"
        yield "front matter", str(metric["value"]), f"{place}.value"
