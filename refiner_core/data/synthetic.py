"""Synthetic rows in the schema of the refiner task, and the scenes behind them.

In: a kind (``sft`` or ``rl``), a number of rows and a seed.
Out: rows with ``conversations``, ``rubrics`` (a JSON string), ``metadata`` and ``truth``.

Questions are about invented facts, so nothing can be answered from memory. Each prompt has 3–5
snippets, of which one or two answer it; the others are near misses (a similar name, another
attribute of the same name, a survey that mentions the question without an answer). About 30 % of
the demonstrations have one flaw, named in ``metadata.flaw``, as real demonstrations do.

A snippet's title is plain text directly before its tag, and a demonstration restates that
title before the claim's tag (`` Nabsuf crop<snippet id=S_a2B9> …``). A model of a million
parameters needs this cue to find the right id; without it evidence selection is not learned at
this size.

``truth`` is for measurement (:mod:`refiner_core.evaluation.metrics`); no reward may read it.

Rubric weights: a required fact weighs four times as much as a forbidden statement. With equal
weights a second claim is a risk that does not pay, and a policy learns to say
less.

Row ``i`` depends on the kind, the seed and ``i`` alone: requesting more rows appends rows.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from refiner_core import synthetic_words

FLAWS = ("missing_fact", "wrong_citation", "off_query_claim", "format_slip")


#: Snippets in the tool output; at least one more than the requested facts.
_SNIPPETS = (3, 5)
#: Share of rows with two requested facts instead of one, and of prompts in which the agent says a
#: sentence before the tool output.
_TWO_FACT_SHARE, _REASONING_SHARE = 0.5, 0.3
#: Share of demonstrations with one flaw of :data:`FLAWS`.
_FLAW_SHARE = 0.3


@dataclass(frozen=True)
class _Fact:
    """``value`` is the ``attribute`` of ``entity``."""

    entity: str
    attribute: str
    value: str


@dataclass(frozen=True)
class _Snippet:
    """One search result; ``fact`` is the fact that it states, if any."""

    id: str
    title: str
    text: str
    fact: _Fact | None


@dataclass(frozen=True)
class _Scene:
    """The question and the search results, in the order of the tool output."""

    asked: tuple[_Fact, ...]
    snippets: tuple[_Snippet, ...]
    reasoning: str

    def ids_of(self, fact: _Fact) -> list[str]:
        """The ids of the snippets that state ``fact``."""
        return [snippet.id for snippet in self.snippets if snippet.fact == fact]

    @property
    def gold(self) -> list[_Snippet]:
        """The snippets that answer the question, in the order of the question."""
        by_fact = {s.fact: s for s in reversed(self.snippets) if s.fact is not None}
        return [by_fact[fact] for fact in self.asked]

    @property
    def distractors(self) -> list[_Snippet]:
        """The snippets that do not answer the question."""
        return [snippet for snippet in self.snippets if snippet.fact not in self.asked]


def state(fact: _Fact, rng: random.Random) -> str:
    """One sentence that states ``fact``."""
    forms = (
        f"The {fact.attribute} of {fact.entity} is {fact.value}.",
        f"In {fact.entity} the {fact.attribute} is {fact.value}.",
        f"{fact.entity} has {fact.value} as its {fact.attribute}.",
    )
    return rng.choice(forms)


def _survey(fact: _Fact, rng: random.Random) -> tuple[str, str, None]:
    """Title and text of a snippet that mentions the question without answering it."""
    kind = rng.choice(synthetic_words.SURVEY_WORDS)
    text = f"A {kind} looks at the {fact.attribute} of {fact.entity}."
    return f"{fact.entity} {kind}", text, None


def _ask(rng: random.Random) -> tuple[_Fact, ...]:
    entity, attribute = (
        synthetic_words.draw_name(rng),
        rng.choice(synthetic_words.ATTRIBUTES),
    )
    first = _Fact(entity, attribute, synthetic_words.draw_value(rng))
    if rng.random() >= _TWO_FACT_SHARE:
        return (first,)
    other = entity
    if rng.random() < 0.5:
        while other[:3] == entity[:3] or other[3:] == entity[3:]:
            other = synthetic_words.draw_name(rng)
    attributes = [a for a in synthetic_words.ATTRIBUTES if a != attribute]
    return first, _Fact(other, rng.choice(attributes), synthetic_words.draw_value(rng))


def _distract(rng: random.Random, asked: tuple[_Fact, ...]) -> _Fact:
    """A fact near the question: same entity or same attribute, or neither (one time in six)."""
    near = rng.choice(asked)
    others = [a for a in synthetic_words.ATTRIBUTES if a not in {fact.attribute for fact in asked}]
    value = synthetic_words.draw_value(rng)
    draw = rng.random()
    if draw < 0.4:
        return _Fact(synthetic_words.similar_name(rng, near.entity), near.attribute, value)
    if draw < 0.84:
        return _Fact(near.entity, rng.choice(others), value)
    return _Fact(synthetic_words.draw_name(rng), rng.choice(others), value)


def fresh_ids(rng: random.Random, count: int) -> list[str]:
    """``count`` snippet ids, no two of which share a half."""
    ids: list[str] = []
    while len(ids) < count:
        new = synthetic_words.draw_id(rng)
        if all(new[2:4] != old[2:4] and new[4:] != old[4:] for old in ids):
            ids.append(new)
    return ids


def _evidence(
    rng: random.Random, asked: tuple[_Fact, ...], count: int
) -> list[tuple[str, str, _Fact | None]]:
    """Title, text and fact of ``count`` snippets; no two share a title or a value."""
    found: list[tuple[str, str, _Fact | None]] = [
        (f"{fact.entity} {fact.attribute}", state(fact, rng), fact) for fact in asked
    ]
    while len(found) < count:
        if all(fact for *_, fact in found) and rng.random() < 0.2:
            found.append(_survey(rng.choice(asked), rng))
            continue
        fact = _distract(rng, asked)
        title = f"{fact.entity} {fact.attribute}"
        values = {f.value for _, _, f in found if f is not None}
        if title not in {t for t, _, _ in found} and fact.value not in values:
            found.append((title, state(fact, rng), fact))
    rng.shuffle(found)
    return found


def _draw_scene(rng: random.Random) -> _Scene:
    """Draw a question and the search result that answers it."""
    asked = _ask(rng)
    while len({fact.value for fact in asked}) < len(asked):
        asked = _ask(rng)
    count = max(rng.randint(*_SNIPPETS), len(asked) + 1)
    ids = fresh_ids(rng, count)
    evidence = _evidence(rng, asked, count)
    snippets = tuple(_Snippet(i, *found) for i, found in zip(ids, evidence, strict=True))
    reasoning = f"I search for {asked[0].entity}." if rng.random() < _REASONING_SHARE else ""
    return _Scene(asked, snippets, reasoning)


def question(asked: tuple[_Fact, ...]) -> str:
    """The question that asks for these facts."""
    first = asked[0]
    if len(asked) == 1:
        return f"What is the {first.attribute} of {first.entity}?"
    second = asked[1]
    if second.entity == first.entity:
        return f"What are the {first.attribute} and the {second.attribute} of {first.entity}?"
    return (
        f"What is the {first.attribute} of {first.entity} "
        f"and the {second.attribute} of {second.entity}?"
    )


def prompt_text(scene: _Scene) -> str:
    """The user turn: query, the agent's reasoning if there is one, tool output."""
    lines = [f"<query>{question(scene.asked)}</query>"]
    if scene.reasoning:
        lines.append(scene.reasoning)
    lines.append("<tool_output>")
    lines += [f" {s.title}<snippet id={s.id}> {s.text}</snippet>" for s in scene.snippets]
    lines.append("</tool_output>")
    return "\n".join(lines)


