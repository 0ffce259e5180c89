"""Recipes and overrides: values that are read or refused, their JSON Schema, and `refiner show`."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

from flows.cli.main import cli, main
from flows.starting.fields import RecipeValues, field_json, field_lines
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.field_facts import (
    facts_of,
    field_paths,
    fields_below,
    fields_called,
    recipe_schema,
)
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import load_recipe, parse_config
from refiner_core.contract.marks import walk
from refiner_core.contract.plan import make_plan
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import to_json
from tests.support.command import ROOT


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_loads_checks_and_plans(name: str) -> None:
    config = check_config(load_recipe(name))
    assert config.recipe == name
    assert config.description
    assert make_plan(config, {}).stages


def test_the_successor_differs_from_the_seed_in_the_static_rubrics_only() -> None:
    seed, successor = load_recipe("refiner-gpt54"), load_recipe("refiner-instance-only")
    assert successor.reward.instance_rubrics_only is True
    named = {"recipe": seed.recipe, "description": seed.description}
    assert replace_fields(successor, {"reward.instance_rubrics_only": False, **named}) == seed


def test_overrides_are_typed() -> None:
    c = load_recipe("tiny", ["grpo.beta=0", "seed=7", "grpo.learning_rate=1e-5", "data.sft_path=x"])
    assert (c.grpo.beta, c.seed, c.grpo.learning_rate, c.data.sft_path) == (0.0, 7, 1e-5, "x")
    assert isinstance(c.grpo.beta, float)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("beta=1", r"Did you mean 'grpo.beta'\?"),
        ("grpo.beta=high", r"`grpo.beta` is 'high'.*a number"),
        ("grpo.save_freq=2.5", r"`grpo.save_freq` is 2.5.*a whole number"),
        ("seed=true", r"`seed` is True.*a whole number"),
        ("grpo.kl_estimator=kl5", r"one of kl1, kl2, kl3, kl4"),
        ("publish.target=huub", r"Did you mean 'hub'\?"),
        ("grpo=3", r"a mapping of fields"),
        ("grpo.health=off", r"Section `grpo.health` is False.*a mapping of fields"),
        ("nonsense", r"not of the form key=value"),
        ("seed=${nowhere}", r"cannot be resolved"),
        ("description=a: b: c", r"is not YAML.*description='\"…\"'"),
        ("model.revision=1234567", r"`model.revision` is 1234567.*'\"1234567\"'"),
        ("evaluate.models=[sft,sftt]", r"one of base, sft, rft, grpo"),
    ],
)
def test_overrides_that_cannot_be_meant(override: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_recipe("tiny", [override])


def test_every_value_that_does_not_fit_is_named_at_once() -> None:
    wrong = ["grpo.beta=much", "judge.kind=humann", "grpo.learning_rat=1", "seed=1.5"]
    with pytest.raises(ConfigurationError) as refused:
        load_recipe("tiny", wrong)
    said = str(refused.value)
    for part in ("'grpo.learning_rat'", "'grpo.learning_rate'", "'much'", "'humann'", "1.5"):
        assert part in said
    assert said.count("`grpo.beta`") == 1, "once"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward.paper_citation_weight=1.5", "a share between 0 and 1"),
        ("data.held_out_fraction=1", "strictly between 0 and 1"),
        ("grpo.beta=.nan", "a finite number"),
        ("sft.save_freq=0", "at least 1"),
        ("judge.kind=openai", "judge.base_url"),
        ("judge.model=gpt-9", r"lexical-1.*judge\.kind=openai"),
        ("judge.extra_body={messages: []}", "refiner sets itself"),
        ("judge.base_url=localhost:8000", "http:// or https://"),
        ("judge.base_url='http://[::1'", "not a server's address"),
        ("judge.base_url='http://me:secret@host/v1'", "judge.api_key_env"),
        ("data.rl_path=null", "`data.rl_path` is null"),
        ("publish.repo_id=a/{date}", "no placeholders but"),
        ("data.validation_fraction=1", r"a share below 1"),
        ("publish.repo_id=../../etc/x", r"none of them empty, `\.`"),
        ("recipe=a/../../..", r"none of them empty, `\.`"),
        ("dispatch.retries.hung=-3", "-1 for no limit"),
        ("grpo.top_p=0", "above zero"),
        ("evaluate.models=[]", "at least one"),
        ("evaluate.decoding=[greedy,greedy]", "each at most once"),
    ],
)
def test_impossible_combinations_are_refused_with_the_numbers(override: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_config(load_recipe("tiny", [override]))


def test_a_key_in_place_of_its_variable_is_refused_and_not_repeated() -> None:
    """It would stand in every record of the run."""
    with pytest.raises(ConfigurationError, match="never the key itself") as refused:
        check_config(load_recipe("tiny", ["judge.api_key_env=sk-canary-77"]))
    assert "canary" not in str(refused.value)


def test_a_recipe_of_ones_own_may_include_a_shipped_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("include: tiny\nseed: 5\ngrpo: {beta: 0.25}\n")
    c = load_recipe(str(mine), ["grpo.save_freq=3"])
    assert (c.recipe, c.seed, c.grpo.beta, c.grpo.save_freq) == ("mine", 5, 0.25, 3)
    assert c.grpo.num_unique_prompts_rollout == 8
    with pytest.raises(ConfigurationError, match=r"Did you mean 'tiny'\?.*refiner-gpt54"):
        load_recipe("tinny")
    with pytest.raises(ConfigurationError, match=r"no recipe file nowhere/x\.yaml"):
        load_recipe("nowhere/x.yaml")


@pytest.mark.parametrize("override", [(), ("grpo=",), ("grpo.resources=",)])
@pytest.mark.parametrize(
    "empty", ["grpo:\n  # beta: 0.25\n", "grpo:\n  resources:\n    # cpus: 9\n"]
)
def test_an_empty_section_is_ignored(tmp_path: Path, empty: str, override: tuple[str, ...]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"include: tiny-zero3\n{empty}")
    assert load_recipe(str(mine), override).grpo == load_recipe("tiny-zero3").grpo


@pytest.mark.parametrize(
    "text",
    [
        'judge.extra_body={"chat_template_kwargs": {"enable_thinking": false}}',
        "judge.extra_body={chat_template_kwargs: {enable_thinking: false}}",
        """judge.extra_body='{"chat_template_kwargs": {"enable_thinking": false}}'""",
    ],
)
def test_fields_for_a_judges_server_are_json_or_yaml(text: str) -> None:
    """A shell takes the quotes away; what is left is a mapping."""
    config = load_recipe("tiny", [text, "sft.health.loss_spike=off"])
    assert config.judge.extra_body == '{"chat_template_kwargs": {"enable_thinking": false}}'
    assert config.sft.health.loss_spike == "off", "false in YAML, a word here"
    assert parse_config(to_json(config)) == config


# ---------------------------------------------------------------- the JSON Schema


SCHEMA = recipe_schema()
RECIPES = sorted((ROOT / "flows" / "recipes").glob("*.yaml"))


def errors(values: Any) -> list[str]:
    """The errors that the schema finds in a recipe."""
    return [e.message for e in jsonschema.Draft202012Validator(SCHEMA).iter_errors(values)]


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def test_it_is_a_schema_with_marks_and_descriptions() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    beta = SCHEMA["$defs"]["GrpoConfig"]["properties"]["beta"]
    assert beta["x-mark"] == "identity"
    assert "KL" in beta["description"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_fit(path: Path) -> None:
    assert errors(OmegaConf.to_container(OmegaConf.load(path), resolve=False)) == []


@pytest.mark.parametrize(
    "values",
    [
        {"grpo": {"bta": 0.1}},
        {"seed": "one"},
        {"stages": ["data", "sfft"]},
        {"reward": {"paper_citation_weight": 1.5}},
        {"dispatch": {"retries": {"hung": -2}}},
    ],
)
def test_what_refiner_refuses_is_refused(values: dict[str, Any]) -> None:
    assert errors(values)


@pytest.mark.parametrize(
    "values",
    [
        {"include": ["tiny"], "grpo": None, "seed": "${sft.keep}"},
        {"include": "tiny", "grpo": {"first_save": None, "beta": 1}},
    ],
)
def test_what_a_file_may_have_beside_values_fits(values: dict[str, Any]) -> None:
    assert errors(values) == []


@pytest.mark.parametrize(("path", "info"), [(p, i) for p, i in walk(RecipeConfig) if i.range.words])
def test_ranges_are_those_of_the_plan(path: str, info: Any) -> None:
    """One declaration: what the editor underlines is what a plan would refuse."""
    limits, whole = info.range, "int" in str(info.type)
    step = 1 if whole else 0.5
    for low, outside in ((limits.ge, -step), (limits.gt, 0), (limits.le, step)):
        if low is None:
            continue
        value = type(step)(low + outside)
        assert errors(nested(path, value)), path
        config = replace_fields(load_recipe("tiny"), {path: value})
        with pytest.raises(ConfigurationError, match=path.rpartition(".")[2]):
            check_config(config)


def test_show_prints_it_and_init_puts_it_beside_the_recipe(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["show", "--schema"], catch_exceptions=False)
    assert json.loads(done.stdout) == SCHEMA
    CliRunner().invoke(cli, ["init", "here", "--yes"], catch_exceptions=False)
    recipe = (tmp_path / "here" / "recipe.yaml").read_text()
    assert recipe.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert json.loads((tmp_path / "here" / "recipe.schema.json").read_text()) == SCHEMA
    assert errors(OmegaConf.to_container(OmegaConf.create(recipe), resolve=False)) == []


# ---------------------------------------------------------------- refiner show


#: A recipe in which every kind of stage has a place, and values that none has by default.
SOURCES = {"model": "m", "data.sft": "s", "data.rl": "r", "judge_prompt": "j", "rubrics": "u"}


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["show", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_every_field_can_be_shown() -> None:
    found = RecipeValues.read("tiny", ())
    for path in field_paths():
        facts = facts_of(path)
        lines = field_lines(facts, found)
        assert path in lines[0]
        assert facts.mark in "\n".join(lines)
        assert max(map(len, lines)) <= 140, path
        json.dumps(field_json(facts, found))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("grpo.beta", 0.5),
        ("seed", 99),
        ("model.dtype", "bfloat16"),
        ("evaluate.models", ("sft",)),
        ("grpo.resources.gpus", 2),
        ("grpo.health.max_kl", 3.0),
    ],
)
def test_the_stages_named_by_show_are_those_that_run_again(path: str, value: object) -> None:
    stages = ("data", "sft", "rft", "grpo", "publish", "evaluate")
    config = replace_fields(load_recipe("tiny"), {"stages": stages, "evaluate.models": ("grpo",)})
    before = {s.name: s for s in make_plan(config, SOURCES).stages}
    after = make_plan(replace_fields(config, {path: value}), SOURCES).stages
    changed = {
        s.kind
        for s in after
        if s.name in before and dict(s.identity) != dict(before[s.name].identity)
    }
    said = set(facts_of(path).kinds)
    assert changed <= said
    if not facts_of(path).notes:
        assert changed == said & {s.kind for s in after}


def test_the_source_is_the_file_and_line_that_counts(tmp_path, capsys) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("include: tiny\nseed: 5\ngrpo:\n  # more care\n  beta: 0.02\n  keep: ${seed}\n")
    found = RecipeValues.read(str(mine), ["grpo.top_p=0.9"])
    assert found.source("grpo.beta") == f"{mine}:5"
    assert found.source("grpo.top_p") == "override"
    assert found.source("grpo.temperature") == "default"
    assert [s.place for s in found.places("seed")][1:] == [f"{mine}:2"]
    text = shown(capsys, "grpo.keep", str(mine))
    assert "5 in" in text
    assert "takes its value from other fields" in " ".join(text.split())
    lines = Path(shipped_recipes()["tiny"]).read_text().splitlines()
    source = found.source("grpo.num_training_steps")
    assert source.startswith("tiny.yaml:")
    assert "num_training_steps" in lines[int(source.partition(":")[2]) - 1]
    assert "included by mine.yaml" in shown(capsys, "grpo.num_training_steps", str(mine))


@pytest.mark.parametrize("recipe", sorted(shipped_recipes()))
def test_every_value_of_a_shipped_recipe_has_a_source(recipe: str) -> None:
    found = RecipeValues.read(recipe, ())
    defaults = RecipeConfig()
    for path in field_paths():
        if found.value(path) != get_field(defaults, path) and path != "recipe":
            assert found.places(path), path


def test_a_field_is_found_by_its_last_part_or_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert "KL coefficient" in shown(capsys, "beta")
    assert fields_called("learning_rate") == [
        "sft.learning_rate",
        "rft.learning_rate",
        "grpo.learning_rate",
    ]
    lines = shown(capsys, "grpo.curriculum").splitlines()
    assert len(lines) == 1 + len(fields_below("grpo.curriculum"))
    assert "tiny.yaml:" in shown(capsys, "grpo", "tiny")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gropo.beta"], "Did you mean 'grpo.beta'?"),
        (["--search", "xyzzy"], "No field mentions 'xyzzy'"),
        (["grpo.beta", "tiny", "more"], "overrides follow a recipe"),
        (["grpo.beta", "tiny", "grpo.bta=3"], "Did you mean 'grpo.beta'?"),
    ],
)
def test_misspelt_fields_are_refused_with_near_ones(words: list[str], said: str, capsys) -> None:
    assert said in shown(capsys, *words, code=2)


def test_scripts_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = json.loads(shown(capsys, "grpo.kl_estimator", "tiny", "--json"))["fields"][0]
    assert value["choices"] == ["kl1", "kl2", "kl3", "kl4"]
    assert (value["value"], value["source"], value["mark"]) == ("kl3", "default", "identity")
    assert value["stages"] == ["grpo"]
    every = json.loads(shown(capsys, "--all", "--json"))["fields"]
    assert [f["field"] for f in every] == list(field_paths())
    listed = json.loads(shown(capsys, "--json"))["sections"]
    assert {"section": "notify", "doc": "notifications"}.items() <= listed[-1].items()
    found = json.loads(shown(capsys, "--search", "KL coefficient", "--json"))["fields"]
    assert [f["field"] for f in found] == ["grpo.beta"]
