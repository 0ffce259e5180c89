"""A rubric file that a recipe names is found by every job, and is known by what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flows.checking.sources import resolve_sources
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.rubrics import load_rubric_set

SET = "name: mine\nrubrics:\n  - {title: t, description: Names the year of the opening.}\n"
STATIC = "reward.rubric_source=instance+static"


def experiment(folder: Path, named: str = "rubrics/mine.yaml") -> Path:
    """A recipe with a rubric file beside it."""
    (folder / "rubrics").mkdir(parents=True)
    (folder / "rubrics" / "mine.yaml").write_text(SET)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"include: tiny\nreward:\n  rubric_source: instance+static\n  static_rubrics: {named}\n"
    )
    return recipe


def fingerprint(config: RecipeConfig) -> str:
    return make_plan(config, resolve_sources(config)).by_name["grpo"].fingerprint


@pytest.mark.parametrize("named", ["rubrics/mine.yaml", "./rubrics/mine.yaml"])
def test_a_file_beside_the_recipe_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    recipe = experiment(tmp_path / "mine", named)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_recipe(str(recipe))
    monkeypatch.chdir("/")  # a job
    assert load_rubric_set(config.reward.static_rubrics).name == "mine"
    assert Path(config.reward.static_rubrics).is_absolute()


def test_a_file_in_an_override_is_taken_from_the_callers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    config = load_recipe("tiny", [STATIC, "reward.static_rubrics=rubrics/mine.yaml"])
    monkeypatch.chdir("/")
    assert load_rubric_set(config.reward.static_rubrics).name == "mine"


def test_names_of_shipped_sets_and_missing_files_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v3").write_text(SET)
    assert load_recipe("tiny", ["reward.static_rubrics=v3"]).reward.static_rubrics == "v3"
    config = load_recipe("tiny", [STATIC, "reward.static_rubrics=no/such.yaml"])
    with pytest.raises(ConfigurationError, match=r"no/such\.yaml"):
        resolve_sources(config)


def test_a_stage_is_what_its_rubrics_say_wherever_they_lie(tmp_path: Path) -> None:
    here, there = (load_recipe(str(experiment(tmp_path / name))) for name in ("here", "there"))
    assert fingerprint(here) == fingerprint(there)
    Path(there.reward.static_rubrics).write_text(SET.replace("year", "date"))
    assert fingerprint(here) != fingerprint(there)


def test_so_is_a_protocol_and_shipped_sets_keep_theirs(tmp_path: Path) -> None:
    here, there = (load_recipe(str(experiment(tmp_path / name))) for name in ("here", "there"))
    protocols = [make_protocol(c, [], "greedy", "d") for c in (here, there)]
    assert protocols[0] == protocols[1]
    assert protocols[0].rubrics["static"] == "mine"
    v3 = replace(here, reward=replace(here.reward, static_rubrics="v3"))
    assert make_protocol(v3, [], "greedy", "d").rubrics["static"] == "v3"
    assert "reward.static_rubrics" in make_plan(v3, resolve_sources(v3)).by_name["grpo"].identity