def claim(snippet: _Snippet, cited: str | None = None) -> str:
    """Lead and claim that restate ``snippet``, citing ``cited`` (its own id by default)."""
    return f" {snippet.title}<snippet id={cited or snippet.id}> {snippet.text}</snippet>"


def answer_text(scene: _Scene) -> str:
    """The flawless answer."""
    return "<answer>" + "".join(claim(snippet) for snippet in scene.gold) + "</answer>"


def _format_slip(text: str, rng: random.Random) -> str:
    """``text`` with one error of form."""
    slips = (
        text.removesuffix("</answer>"),
        text.replace("</snippet>", "", 1),
        text.replace("<snippet id=", "<snippet ids=", 1),
        "Here is the answer.\n" + text,
    )
    return rng.choice(slips)


def flawed_answer(scene: _Scene, flaw: str, rng: random.Random) -> str:
    """The answer with one flaw of :data:`FLAWS`.

    ``missing_fact`` in a scene that asks for one fact answers with a distractor instead.
    """
    gold, distractors = scene.gold, scene.distractors
    if flaw == "format_slip":
        return _format_slip(answer_text(scene), rng)
    if flaw == "missing_fact":
        kept = [rng.choice(gold)] if len(gold) > 1 else [rng.choice(distractors)]
        claims = [claim(snippet) for snippet in kept]
    elif flaw == "wrong_citation":
        wrong = rng.randrange(len(gold))
        claims = [
            claim(snippet, rng.choice(distractors).id if index == wrong else None)
            for index, snippet in enumerate(gold)
        ]
    elif flaw == "off_query_claim":
        claims = [claim(snippet) for snippet in [*gold, rng.choice(distractors)]]
    else:
        raise ValueError(f"Unknown flaw {flaw!r}. Expected one of {', '.join(FLAWS)}.")
    return "<answer>" + "".join(claims) + "</answer>"


