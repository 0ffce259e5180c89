"""Plans that share a memo equal plans made alone."""

import random
import typing
from typing import Any

import pytest

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.recipes import load_protocol, shipped_protocols

FIELDS = dict(walk(RecipeConfig))
#: Drawn below, or no matter of one plan.
APART = ("recipe", "workspace", "data_root", "only", "stages", "seed", "evaluate.protocols")
SOURCES = {"model": "m", "data.sft": "s", "data.rl": "r"}
STAGES = (
    ("data", "sft", "grpo", "evaluate", "publish"),
    ("data", "sft", "evaluate"),
    ("data", "grpo", "evaluate"),
)
PROTOCOLS = tuple(load_protocol(name).text for name in shipped_protocols())
PLANS = 200


def values(path: str) -> list[Any]:
    """Some values of a field; few, so that plans often agree in it."""
    kind = FIELDS[path].type
    text = str(kind)
    if "tuple" in text:
        return []
    for one in (kind, *typing.get_args(kind)):
        if typing.get_origin(one) is typing.Literal:
            return list(typing.get_args(one))
    found: list[Any] = [None] if "None" in text else []
    if "bool" in text:
        return [*found, True, False]
    if "float" in text:
        return [*found, 0.0, 0.5, 1.0]
    return [*found, 0, 1, 2] if "int" in text else [*found, "a", "b", "x/y"]


VALUES = {path: found for path in FIELDS if path not in APART and (found := values(path))}


def drawn(draw: random.Random, base: RecipeConfig) -> tuple[RecipeConfig, dict[str, str]]:
    """A configuration that differs in a few fields, of either mark, and its sources."""
    mark = draw.choice(("identity", "execution"))
    fields = [path for path in VALUES if FIELDS[path].mark == mark]
    changes = {path: draw.choice(VALUES[path]) for path in draw.sample(fields, draw.randint(1, 3))}
    changes["evaluate.protocols"] = draw.choice(((), PROTOCOLS[:1]))
    changes |= {"stages": draw.choice(STAGES), "seed": draw.choice((1, 2))}
    names = ("model", "rubrics", "judge_prompt", "card_template", "data.rl@held-out-greedy-v1")
    more = {draw.choice(names): digest for digest in draw.choice(((), ("one",), ("hub:two",)))}
    return replace_fields(base, changes), SOURCES | more


def unlike(one: Plan, other: Plan) -> list[str]:
    """What differs, the kind of a number too: 1 and 1.0 have other fingerprints."""
    names = [repr(s.name) for s in one.stages], [repr(s.name) for s in other.stages]
    if names[0] != names[1]:
        return [f"{names[0]} against {names[1]}"]
    pairs = zip(one.stages, other.stages, strict=True)
    return [a.name for a, b in pairs if a != b or repr(a) != repr(b)]


def test_a_plan_that_shares_its_stages_is_the_one_made_alone() -> None:
    """A trial of a sweep trains the same as `refiner run` with its overrides."""
    draw, base, memo = random.Random(6), load_recipe("tiny"), dict[Any, Any]()
    made = 0
    for _ in range(PLANS):
        config, sources = drawn(draw, base)
        try:
            alone = make_plan(config, sources)
        except ConfigurationError:  # such a recipe is refused either way
            with pytest.raises(ConfigurationError):
                make_plan(config, sources, memo)
            continue
        made += 1
        assert unlike(make_plan(config, sources, memo), alone) == []
    assert made > PLANS / 2
