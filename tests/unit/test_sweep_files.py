"""Sweep files: how they are read and refused, and the arms and trials that follow from them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flows.running.calls import make_recipe_plan
from flows.sweeping.launching import record_version
from flows.sweeping.planning import make_sweep_plan, plan_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import load_recipe, override_text, parse_override, read_overrides
from refiner_core.contract.protocols import FIELDS, protocol_text
from sweeps.definition import load_sweep, parse_sweep, shipped_sweeps
from sweeps.planning import find_baseline, make_arms
from sweeps.values import Limits, Question, SweepFile, SweepPlan

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


def test_lists_and_mappings_of_overrides_are_equivalent() -> None:
    listed = sweep(overrides=["sft.max_train_steps=60", "publish.repo_id=me/x-${seed}"])
    mapped = sweep(overrides={"sft": {"max_train_steps": 60}, "publish.repo_id": "me/x-${seed}"})
    for found in (listed, mapped):
        config = load_recipe("tiny", (*found.overrides, "seed=7"))
        assert (config.sft.max_train_steps, config.publish.repo_id) == (60, "me/x-7")


def test_files_are_found_beside_the_sweep(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", shipped_sweeps())
def test_shipped_sweeps_are_found_by_name_and_have_a_question(name: str) -> None:
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
        (
            {"zip": {"grpo.beta": [0, 1], "grpo.learning_rate": [1e-4]}},
            r"differ in length: grpo.beta has 2, grpo.learning_rate has 1",
        ),
        (
            {"factors": {"grpo.beta": [0, 1]}, "arms": {"a": ["grpo.beta=2"]}},
            r"`grpo.beta`.*`factors`.*`arms`",
        ),
        ({"arms": {"a": ["grpo.beta=1", "grpo.beta=2"]}}, r"`arms: a`.*has grpo.beta twice"),
        ({"seeds": 10**12}, r"`seeds` of sweep mine is 1000000000000.*at most 200,000"),
        ({"seeds": [3, 1, 3]}, r"`seeds` of sweep mine has 3 twice.*the same run"),
        ({"limits": {"concurrency": 0}}, r"`limits: concurrency` of sweep mine is 0"),
        ({"question": {"metric": 3}}, r"`question: metric` of sweep mine is 3.*a valid string"),
    ],
)
def test_invalid_keys_are_refused_by_name(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        sweep(**keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe: [tiny", r"cannot be read"),
        ("", r"sweep file is empty"),
        ("recipe: " + "{a: " * 500 + "1" + "}" * 500, r"nested too deeply"),
        ("recipe: tiny\nseeds: 1\nseeds: 2", r"cannot be read.*seeds"),
    ],
)
def test_invalid_text_is_refused(text: str, said: str) -> None:
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
def test_an_unknown_sweep_is_refused_with_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        load_sweep(name)


WEIGHTS = "reward.paper_citation_weight"


def names(found: SweepFile) -> list[str]:
    return [arm.name for arm in make_arms(found)]


def test_a_grid_has_all_levels_of_each_factor_with_all_of_the_others() -> None:
    found = make_arms(sweep(factors={WEIGHTS: [0, 0.5], "grpo.beta": [0.1, 1e-5]}))
    assert [a.name for a in found] == [
        "beta=0.1+paper_citation_weight=0",
        "beta=0.1+paper_citation_weight=0.5",
        "beta=1e-5+paper_citation_weight=0",
        "beta=1e-5+paper_citation_weight=0.5",
    ]
    assert found[1].levels == {"grpo.beta": "0.1", WEIGHTS: "0.5"}
    assert found[1].changes == {"grpo.beta": 0.1, WEIGHTS: 0.5}


def test_fields_of_a_group_change_together() -> None:
    group = {"grpo.beta": [0, 0.1], "grpo.kl_estimator": ["kl2", "kl3"]}
    assert names(sweep(zip=group)) == ["beta=0+kl_estimator=kl2", "beta=0.1+kl_estimator=kl3"]
    found = make_arms(sweep(zip={**group, "labels": ["none", "some"]}))
    assert [a.name for a in found] == ["none", "some"]
    assert found[1].levels == dict.fromkeys(group, "some")
    assert found[1].changes == {"grpo.beta": 0.1, "grpo.kl_estimator": "kl3"}


def test_named_arms_are_combined_with_everything_and_come_first() -> None:
    arms = {"recipe": [], "masked": ["grpo.mask_truncated_completions=true"]}
    assert names(sweep(arms=arms)) == ["recipe", "masked"]
    assert names(sweep(arms=arms, factors={"grpo.beta": [0, 1]})) == [
        "recipe+beta=0",
        "recipe+beta=1",
        "masked+beta=0",
        "masked+beta=1",
    ]


def test_fields_with_the_same_last_word_keep_their_section() -> None:
    found = names(sweep(factors={"sft.learning_rate": [1e-3], "grpo.learning_rate": [1e-4]}))
    assert found == ["grpo.learning_rate=0.0001+sft.learning_rate=0.001"]


def test_exclusions_match_values_or_labels_of_all_fields_they_name() -> None:
    factors = {WEIGHTS: {"none": 0, "some": 0.2}, "grpo.beta": [0, 0.1]}
    by_label = sweep(factors=factors, exclude=[{WEIGHTS: "none", "grpo.beta": 0}])
    by_value = sweep(factors=factors, exclude=[{"reward": {"paper_citation_weight": 0}}])
    assert names(by_label) == ["beta=0+some", "beta=0.1+none", "beta=0.1+some"]
    assert names(by_value) == ["beta=0+some", "beta=0.1+some"]


@pytest.mark.parametrize(
    ("baseline", "name"),
    [
        ("", "beta=0+none"),
        ("beta=0.1+none", "beta=0.1+none"),
        ({"grpo.beta": 0.1, WEIGHTS: "some"}, "beta=0.1+some"),
        ({"grpo": {"beta": "0.1"}, WEIGHTS: 0.2}, "beta=0.1+some"),
    ],
)
def test_the_baseline_is_the_first_arm_or_the_one_that_is_named(baseline: Any, name: str) -> None:
    found = sweep(
        factors={WEIGHTS: {"none": 0, "some": 0.2}, "grpo.beta": [0, 0.1]}, baseline=baseline
    )
    assert find_baseline(found, make_arms(found)) == name


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"baseline": "beta=O"}, r"'beta=O', which no arm is.*'beta=[01]'"),
        ({"baseline": {"grpo.bta": 0}}, r"`baseline`.*`grpo.bta`.*does not vary.*'grpo.beta'"),
        ({"baseline": {"grpo.beta": 7}}, r"names 7 for `grpo.beta`.*none of its levels"),
        ({"exclude": [{"grpo.beta": 7}]}, r"`exclude`.*names 7 for `grpo.beta`"),
        ({"exclude": [{"grpo.beta": 0}, {"grpo.beta": 1}]}, r"leaves none of its 2 arms"),
        ({"zip": {WEIGHTS: [0, 0.1]}, "baseline": {"grpo.beta": 0}}, r"which 2 arms are"),
        ({"arms": {"A": [], "a": ["sft.weight_decay=1"]}}, r"would have the same name"),
    ],
)
def test_levels_and_arms_that_are_not_there_are_refused(keys: dict[str, Any], said: str) -> None:
    found = sweep(factors={"grpo.beta": [0, 1]}, **keys)
    with pytest.raises(ConfigurationError, match=rf"(?s){said}"):
        find_baseline(found, make_arms(found))


def test_a_slip_in_a_grid_does_not_fill_the_memory() -> None:
    many = list(range(1, 1000))
    found = sweep(factors={"sft.pack_length": many, "grpo.num_training_steps": many})
    with pytest.raises(ConfigurationError, match=r"2,994,003 trials \(999 x 999 x 3 seeds\)"):
        make_arms(found)


def test_long_names_are_cut_and_still_tell_arms_apart() -> None:
    long = [f"{'deep/' * 40}{i}" for i in range(3)]
    found = names(sweep(factors={"model.revision": long, "model.chat_template": long}))
    assert len(set(found)) == 9
    assert all(len(name) <= 100 for name in found)


# ---------------------------------------------------------------- whatever a file says

FLOATS = st.floats(0, 1, allow_nan=False).map(lambda x: x + 0.0)
FACTORS = st.fixed_dictionaries(
    {},
    optional={
        "grpo.beta": st.lists(FLOATS, min_size=1, max_size=4, unique=True),
        WEIGHTS: st.lists(FLOATS, min_size=1, max_size=4, unique=True),
        "sft.optimizer": st.just(["adamw", "muon"]),
        "sft.num_train_epochs": st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
        "grpo.stop_strings": st.just([["a"], ["a", "b c"], []]),
    },
)


@given(factors=FACTORS)
@settings(max_examples=25, deadline=None)
def test_names_are_unique_and_fit_for_paths_and_shells(factors: dict[str, list[Any]]) -> None:
    found = names(sweep(factors=factors))
    assert len(set(found)) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.=+_-]*", name) for name in found)


@given(factors=FACTORS, data=st.data())
@settings(max_examples=25, deadline=None)
def test_names_do_not_depend_on_the_order_of_keys_or_on_other_levels(factors, data) -> None:
    """A larger sweep keeps the names of its arms."""
    shuffled = dict(data.draw(st.permutations(list(factors.items()))))
    before = {a.name: a for a in make_arms(sweep(factors=factors))}
    assert {a.name: a for a in make_arms(sweep(factors=shuffled))} == before
    if "sft.num_train_epochs" in factors:
        shuffled["sft.num_train_epochs"] = [*factors["sft.num_train_epochs"], 123]
    after = {a.name: a for a in make_arms(sweep(factors=shuffled))}
    assert {name: after.get(name) for name in before} == before


@given(text=st.text(max_size=30))
@example(text="\\${HOME} and \\\\${x}, as a chat template may have them")
@settings(max_examples=40, deadline=None)
def test_any_text_is_an_override_that_is_read_back_as_it_is(text: str) -> None:
    """Overrides of a trial give the same run when they are typed."""
    from omegaconf import OmegaConf

    written = override_text("model.chat_template", text)
    read = OmegaConf.to_container(parse_override(written), resolve=True)
    assert read == {"model": {"chat_template": text}}
    assert read_overrides([written], Path()) == {"model.chat_template": text}


# ---------------------------------------------------------------- planning


def planned(typed: Sequence[str] = (), **keys: Any) -> SweepPlan:
    keys = {"recipe": "tiny", "seeds": 2, "question": {"metric": "oracle"}, **keys}
    return plan_of(parse_sweep(keys, "mine"), typed)


def fingerprints(plan: SweepPlan) -> dict[str, dict[str, str]]:
    return {t.name: {s.name: s.fingerprint for s in t.plan.stages} for t in plan.trials}


def test_seeds_come_first_so_that_a_sweep_that_ends_early_has_pairs() -> None:
    found = planned(factors={WEIGHTS: {"none": 0, "some": 0.2}})
    assert [t.name for t in found.trials] == [
        "none/seed1",
        "some/seed1",
        "none/seed2",
        "some/seed2",
    ]
    assert found.baseline == "none"


@pytest.mark.parametrize("name", shipped_sweeps())
def test_a_trial_equals_the_run_of_its_overrides(name: str) -> None:
    """Planning of all trials at once equals `refiner run` for each."""
    found = make_sweep_plan(name)
    for trial in (found.trials[0], found.trials[-1]):
        alone = make_recipe_plan(found.sweep.recipe, trial.overrides)
        assert trial.plan.config == alone.config
        assert trial.plan.stages == alone.stages


def test_every_kind_of_value_survives_as_an_override() -> None:
    odd = "{{ m }}: 'é' ${x} \n#"
    found = planned(
        factors={
            "grpo.beta": [1e-5, 2],
            "grpo.mask_truncated_completions": [True, False],
            "sft.max_train_steps": {"all": None, "few": 50},
            "command.env": {"none": [], "two": ["A=1", "B=x y"]},
        },
        arms={
            "odd": {"sft.lr_scheduler_type": "linear", "command.version": odd.replace("${", "\\${")}
        },
        overrides=["stages=[data, sft, grpo, command, evaluate]", "command.run='t {seed} {model}'"],
    )
    for trial in found.trials:
        alone = make_recipe_plan(found.sweep.recipe, trial.overrides)
        assert trial.plan.config == alone.config
        assert alone.config.command.version == odd


def test_a_larger_sweep_keeps_the_fingerprints_of_its_trials() -> None:
    """Only new work runs: the rest is found by its fingerprints."""
    before = fingerprints(planned(factors={WEIGHTS: [0, 0.2]}))
    grown = planned(factors={WEIGHTS: [0.5, 0.2, 0]}, seeds=[7, 2, 1], limits={"concurrency": 1})
    after = fingerprints(grown)
    assert {name: after[name] for name in before} == before
    assert len(after) == 9


def test_a_field_that_follows_from_another_follows_in_every_trial(tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "include: tiny\n"
        "grpo: {temperature: 1.0}\n"
        "evaluate: {temperature: '${grpo.temperature}'}\n"
        "publish: {repo_id: 'me/run-${seed}-{fingerprint}'}\n"
    )
    found = planned(
        recipe=str(recipe),
        overrides=["evaluate.protocols=[held-out-reader-v1]"],
        factors={"grpo.temperature": [0.5, 1]},
        question={"metric": "oracle", "protocol": "held-out-reader-v1"},
    )
    for trial in found.trials:
        config = trial.plan.config
        assert config.evaluate.temperature == config.grpo.temperature
        assert config.publish.repo_id == f"me/run-{trial.seed}-{{fingerprint}}"
        assert trial.plan.stages == make_recipe_plan(str(recipe), trial.overrides).stages


# ---------------------------------------------------------------- what is said before a launch


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"factors": {"grpo.resources.gpus": [1, 2]}},
            r"varies `grpo.resources.gpus`.*never what is computed.*overrides: \[grpo.resources",
        ),
        (
            {"factors": {"grpo.kl_estimator": ["kl2", "kl3"], "grpo.beta": [0, 0.1]}},
            r"beta=0\+kl_estimator=kl3.*`grpo.kl_estimator`.*`grpo.beta` is 0",
        ),
        (
            {
                "overrides": ["stages=[command, publish]", "command.run='train --out {output}'"],
                "question": {},
            },
            r"do not reach arm recipe: `command.run` does not name \{seed\}",
        ),
        (
            {"overrides": ["publish.repo_id=me/{seed}"], "factors": {WEIGHTS: [0, 1]}},
            r"paper_citation_weight=0/seed1 and paper_citation_weight=1/seed1.*'me/1'.*fingerprint",
        ),
        ({"question": {"metric": "orakle"}}, r"`question: metric`.*'orakle'.*'oracle'"),
        ({"question": {"protocol": "x"}}, r"`question: protocol`.*'x'.*evaluate.protocols=\[x\]"),
        (
            {"factors": {"judge.model": ["lexical-1", "lexical-loose-1"]}},
            r"differ in `judge.model`.*measured differently.*held-out-reader-v1",
        ),
        (
            {"factors": {WEIGHTS: [0, 0.5]}, "question": {"metric": "reward"}},
            r"differ in `reward.paper_citation_weight`.*how reward is measured",
        ),
    ],
)
def test_a_sweep_that_could_show_nothing_is_refused_before_it_begins(keys, said) -> None:
    with pytest.raises(RefinerError, match=rf"(?s){said}"):
        planned(**keys)


def test_a_varied_field_cannot_be_set_on_the_command_line() -> None:
    with pytest.raises(ConfigurationError, match=r"varied by `factors`.*set for all trials"):
        planned([f"{WEIGHTS}=1"], factors={WEIGHTS: [0, 0.5]})
    for keys in ({"overrides": ["seed=3"]}, {"factors": {"seed": [1, 2]}}):
        with pytest.raises(ConfigurationError, match=r"`seed` is set or varied.*seeds: \[1, 2, 3"):
            planned(**keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "nothing is compared"),
        ({"factors": {WEIGHTS: [0, 1]}, "question": {}}, "No `question: metric`"),
        ({"overrides": ["stages=[data, sft]"], "question": {}}, "evaluates nothing"),
    ],
)
def test_doubtful_sweeps_have_warnings(keys: dict[str, Any], said: str) -> None:
    assert any(said in warning for warning in planned(**keys).warnings)


# ---------------------------------------------------------------- what is shown


def test_a_protocol_file_that_measures_as_the_recipe_does_answers_its_question(tmp_path) -> None:
    """It has no stages of its own: its numbers are those of the recipe's own protocol."""
    base = load_recipe("tiny")
    own = {p: get_field(base, p) for p in FIELDS if p.startswith(("evaluate.", "reward."))}
    (tmp_path / "mine.yaml").write_text(protocol_text("mine-v1", own))
    place = f"evaluate.protocols=[{tmp_path}/mine.yaml]"
    found = planned(
        [place],
        factors={"grpo.beta": [0.01, 0.1]},
        question={"metric": "oracle", "protocol": "mine-v1"},
    )
    stage = found.trials[0].plan.evaluation("grpo", "mine-v1")
    assert stage.name == "evaluate-grpo"
    assert found.trials[0].plan.evaluation("grpo", "other") is None
    record = record_version(found, Workspace.open(tmp_path / "w"), (), {})
    assert record.question["measured_as"] == ""
