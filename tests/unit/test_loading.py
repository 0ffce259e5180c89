"""Recipes and overrides: values that are read, and values that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe, parse_config
from refiner_core.contract.plan import make_plan
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import to_json


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
