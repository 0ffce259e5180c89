"""`refiner show`: a field's meaning, the stages that it changes, and the source of its value."""

import json
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.starting.fields import (
    OFTEN,
    RecipeValues,
    explain_fields,
    field_json,
    field_lines,
)
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.field_facts import facts_of, field_paths, fields_below, fields_called
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.recipes import shipped_recipes

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


def test_a_section_opens_with_the_fields_that_people_change() -> None:
    """Each of them exists, and none is lost."""
    assert set(OFTEN) <= set(field_paths())
    grpo = [facts.path for facts in explain_fields("grpo").fields]
    assert grpo[:3] == ["grpo.num_training_steps", "grpo.learning_rate", "grpo.beta"]
    assert sorted(grpo) == sorted(p for p in field_paths() if p.startswith("grpo."))
