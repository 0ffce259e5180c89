"""Marks, fingerprints and plans. A fault here reruns or wrongly skips work."""

import dataclasses
import hashlib
import math
import random
import typing
from typing import Any, Literal

import pytest

from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import EXIT_CODES, ConfigurationError, RefinerError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import (
    canonical_json,
    derive_seed,
    digest,
    get_field,
    identity_values,
    stage_fingerprint,
)
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.plan import Plan, make_plan
from refiner_core.contract.protocols import parse_protocol
from refiner_core.contract.recipes import load_protocol, shipped_protocols

FIELDS = dict(walk(RecipeConfig))
IDENTITY = [p for p, info in FIELDS.items() if info.mark == "identity"]
EXECUTION = [p for p, info in FIELDS.items() if info.mark == "execution"]
#: Identity fields that decide *which* stages there are, not what one of them is.
GRAPH_FIELDS = {
    *("evaluate.models", "evaluate.protocols", "stages", "only"),
    *("publish.which", "publish.steps", "publish.evaluate"),
}

#: Fingerprints of the default recipe as first recorded: stages at version 1, first judge prompts.
PINNED_AT_FIRST = {
    "data": "92b0ded45c86",
    "sft": "97c159653ca6",
    "grpo": "7598721002f0",
    "publish": "a704b2995bb1",
    "evaluate-base": "c0b3b0e05d0b",
    "evaluate-sft": "bb95c8fbdf58",
    "evaluate-grpo": "196c10ab8e3f",
    "card": "32b498f2f151",
}


def another(info: FieldInfo, value: Any) -> Any:
    """A valid value of the field's type that differs from ``value``."""
    kind = info.type
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    if typing.get_origin(kind) is Literal:
        return next(a for a in args if a != value)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(args[0])
        return value[:-1] if value else (inner[0] if inner else "x",)
    if type(None) in typing.get_args(kind):
        kind = args[0]
        if typing.get_origin(kind) is Literal:
            return next(a for a in typing.get_args(kind) if a != value)
    base = {int: 1, float: 0.5, str: "a", bool: False}[kind]
    if value is None:
        return base
    return (not value) if kind is bool else value + (base or 1)


def config_with(path: str) -> RecipeConfig:
    """The default recipe; one that makes use of the field, where that one does not."""
    config = RecipeConfig()
    if path.partition(".")[0] in ("sample", "rft"):
        config = dataclasses.replace(config, stages=("data", "sft", "rft", "evaluate"))
    if path.startswith("environment.") and path != "environment.name":
        return replace_fields(config, {"environment.name": "desk"})
    if path.startswith("publish.best_"):
        return replace_fields(config, {"publish.which": "best"})
    if path in ("judge.form", "judge.structured_output", "judge.extra_body"):
        return replace_fields(config, {"judge.kind": "openai"})
    if ".health." in path:  # only checks that skip updates decide what is trained
        policies = {p: "skip" for p in FIELDS if p.startswith(path.rpartition(".")[0] + ".")}
        skipping = {p: v for p, v in policies.items() if "skip" in str(FIELDS[p].type)}
        return replace_fields(config, skipping)
    if path.startswith("monitor."):  # only a monitor that may stop the run
        return replace_fields(config, {**WATCHED, "monitor.action": "stop", "monitor.rows": 9})
    if not path.startswith("command."):
        return config
    command = dataclasses.replace(config.command, run="python train.py --out {output}")
    return dataclasses.replace(config, stages=("command", "publish"), command=command)


def fingerprints(config: RecipeConfig) -> dict[str, str]:
    return {s.name: s.fingerprint for s in make_plan(config, {}).stages}


def test_a_field_without_a_mark_is_refused_with_what_to_do() -> None:
    @dataclasses.dataclass(frozen=True)
    class Forgetful:
        rate: float = 0.1

    with pytest.raises(TypeError, match=r"identity\(...\).*execution\(...\)"):
        list(walk(Forgetful))


@pytest.mark.parametrize("path", [p for p in EXECUTION if p not in GRAPH_FIELDS])
def test_execution_fields_never_change_a_fingerprint(path: str) -> None:
    config = config_with(path)
    changed = replace_fields(config, {path: another(FIELDS[path], get_field(config, path))})
    assert changed != config
    assert fingerprints(changed) == fingerprints(config)


@pytest.mark.parametrize("path", [p for p in IDENTITY if p not in GRAPH_FIELDS])
def test_identity_fields_change_a_fingerprint(path: str) -> None:
    config = config_with(path)
    changed = replace_fields(config, {path: another(FIELDS[path], get_field(config, path))})
    assert fingerprints(changed) != fingerprints(config)


