"""Rubrics: forms of rows, static sets and files, pinned wording, and selection."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.checking.sources import resolve_sources
from flows.stages.work import judged_as_planned
from refiner_core.contract.config import RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import StageSpec
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.rubrics import (
    Rubric,
    load_rubric_set,
    normalise_rubrics,
    parse_rubrics,
    rubric_set_digest,
    select_rubrics,
)
from tests.support.rewarding import GOOD, by_kind, reward_of, rollout

PINNED = {
    "v3": "4cf5e50e9dedd8273665e8ce2b091373a11357c98709d714826b2af60a1173a5",
    "grounded-v1": "300e0509cc8549e3bd13554af2b989fbbd6fa960e25bf89c79ec246a421b5def",
    "reader-v1": "115449232efed8797a04f72f8aa0e4264eee0b3f274bdcefb22528278ad714ad",
    "overall-v1": "60771006fadf960a47ef7f84885acd6b3f557581f4de8f9e3397fbbcdb4c325f",
}
ROW = json.dumps(
    {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 0.5}],
        "negative_rubrics": [{"title": "n", "description": "says n"}],
    }
)


def test_both_forms_of_rubrics_are_read_and_a_negative_weight_marks_a_fault() -> None:
    assert parse_rubrics(ROW) == (
        Rubric("p", "says p", "positive", 0.5),
        Rubric("n", "says n", "negative", 1.0),
    )
    entry = {"title": "n", "description": "says n", "weight": -2}
    truth = {"query": "q", "rubrics": [entry, {"title": "p", "description": "says p", "weight": 3}]}
    expected = {
        "positive_rubrics": [{"title": "p", "description": "says p", "weight": 3.0}],
        "negative_rubrics": [{"title": "n", "description": "says n", "weight": 2.0}],
    }
    for form in (truth, json.dumps(truth), truth["rubrics"]):
        assert normalise_rubrics(form) == expected
    for key in ("positive_rubrics", "negative_rubrics"):
        (rubric,) = parse_rubrics({key: [entry]})
        assert (rubric.polarity, rubric.weight, rubric.signed_weight) == ("negative", 2.0, -2.0)
    for empty in (None, " ", "{}", "null", {"negative_rubrics": None}, []):
        assert parse_rubrics(empty) == ()


@pytest.mark.parametrize(
    ("obj", "named"),
    [
        ("{not json", "not JSON"),
        ({"positive_rubrics": ["text"]}, r"positive_rubrics\[0\]"),
        ({"rubrics": [{"description": "d"}, {"title": "t"}]}, r"rubrics\[1\].*description"),
        ({"rubrics": [{"description": "d", "weight": math.nan}]}, "weight"),
        ('{"rubrics": [{"description": "d", "weight": Infinity}]}', "weight"),
    ],
)
def test_malformed_rubrics_are_refused_with_their_place(obj: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        normalise_rubrics(obj)


# ---------------------------------------------------------------- static sets


@pytest.mark.parametrize("name", PINNED)
def test_the_wording_of_shipped_sets_is_pinned(name: str) -> None:
    """Finished runs name their set: another wording is another set (add a file)."""
    assert rubric_set_digest(name) == PINNED[name]


def test_a_user_adds_a_set_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("rubrics:\n  - {title: t, description: d}\n")
    mine = load_rubric_set(str(path))
    assert mine.rubrics == (Rubric("t", "d", "positive", 1.0, "mine"),)
    before = rubric_set_digest(str(path))
    path.write_text("# note\nversion: 2\nrubrics:\n  - {title: t, description: d, weight: 1}\n")
    assert rubric_set_digest(str(path)) == before
    path.write_text("rubrics:\n  - {title: t, description: another}\n")
    assert rubric_set_digest(str(path)) != before


@pytest.mark.parametrize("name", ["v99", "nowhere.yaml", ".", "x" * 5000])
def test_an_unknown_set_is_refused_and_the_known_ones_listed(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"v3.*reward\.static_rubrics"):
        load_rubric_set(name)


# ---------------------------------------------------------------- what was planned


def write_set(path: Path, wording: str) -> Path:
    path.write_text(f"rubrics:\n  - {{title: t, description: {wording}}}\n")
    return path


def test_a_stage_judges_by_its_planned_wording_and_is_refused_once_it_was_edited(tmp_path) -> None:
    path = write_set(tmp_path / "mine.yaml", "as planned")
    reward = RewardConfig(rubric_source="static", static_rubrics=str(path))
    config = replace(RecipeConfig(), reward=reward)
    planned = rubric_set_digest(str(path))
    spec = StageSpec(1, "grpo", "grpo", "f" * 64, "grpo", 1, {}, {"rubrics": planned}, {})
    path.write_text(f"# a note, and another version\nversion: 2\n{path.read_text()}")
    with judged_as_planned(spec, config):
        path.unlink()
        assert [r.description for r in select_rubrics(None, reward)] == ["as planned"]
    write_set(path, "edited meanwhile")
    assert [r.description for r in select_rubrics(None, reward)] == ["edited meanwhile"]
    changed = rf"changed.*{planned[:12]}.*run the recipe again"
    with pytest.raises(ConfigurationError, match=changed), judged_as_planned(spec, config):
        pytest.fail("the stage has begun")
    path.unlink()
    with pytest.raises(ConfigurationError, match="no rubric set"), judged_as_planned(spec, config):
        pytest.fail("the stage has begun")


# ---------------------------------------------------------------- selection


@pytest.mark.parametrize(
    ("source", "only_instance", "titles"),
    [
        ("none", False, ""),
        ("instance", False, "pn"),
        ("static", False, "COW"),
        ("instance+static", False, "pnCOW"),
        ("instance+static", True, "pn"),
    ],
)
def test_the_source_decides_which_rubrics_are_asked(source, only_instance, titles) -> None:
    """``instance_rubrics_only`` costs no judgement of a static rubric."""
    reward = replace(RewardConfig(), rubric_source=source, instance_rubrics_only=only_instance)
    assert "".join(r.title[0] for r in select_rubrics(ROW, reward)) == titles
    judge = by_kind()
    result = reward_of(rollout(GOOD, ROW), judge, **vars(reward))
    logged = [j["title"][0] for j in result.judgements if j["kind"] == "rubric"]
    assert "".join(logged) == titles
    assert len([r for r in judge.asked if r.kind == "rubric"]) == len(titles)
    assert result.components["no_rubrics"] == float(not titles)


# ---------------------------------------------------------------- files of a recipe

SET = "name: mine\nrubrics:\n  - {title: t, description: Names the year of the opening.}\n"
STATIC = "reward.rubric_source=instance+static"


def experiment(folder: Path) -> Path:
    """A recipe with a rubric file beside it."""
    (folder / "rubrics").mkdir(parents=True)
    (folder / "rubrics" / "mine.yaml").write_text(SET)
    recipe = folder / "recipe.yaml"
    recipe.write_text("include: tiny\nreward:\n  rubric_source: instance+static\n"
                      "  static_rubrics: ./rubrics/mine.yaml\n")  # fmt: skip
    return recipe


def test_a_file_is_found_beside_its_recipe_or_its_override(tmp_path, monkeypatch) -> None:
    recipe = experiment(tmp_path / "mine")
    beside = load_recipe(str(recipe))
    monkeypatch.chdir(tmp_path / "mine")
    overridden = load_recipe("tiny", [STATIC, "reward.static_rubrics=rubrics/mine.yaml"])
    missing = load_recipe("tiny", [STATIC, "reward.static_rubrics=no/such.yaml"])
    (tmp_path / "mine" / "v3").write_text(SET)
    shipped = load_recipe("tiny", ["reward.static_rubrics=v3"])
    monkeypatch.chdir("/")  # a job
    for config in (beside, overridden):
        assert load_rubric_set(config.reward.static_rubrics).name == "mine"
        assert Path(config.reward.static_rubrics).is_absolute()
    with pytest.raises(ConfigurationError, match=r"no/such\.yaml"):
        resolve_sources(missing)
    assert shipped.reward.static_rubrics == "v3", "names of shipped sets stay names"


def test_stages_and_protocols_depend_on_the_content_of_rubrics_alone(tmp_path) -> None:
    def fingerprint(config: RecipeConfig) -> str:
        return make_plan(config, resolve_sources(config)).by_name["grpo"].fingerprint

    here, there = (load_recipe(str(experiment(tmp_path / name))) for name in ("here", "there"))
    assert fingerprint(here) == fingerprint(there)
    protocols = [make_protocol(c, [], "greedy", "d") for c in (here, there)]
    assert protocols[0] == protocols[1]
    assert protocols[0].rubrics["static"] == "mine"
    Path(there.reward.static_rubrics).write_text(SET.replace("year", "date"))
    assert fingerprint(here) != fingerprint(there)
    v3 = replace(here, reward=replace(here.reward, static_rubrics="v3"))
    assert make_protocol(v3, [], "greedy", "d").rubrics["static"] == "v3"
    assert "reward.static_rubrics" in make_plan(v3, resolve_sources(v3)).by_name["grpo"].identity
