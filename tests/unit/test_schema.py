"""The JSON Schema of recipes: it accepts and refuses what refiner accepts and refuses."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

from flows.cli.main import cli
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.field_facts import recipe_schema
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from tests.support.command import ROOT

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
