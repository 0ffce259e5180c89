"""Documents about records that the base model of `tiny-tools` reads before it sees any task.

In: a random generator. Out: documents as segments of text with loss weights.

A document shows records as JSON and says parts of them again: as a sentence, as JSON, sometimes
after the sentence came first. What is said again is that of the record named, or of the latest one
that has it. Fields are drawn anew for each record and values are drawn whatever the field means, so
nothing is learned but where to look: no tool, no dialogue, no rule of any desk stands here, and
names, values and ids come from the half of the world that the task never uses. A share of the
documents are tables and registers of :mod:`refiner_core.models.pretrain_text`.
"""

from __future__ import annotations

import random

from refiner_core import words
from refiner_core.environments.desk.words import DAYS
from refiner_core.models.pretrain_text import Segment, draw_document

_FAINT = 0.02
_OLD_SHARE = 0.15
_FIELDS = (
    "booking", "order", "device", "name", "room", "item", "day", "free", "fee", "price", "refund",
    "terms", "state", "code", "lamp", "stock",
)  # fmt: skip
_KINDS = ("booking", "order", "device", "room", "item")
_WORDS = (
    "open", "sent", "arrived", "active", "locked", "blocked", "reserved", "changed", "cancelled",
    "taken", "fixed", "free", "some", "none", "dark", "blue", "red", "green", "returned",
)  # fmt: skip

Record = dict[str, str | int]


def draw_records_document(rng: random.Random) -> list[Segment]:
    """A document about records, or one of the older kinds."""
    if rng.random() < _OLD_SHARE:
        return draw_document(rng, table_share=0.3)
    return _named(rng) if rng.random() < 0.35 else _latest(rng)


def _value(rng: random.Random, field: str) -> str | int:
    """A value, mostly of the sort that such a field has."""
    sort = field if rng.random() < 0.7 else rng.choice(_FIELDS)
    if sort in ("booking", "order", "device", "code"):
        return words.draw_id(rng, "pretrain")
    if sort == "name":
        return words.draw_name(rng, "pretrain")
    if sort in ("room", "item"):
        return words.draw_value(rng, "pretrain")
    if sort in ("day", "free"):
        return rng.choice(DAYS)
    if sort in ("fee", "price", "refund"):
        return rng.randrange(10, 100)
    return rng.choice(_WORDS)


def _record(rng: random.Random) -> Record:
    fields = rng.sample(_FIELDS, rng.randint(2, 5))
    return {field: _value(rng, field) for field in fields}


def _latest(rng: random.Random) -> list[Segment]:
    """Records one after the other; what is said is that of the latest that has the field."""
    known: Record = {}
    segments: list[Segment] = []
    for _ in range(rng.randint(3, 5)):
        record = _record(rng)
        known |= record
        spoken = rng.random() < 0.5
        segments += _sentence(record, rng, 0.0) if spoken else _object(record, 0.0)
        for _ in range(rng.randint(1, 3)):
            chosen = rng.sample(list(known), min(len(known), rng.randint(1, 2)))
            part = {field: known[field] for field in chosen}
            segments += _sentence(part, rng, 1.0) if rng.random() < 0.5 else _object(part, 1.0)
    return segments


def _named(rng: random.Random) -> list[Segment]:
    """Records, and lines that name one of them before they say what stands in it."""
    kind = rng.choice(_KINDS)
    records = {_value_of_kind(rng, kind): _record(rng) for _ in range(rng.randint(2, 4))}
    segments: list[Segment] = []
    for key, record in records.items():
        record.pop(kind, None)
        segments += _object({kind: key, **record}, 0.0)
    for _ in range(rng.randint(4, 6)):
        key, record = rng.choice(list(records.items()))
        field = rng.choice(list(record) or [kind])
        part = {field: record.get(field, key)}
        segments.append((f"the {kind} is {key}.", _FAINT))
        segments += _sentence(part, rng, 1.0) if rng.random() < 0.5 else _object(part, 1.0)
    return segments


def _value_of_kind(rng: random.Random, kind: str) -> str:
    draw = words.draw_value if kind in ("room", "item") else words.draw_id
    return draw(rng, "pretrain")


def _sentence(record: Record, rng: random.Random, weight: float) -> list[Segment]:
    """``my name is Nabsuf and the fee is 42.`` with this weight on values."""
    segments: list[Segment] = []
    for number, (field, value) in enumerate(record.items()):
        whose = rng.choice(("the", "my", "your"))
        before = f" and {whose}" if number else whose
        segments += [(f"{before} {field} is", _FAINT), (f" {value}", weight or _FAINT)]
    return [*segments, (".\n", _FAINT)]


def _object(record: Record, weight: float) -> list[Segment]:
    """A record as a line of JSON with this weight on values; segments end where tokens do."""
    segments: list[Segment] = []
    ahead = '{"'
    for field, value in record.items():
        quote = '"' if isinstance(value, str) else ""
        segments += [(f'{ahead}{field}": {quote}', _FAINT), (f"{value}", weight or _FAINT)]
        ahead = f'{quote}, "'
    return [*segments, (ahead.removesuffix(', "') + "}\n", _FAINT)]
