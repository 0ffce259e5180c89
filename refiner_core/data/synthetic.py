"""Rows of the embedded world, in the row schema of the refiner task.

In: a kind (``sft`` or ``rl``), a number of rows, a seed and :class:`SyntheticOptions`.
Out: rows with ``conversations``, ``rubrics`` (a JSON string), ``metadata`` and ``truth``.

Questions are about invented facts, so nothing can be answered from memory. Each prompt holds 3–5
snippets of which one or two answer; the others are near misses (a similar name, another attribute
of the same name, a survey that mentions the question without an answer). About 30 % of the
demonstrations have one flaw, named in ``metadata.flaw``, as real demonstrations do.

``truth`` is for measurement (:mod:`refiner_core.data.truth`); no reward may read it.

Rubric weights: a required fact weighs four times as much as a thing that must not be said. Where
the two weigh the same, a second claim is a risk that does not pay, and a policy learns to say
less.

Row ``i`` depends on the kind, the seed and ``i`` alone: asking for more rows appends rows.
"""

from __future__ import annotations

import json
import random
from dataclasses import fields
from typing import Any, Literal

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.data.synthetic_world import (
    FLAWS,
    Scene,
    SyntheticOptions,
    answer_text,
    draw_scene,
    flawed_answer,
    prompt_text,
)

Kind = Literal["sft", "rl"]

REQUIRED_WEIGHT = 4.0
FORBIDDEN_WEIGHT = 1.0
_MAX_FORBIDDEN = 2


def generate_rows(kind: Kind, n: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Generate ``n`` rows.

    Parameters
    ----------
    kind
        ``sft`` rows end with a demonstration; ``rl`` rows hold the user's turn only. The two kinds
        never share rows, whatever the seed.
    n
        Number of rows.
    seed
        The same kind, seed and options give the same rows on every machine.
    **options
        Fields of :class:`SyntheticOptions`.

    Raises
    ------
    ConfigurationError
        If the kind or an option does not exist.
    """
    if kind not in ("sft", "rl"):
        raise ConfigurationError(
            f"Synthetic rows of kind {kind!r} do not exist.",
            expected="sft or rl",
            fix="ask for one of these",
        )
    known = [field.name for field in fields(SyntheticOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"Unknown option of synthetic rows: {', '.join(unknown)}.{suggest(unknown[0], known)}",
            expected=f"one of {', '.join(known)}",
            fix="correct the option",
        )
    chosen = SyntheticOptions(**options)
    return [_row(kind, seed, index, chosen) for index in range(n)]


def _row(kind: Kind, seed: int, index: int, options: SyntheticOptions) -> dict[str, Any]:
    rng = random.Random(f"refiner-synthetic-1/{kind}/{seed}/{index}")
    scene = draw_scene(rng, options)
    metadata: dict[str, Any] = {
        "sample_id": f"synthetic-{kind}-{seed}-{index:05d}",
        "tool_query": f"{scene.asked[0].entity} {scene.asked[0].attribute}",
        "refiner_mode": "answer_only",
    }
    conversations = [{"role": "user", "content": prompt_text(scene)}]
    if kind == "sft":
        flaw = rng.choice(FLAWS) if rng.random() < options.flaw_share else None
        text = flawed_answer(scene, flaw, rng) if flaw else answer_text(scene)
        conversations.append({"role": "assistant", "content": text})
        metadata["flaw"] = flaw
    return {
        "conversations": conversations,
        "rubrics": json.dumps(rubrics(scene)),
        "metadata": metadata,
        "truth": truth(scene),
    }


def rubrics(scene: Scene) -> dict[str, list[dict[str, Any]]]:
    """What an answer must say and must not say; key phrases stand in double quotes."""
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


def truth(scene: Scene) -> dict[str, Any]:
    """The facts asked for, and the ids of the snippets that state them."""
    facts = [
        {
            "entity": fact.entity,
            "attribute": fact.attribute,
            "value": fact.value,
            "ids": scene.ids_of(fact),
        }
        for fact in scene.asked
    ]
    return {"facts": facts, "gold_ids": [i for fact in scene.asked for i in scene.ids_of(fact)]}
