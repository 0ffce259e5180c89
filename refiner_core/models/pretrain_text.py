"""Documents that the base model reads before it sees any task.

In: a random generator. Out: documents as segments of text with loss weights.

The documents are in the other half of the world (no name, value or id of the task occurs) and in
layouts of their own: no query, no ``<answer>``, no chat. Two kinds:

* *tables*: lines of a name with a word, drawn with replacement from a few;
* *registers*: notes under titles, then an index that cites them, drawn *with replacement*, mostly
  after a line that asks for one or two of them and before a line that says that they are done.
  Without replacement, a model learns to cite an id that was not yet used, which looks like
  selection and is none.

What cannot be predicted (new names, values and ids) weighs little in the loss.
"""

from __future__ import annotations

import random

from refiner_core import words
from refiner_core.data.synthetic_world import Fact, SyntheticOptions, draw_scene

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
