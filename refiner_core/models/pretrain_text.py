"""Documents that the base models read before they see any task.

In: a random generator. Out: documents as segments of text with loss weights.

The documents are in the other half of the world (no name, value or id of the task occurs) and in
layouts of their own: no query, no ``<answer>``, no chat, no tool, no dialogue, no rule of any desk.
Three kinds:

* *tables*: lines of a name with a word, drawn with replacement from a few;
* *registers*: notes under titles, then an index that cites them, drawn *with replacement*, mostly
  after a line that asks for one or two of them and before a line that says that they are done.
  Without replacement, a model learns to cite an id that was not yet used, which looks like
  selection and is none;
* *records* (:func:`draw_records_document`, for `tiny-tools`): JSON, and parts of it again, as a
  sentence or as JSON, sometimes after the sentence came first. What is said again is that of the
  record named, or of the latest one that has it. Fields are drawn anew for each record and values
  whatever the field means, so nothing is learned but where to look.

What cannot be predicted (new names, values and ids) weighs little in the loss.
"""

from __future__ import annotations

import random

from refiner_core import words
from refiner_core.data.synthetic import Fact, SyntheticOptions, draw_scene
from refiner_core.environments.desk.words import DAYS

#: Text and its weight in the loss.
Segment = tuple[str, float]

_FAINT = 0.05
_CITED = 4
_EARLY_SHARE = 0.5
_DONE = "Done\n"
_REGISTER = SyntheticOptions(min_snippets=3, max_snippets=6)


def draw_document(rng: random.Random, table_share: float) -> list[Segment]:
    """A document; ``table_share`` of them are tables."""
    return _table(rng) if rng.random() < table_share else _register(rng)


def _table(rng: random.Random) -> list[Segment]:
    entries: dict[str, str] = {}
    for _ in range(rng.randint(4, 7)):
        key = f" {words.draw_name(rng, 'pretrain')} {rng.choice(words.ATTRIBUTES)}"
        cited = words.draw_id(rng, "pretrain").removeprefix("S_")
        value = words.draw_value(rng, "pretrain")
        entries[key] = f"{rng.choice((' ', ':', '<snippet id=S_'))}{cited} {value}\n"
        near = rng.random()
        if near < 0.4:
            entries[key[:7] + f" {rng.choice(words.ATTRIBUTES)}"] = (
                f"{entries[key][0]}{words.draw_id(rng, 'pretrain').removeprefix('S_')} "
                f"{words.draw_value(rng, 'pretrain')}\n"
            )
    seen: set[str] = set()
    segments: list[Segment] = [("Table\n", _FAINT)]
    for key in rng.choices(list(entries), k=rng.randint(12, 18)):
        segments += [(key, _FAINT), (entries[key], 1.0 if key in seen else _FAINT)]
        seen.add(key)
    return segments


def _request(asked: tuple[Fact, ...]) -> str:
    """A line that asks for one fact or two."""
    first, last = asked[0], asked[-1]
    if len(asked) == 1:
        return f"Find the {first.attribute} of {first.entity}.\n"
    if first.entity == last.entity:
        return f"Find the {first.attribute} and the {last.attribute} of {first.entity}.\n"
    return (
        f"Find the {first.attribute} of {first.entity} and the {last.attribute} of {last.entity}.\n"
    )


def _register(rng: random.Random) -> list[Segment]:
    scene = draw_scene(rng, _REGISTER, "pretrain")
    bodies = {s: f"<snippet id={s.id}> {s.text}</snippet>\n" for s in scene.snippets}
    stating = [s for s in scene.snippets if s.fact is not None]
    text = "Notes\n" + "".join(f" {s.title}{body}" for s, body in bodies.items()) + "Index\n"
    early = rng.random() < _EARLY_SHARE
    segments: list[Segment] = [(_request(scene.asked) + text if early else text, _FAINT)]
    cited = len(scene.asked) if early else 0
    if early:
        segments += [(f" {s.title}{bodies[s]}", 1.0) for s in scene.gold]
        segments.append((_DONE, 1.0))
    while cited < _CITED:
        asked = rng.random() < 0.6
        count = rng.randint(1, 2) if asked else 1
        drawn = rng.choices(stating if asked else scene.snippets, k=count)
        if asked and drawn[0] is drawn[-1]:
            drawn = drawn[:1]
        if asked:
            segments.append((_request(tuple(s.fact for s in drawn if s.fact)), _FAINT))
        for snippet in drawn:
            segments += [(f" {snippet.title}", 1.0 if asked else _FAINT), (bodies[snippet], 1.0)]
        if asked:
            segments.append((_DONE, 1.0))
        cited += len(drawn)
    return segments


_FAINT_IN_RECORDS = 0.02
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
        segments.append((f"the {kind} is {key}.", _FAINT_IN_RECORDS))
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
        segments += [
            (f"{before} {field} is", _FAINT_IN_RECORDS),
            (f" {value}", weight or _FAINT_IN_RECORDS),
        ]
    return [*segments, (".\n", _FAINT_IN_RECORDS)]


def _object(record: Record, weight: float) -> list[Segment]:
    """A record as a line of JSON with this weight on values; segments end where tokens do."""
    segments: list[Segment] = []
    ahead = '{"'
    for field, value in record.items():
        quote = '"' if isinstance(value, str) else ""
        segments += [
            (f'{ahead}{field}": {quote}', _FAINT_IN_RECORDS),
            (f"{value}", weight or _FAINT_IN_RECORDS),
        ]
        ahead = f'{quote}, "'
    return [*segments, (ahead.removesuffix(', "') + "}\n", _FAINT_IN_RECORDS)]