Kind = Literal["sft", "rl"]

REQUIRED_WEIGHT = 4.0
FORBIDDEN_WEIGHT = 1.0
_MAX_FORBIDDEN = 2


def generate_rows(kind: Kind, n: int, seed: int) -> list[dict[str, Any]]:
    """Generate ``n`` rows.

    Parameters
    ----------
    kind
        ``sft`` rows end with a demonstration; ``rl`` rows have the user's turn only. The two kinds
        never share rows, for any seed.
    n
        Number of rows.
    seed
        The same kind and seed give the same rows on every machine.
    """
    return [_row(kind, seed, index) for index in range(n)]


def _row(kind: Kind, seed: int, index: int) -> dict[str, Any]:
    rng = random.Random(f"refiner-synthetic-1/{kind}/{seed}/{index}")
    scene = _draw_scene(rng)
    metadata: dict[str, Any] = {
        "sample_id": f"synthetic-{kind}-{seed}-{index:05d}",
        "tool_query": f"{scene.asked[0].entity} {scene.asked[0].attribute}",
        "refiner_mode": "answer_only",
    }
    conversations = [{"role": "user", "content": prompt_text(scene)}]
    if kind == "sft":
        flaw = rng.choice(FLAWS) if rng.random() < _FLAW_SHARE else None
        text = flawed_answer(scene, flaw, rng) if flaw else answer_text(scene)
        conversations.append({"role": "assistant", "content": text})
        metadata["flaw"] = flaw
    return {
        "conversations": conversations,
        "rubrics": json.dumps(rubrics(scene)),
        "metadata": metadata,
        "truth": truth(scene),
    }


def rubrics(scene: _Scene) -> dict[str, list[dict[str, Any]]]:
    """Required and forbidden statements of an answer; key phrases are in double quotes."""
    positive = [
        {
            "title": f"{fact.entity} {fact.attribute}",
            "description": f'States that the {fact.attribute} of {fact.entity} is "{fact.value}"',
            "weight": REQUIRED_WEIGHT,
        }
        for fact in scene.asked
    ]
    negative = [
        {
            "title": f"Not {fact.entity} {fact.attribute}",
            "description": (
                f'Attributes "{fact.value}" (the {fact.attribute} of {fact.entity}) to the answer'
            ),
            "weight": FORBIDDEN_WEIGHT,
        }
        for fact in [s.fact for s in scene.distractors if s.fact is not None][:_MAX_FORBIDDEN]
    ]
    return {"positive_rubrics": positive, "negative_rubrics": negative}


def truth(scene: _Scene) -> dict[str, Any]:
    """The requested facts, and the ids of the snippets that state them."""
    facts = [{**vars(fact), "ids": scene.ids_of(fact)} for fact in scene.asked]
    return {"facts": facts, "gold_ids": [i for fact in scene.asked for i in scene.ids_of(fact)]}