WATCHED = {
    "monitor.every": 5,
    "monitor.gold": (parse_protocol('{"name":"g","judge":{"model":"lexical-loose-1"}}').text,),
}
AGENT = {"environment.name": "desk"}
JUDGED = {"judge.kind": "openai", "judge.model": "m", "reward.paper_citation_weight": 0.7}
EASED = {
    **{"grpo.health.kl_blow_up": "stop", "sft.health.loss_spike": "stop"},
    **{"grpo.health.max_kl": 50.0, "grpo.health.patience": 9, "sft.health.spike_factor": 2.0},
}
RFT = {"stages": ("data", "sft", "rft", "grpo", "evaluate")}
EVALUATIONS = "evaluate-base evaluate-sft evaluate-grpo"


@pytest.mark.parametrize(
    ("recipe", "change", "reached"),
    [
        ({}, {"grpo.beta": 0.5}, "grpo evaluate-grpo publish card"),
        ({"seed": 1}, {"seed": 2}, "sft grpo evaluate-sft evaluate-grpo publish card"),
        # A run that a health check has stopped goes on under another policy or limit.
        ({}, EASED, ""),
        ({}, {"grpo.health.kl_blow_up": "skip"}, "grpo evaluate-grpo publish card"),
        # Nor does a monitor matter that cannot end the training.
        ({}, {**WATCHED, "monitor.action": "pause"}, ""),
        ({}, {**WATCHED, "monitor.action": "stop"}, "grpo evaluate-grpo publish card"),
        (RFT, {"rft.learning_rate": 1e-6}, "rft grpo evaluate-rft evaluate-grpo"),
        # An agent is judged by its environment alone.
        (AGENT, JUDGED, ""),
        (
            {**AGENT, "environment.nl_assertions": "judge"},
            JUDGED,
            f"grpo {EVALUATIONS} publish card",
        ),
        (
            AGENT,
            {"environment.max_argument_bytes": 999},
            f"data sft grpo {EVALUATIONS} publish card",
        ),
        (AGENT, {"evaluate.user.model": "m"}, f"{EVALUATIONS} card"),
        (
            {**AGENT, "evaluate.user.model": "m"},
            {"environment.user.temperature": 0.1},
            "grpo evaluate-grpo publish card",
        ),
    ],
)
def test_a_change_reaches_exactly_the_stages_downstream(
    recipe: dict[str, Any], change: dict[str, Any], reached: str
) -> None:
    config = replace_fields(RecipeConfig(), recipe)
    before, after = fingerprints(config), fingerprints(replace_fields(config, change))
    assert [name for name in before if before[name] != after[name]] == reached.split()


def test_dropping_a_stage_changes_only_what_follows_from_it() -> None:
    whole = fingerprints(RecipeConfig())
    part = fingerprints(dataclasses.replace(RecipeConfig(), stages=("data", "sft", "evaluate")))
    assert part == {n: whole[n] for n in ("data", "sft", "evaluate-base", "evaluate-sft")}


def test_contents_are_part_of_a_fingerprint_and_places_are_not() -> None:
    def planned(config: RecipeConfig, rows: str) -> dict[str, str]:
        sources = {"data.sft": "a", "data.rl": rows, "model": "c"}
        return {s.name: s.fingerprint for s in make_plan(config, sources).stages}

    places = {"data.sft_path": "/a.jsonl", "data.rl_path": "/b.jsonl", "model.name_or_path": "m"}
    before = planned(RecipeConfig(), "b")
    assert planned(replace_fields(RecipeConfig(), places), "b") == before
    other = planned(RecipeConfig(), "other")
    assert other["data"] != before["data"]
    assert other["grpo"] != before["grpo"]


def test_a_field_added_later_keeps_old_fingerprints_at_its_legacy_value() -> None:
    legacy = [p for p, info in FIELDS.items() if info.mark == "identity" and _has_legacy(info)]
    assert "reward.instance_rubrics_only" in legacy
    for path in legacy:
        values = identity_values(
            replace_fields(RecipeConfig(), {path: FIELDS[path].legacy_value}), KINDS["grpo"].fields
        )
        assert path not in values


