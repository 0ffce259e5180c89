"""A sweep file is read as it is meant, or refused with the name of what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import load_recipe
from sweeps.definition import load_sweep, parse_sweep, shipped_sweeps
from sweeps.values import Limits, Question, SweepFile

WHOLE = """
name: mine
recipe: tiny
overrides: {sft: {max_train_steps: 60}, dispatch.max_parallel: 4}
factors:
  reward.paper_citation_weight: [0, 0.2, 1e-5]
  judge.model: {whole: lexical-1, loose: lexical-loose-1}
zip: {grpo.learning_rate: [1e-4, 3e-4], grpo.kl_estimator: [kl2, kl3], labels: [slow, fast]}
arms:
  recipe: []
  masked: [grpo.mask_truncated_completions=true, "grpo.stop_strings=['</answer>']"]
exclude: [{judge.model: loose, reward.paper_citation_weight: 0}]
baseline: {arm: recipe, judge: {model: whole}}
seeds: 2
limits: {concurrency: 2, gpu_hours: 10, disk_gb: 1.5, judge_calls: 1000}
question: {text: Why?, metric: oracle, decoding: sampled, smallest_effect: 0.05}
"""


def sweep(**keys: Any) -> SweepFile:
    return parse_sweep({"recipe": "tiny", **keys}, "mine")


def test_every_key_is_read_with_values_as_their_fields_hold_them() -> None:
    found = parse_sweep(WHOLE, "file")
    assert (found.name, found.recipe, found.seeds) == ("mine", "tiny", (1, 2))
    assert found.overrides == ("sft.max_train_steps=60", "dispatch.max_parallel=4")
    weights = found.factors["reward.paper_citation_weight"]
    assert weights == {"0": 0.0, "0.2": 0.2, "1e-5": 1e-5}
    assert isinstance(weights["0"], float), "or the fingerprint would be another one"
    assert found.factors["judge.model"] == {"whole": "lexical-1", "loose": "lexical-loose-1"}
    assert found.labelled == {"judge.model"}
    assert found.zipped == (
        {"grpo.learning_rate": (1e-4, 3e-4), "grpo.kl_estimator": ("kl2", "kl3")},
    )
    assert found.zip_labels == (("slow", "fast"),)
    assert found.arms["recipe"] == {}
    assert found.arms["masked"] == {
        "grpo.mask_truncated_completions": True,
        "grpo.stop_strings": ("</answer>",),
    }
    assert found.baseline == {"arm": "recipe", "judge.model": "whole"}
    assert found.limits == Limits(2, 10, 1.5, 1000)
    assert found.question == Question("Why?", "oracle", "sampled", smallest_effect=0.05)
    assert found.text == WHOLE, "a workspace keeps the file word for word"


def test_overrides_say_the_same_wherever_they_stand_and_keep_their_interpolations() -> None:
    listed = sweep(overrides=["sft.max_train_steps=60", "publish.repo_id=me/x-${seed}"])
    mapped = sweep(overrides={"sft": {"max_train_steps": 60}, "publish.repo_id": "me/x-${seed}"})
    for found in (listed, mapped):
        config = load_recipe("tiny", (*found.overrides, "seed=7"))
        assert (config.sft.max_train_steps, config.publish.repo_id) == (60, "me/x-7")


def test_files_are_looked_for_beside_the_sweep(tmp_path: Path) -> None:
    """The sweep means the same from every folder: jobs and later calls work elsewhere."""
    rubrics, recipe = tmp_path / "mine.yaml", tmp_path / "own.yaml"
    rubrics.write_text("name: mine")
    recipe.write_text("include: tiny")
    protocol = tmp_path / "yardstick.yaml"
    protocol.write_text("name: yardstick-v1\nevaluate: {num_samples: 2}")
    (tmp_path / "s.yaml").write_text(
        "recipe: own.yaml\n"
        "overrides: ['evaluate.protocols=[yardstick.yaml, held-out-greedy-v1]']\n"
        "factors: {reward.static_rubrics: [v3, mine.yaml]}\n"
    )
    found = load_sweep(str(tmp_path / "s.yaml"))
    assert found.recipe == str(recipe)
    assert found.factors["reward.static_rubrics"] == {"v3": "v3", "mine": str(rubrics)}
    assert found.overrides == (f"evaluate.protocols=[{protocol}, held-out-greedy-v1]",)
    assert len(load_recipe(found.recipe, found.overrides).evaluate.protocols) == 2


def test_a_mapping_for_json_text_is_a_level() -> None:
    found = sweep(factors={"judge.extra_body": {"plain": "", "seeded": {"seed": 1}}})
    assert found.factors["judge.extra_body"]["seeded"] == '{"seed": 1}'


@pytest.mark.parametrize("name", shipped_sweeps())
def test_shipped_sweeps_are_found_by_name_and_say_what_they_ask(name: str) -> None:
    found = load_sweep(name)
    assert found.name == name
    assert len(found.seeds) >= 3
    assert found.question.text.endswith("?")
    assert found.question.metric
    assert f"{name.removesuffix('-tiny')}-tiny" in shipped_sweeps(), "each runs here, too"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"factor": {}}, r"no field `factor`.*mine.*'factors'"),
        ({"grpo": {"beta": 1}}, r"no field `grpo`.*below `overrides:`"),
        ({"factors": {"grpo.betta": [1]}}, r"no field 'grpo.betta'.*factors.*'grpo.beta'"),
        ({"factors": {"grpo.beta": ["a"]}}, r"`grpo.beta` is 'a'.*a number"),
        ({"factors": {"grpo.beta": [0, 0.0]}}, r"`factors: grpo.beta`.*has 0 twice"),
        ({"factors": {"model.revision": ["a b", "a/b"]}}, r"has a-b twice.*labels"),
        ({"factors": {"model.revision": ["${seed}"]}}, r"takes its value from another field"),
        (
            {"zip": {"grpo.beta": [0, 1], "grpo.learning_rate": [1e-4]}},
            r"differ in length: grpo.beta has 2, grpo.learning_rate has 1",
        ),
        (
            {"factors": {"grpo.beta": [0, 1]}, "arms": {"a": ["grpo.beta=2"]}},
            r"`grpo.beta` stands in `factors` and in `arms`",
        ),
        ({"arms": {"a": ["grpo.bta=1"]}}, r"no field 'grpo.bta'.*arms: a.*'grpo.beta'"),
        ({"exclude": ["a"]}, r"`exclude`.*a list of \{field: value or label\}"),
        ({"arms": {"a": ["grpo.beta=1", "grpo.beta=2"]}}, r"`arms: a`.*has grpo.beta twice"),
        ({"seeds": 10**12}, r"`seeds` of sweep mine is 1000000000000.*at most 200,000"),
        ({"seeds": [3, 1, 3]}, r"`seeds` of sweep mine has 3 twice.*the same run"),
        ({"limits": {"concurrency": 0}}, r"`limits: concurrency` of sweep mine is 0"),
        ({"limits": {"disk_gb": float("inf")}}, r"`limits: disk_gb` of sweep mine is inf"),
        ({"question": {"metric": 3}}, r"`question: metric` of sweep mine is 3.*a valid string"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        sweep(**keys)


def test_names_that_yaml_takes_for_numbers_are_names() -> None:
    found = sweep(name=7, arms={1: [], 2: ["grpo.beta=1"]}, baseline=2)
    assert (found.name, list(found.arms), found.baseline) == ("7", ["1", "2"], "2")
    assert sweep(name="").name == "mine", "as the file is called"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: [tiny", r"cannot be read"),
        ("- recipe", r"not a mapping of fields"),
        ("", r"sweep file is empty"),
        ("recipe: " + "{a: " * 500 + "1" + "}" * 500, r"nested too deeply"),
        ("recipe: tiny\nseeds: 1\nseeds: 2", r"cannot be read.*seeds"),
    ],
)
def test_text_that_is_no_sweep_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("citation-wieght", r"no sweep 'citation-wieght'.*'citation-weight'"),
        ("tiny", r"no sweep 'tiny'.*a recipe; `refiner run`"),
        ("none/there.yaml", r"no sweep file none/there.yaml"),
    ],
)
def test_a_sweep_that_is_not_there_is_said_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        load_sweep(name)
