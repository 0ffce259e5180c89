"""Planning of sweeps: trials, overrides, and refusals before a launch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.running.calls import make_recipe_plan
from flows.sweeping.launching import record_version
from flows.sweeping.planning import make_sweep_plan, plan_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.protocols import FIELDS, protocol_text
from sweeps.definition import parse_sweep, shipped_sweeps
from sweeps.values import SweepPlan

WEIGHTS = "reward.paper_citation_weight"


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