def _has_legacy(info: FieldInfo) -> bool:
    return repr(info.legacy_value) != "ABSENT"


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ((), "at least one"),
        (("sft",), "`data` first"),
        (("data", "publish"), "beside `publish`"),
        (("data", "sft", "command"), "starts from the recipe"),
    ],
)
def test_impossible_stage_lists_are_refused(stages: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make_plan(dataclasses.replace(RecipeConfig(), stages=stages), {})


# ---------------------------------------------------------------- another trainer, and a Hub


def command_config(*stages: str, **command: Any) -> RecipeConfig:
    config = dataclasses.replace(RecipeConfig(), stages=stages)
    return dataclasses.replace(config, command=dataclasses.replace(config.command, **command))


def test_a_command_makes_a_model_that_is_published_and_evaluated() -> None:
    config = command_config("data", "command", "publish", "evaluate", run="train {output}")
    stages = make_plan(config, {}).by_name
    assert stages["command"].inputs == {}
    assert stages["publish"].inputs == {"weights": "command"}
    assert stages["evaluate-command"].inputs == {"data": "data", "weights": "command"}
    assert set(stages) == {
        *("data", "command", "publish", "evaluate-base", "evaluate-command", "card")
    }


def test_a_command_reads_what_its_texts_name() -> None:
    alone = make_plan(command_config("command", run="train {output} ${HOME} {{data}}"), {})
    assert [s.name for s in alone.stages] == ["command"]
    last = command_config("data", "sft", "command", run="train {data} {model} {output}")
    assert make_plan(last, {}).by_name["command"].inputs == {"data": "data", "policy": "sft"}
    one, two = (
        make_plan(command_config("command", run="train {model}"), {"model": m}).by_name["command"]
        for m in ("weights-1", "weights-2")
    )
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({}, "the shell command that trains"),
        ({"run": "x", "adopted": "abc"}, "not both"),
        ({"run": "x {outptu}"}, r"\{outptu\}.*no placeholder but \{output\}"),
        ({"run": "x", "resume_arguments": "--resume {checkpoint}"}, "never reach"),
        ({"run": "x", "step_pattern": "ckpt_("}, "regular expression"),
        ({"run": "x", "complete": "quiet:soon"}, "command.complete"),
        ({"run": "x", "checkpoints": "/abs/*"}, "below"),
        ({"run": "x", "env": ("A",)}, "NAME=VALUE"),
        ({"run": "x", "env": ("HF_TOKEN=abc",)}, "looks like a secret"),
        ({"run": "x", "env": ("MAX_TOKEN_LENGTH=9", "OPENAI_API_KEY=abc")}, "OPENAI_API_KEY"),
    ],
)
def test_a_command_that_cannot_work_is_refused_by_its_field(
    command: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_config(command_config("command", **command))


def test_hub_sources_are_fetched_first_and_change_no_fingerprint() -> None:
    sources = {"model": "hub:a/b@main", "data.sft": "x", "data.rl": "hub:c/d@1/train"}
    plan = make_plan(RecipeConfig(), sources)
    fetch, *others = plan.stages
    assert (fetch.name, fetch.needs_network, fetch.inputs) == ("fetch", True, {})
    assert fetch.sources == {"data.rl": "hub:c/d@1/train", "model": "hub:a/b@main"}
    waiting = {s.name for s in others if s.after == ("fetch",)}
    assert waiting == {"data", "sft", "grpo", "evaluate-base", "evaluate-sft", "evaluate-grpo"}
    assert not any(s.needs_network for s in others)
    local = make_plan(RecipeConfig(), {"model": "x", "data.sft": "x", "data.rl": "x"})
    assert "fetch" not in local.by_name
    assert all("fetch" not in s.inputs for s in others)


def test_seeds_depend_on_what_is_sampled_only() -> None:
    assert derive_seed(1, "rollout", 2, 3, 4) == derive_seed(1, "rollout", 2, 3, 4)
    seeds = {derive_seed(1, "rollout", s, p, k) for s in range(9) for p in range(9) for k in "ab"}
    assert len(seeds) == 9 * 9 * 2
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= s < 2**63 for s in seeds)
    # Samples, shuffles and intervals of recorded runs came of these.
    assert derive_seed(17, "rollout", 3) == 3575481041196190479


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_in_fingerprints(value: float) -> None:
    """NaN is unlike itself: a stage with one would be another one whenever it is looked at."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"grpo.beta": [0.1, value]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        stage_fingerprint("sft", 1, {"sft.learning_rate": value}, {}, {})


def test_a_fingerprint_is_the_hash_of_one_text() -> None:
    parts: dict[str, Any] = {"b": [1, 0.1, None, True], "a": {"d": "é", "c": 1e-7}}
    assert canonical_json(parts) == '{"a":{"c":1e-07,"d":"\\u00e9"},"b":[1,0.1,null,true]}'
    whole = {"kind": "sft", "version": 2, "identity": parts, "sources": {"m": "1"}, "inputs": {}}
    found = stage_fingerprint("sft", 2, parts, {"m": "1"}, {})
    assert found == digest(whole)
    assert found == hashlib.sha256(canonical_json(whole).encode()).hexdigest()


def test_every_error_has_a_documented_exit_code_and_reads_as_one_paragraph() -> None:
    def subclasses(kind: type[RefinerError]) -> set[type[RefinerError]]:
        return {kind, *(s for k in kind.__subclasses__() for s in subclasses(k))}

    for kind in subclasses(RefinerError):
        assert kind.exit_code in EXIT_CODES
        error = kind("It broke", expected="a whole one", fix="glue it")
        assert str(error).startswith("It broke. Expected a whole one. ")
        assert str(error).endswith("glue it.")


def test_only_stage_versions_have_changed_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in KINDS.items():
        monkeypatch.setitem(KINDS, name, dataclasses.replace(kind, version=1))
    config = dataclasses.replace(RecipeConfig(), judge=JudgeConfig(prompt="v1"))
    assert {n: f[:12] for n, f in fingerprints(config).items()} == PINNED_AT_FIRST


# ---------------------------------------------------------------- plans that share a memo


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
