"""Arms are all combinations that are not excluded, and their names stay what they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import override_text, parse_override, read_overrides
from sweeps.definition import parse_sweep, value_text
from sweeps.planning import find_baseline, make_arms
from sweeps.values import SweepFile

WEIGHTS = "reward.paper_citation_weight"


def sweep(**keys: Any) -> SweepFile:
    return parse_sweep({"recipe": "tiny", **keys}, "mine")


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


def test_fields_with_the_same_last_word_are_told_apart() -> None:
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
        ({"exclude": [{"arm": "x"}]}, r"`exclude`.*names `arm`, which it does not vary"),
        ({"exclude": [{"grpo.beta": 0}, {"grpo.beta": 1}]}, r"leaves none of its 2 arms"),
        (
            {"zip": {WEIGHTS: [0, 0.1]}, "baseline": {"grpo.beta": 0}},
            r"which 2 arms are",
        ),
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
def test_names_do_not_depend_on_the_order_of_keys_or_on_other_levels(
    factors: dict[str, list[Any]], data: st.DataObject
) -> None:
    """Else a sweep that grows would not know its own arms again."""
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
    """A trial's overrides are what one types: whatever the value, the same run comes of it."""
    from omegaconf import OmegaConf

    written = override_text("model.chat_template", text)
    read = OmegaConf.to_container(parse_override(written), resolve=True)
    assert read == {"model": {"chat_template": text}}
    assert read_overrides([written], Path()) == {"model.chat_template": text}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-05, "1e-5"),
        (0.25, "0.25"),
        (True, "true"),
        (None, "none"),
        (("a", "b c"), "a-b-c"),
        ("/data/sets/mine.v2.yaml", "mine.v2"),
        ("Qwen/Qwen3-4B", "Qwen-Qwen3-4B"),
        ("…", "empty"),
    ],
)
def test_values_read_as_people_write_them(value: Any, text: str) -> None:
    assert value_text(value) == text
