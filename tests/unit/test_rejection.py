"""Rejection sampling: kept attempts, scores as shares, loss on the ends of turns, and plans."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig, RewardConfig, SampleConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import make_plan
from refiner_core.contract.sections.environment import EnvironmentConfig
from refiner_core.contract.services import asks_judge
from refiner_core.contract.types import PromptRow
from refiner_core.rejection.attempts import RejectionAttempt, choose
from refiner_core.rejection.stage import with_ends_of_turns
from refiner_core.rewards.compute import highest_reward
from tests.support.rewarding import BOTH, EVIDENCE, NEGATIVE, POSITIVE


def candidate(index: int, score: float | None, **changes: Any) -> RejectionAttempt:
    partial = changes.pop("partial", score)
    values: dict[str, Any] = {"text": f"text {index}", **changes}
    return RejectionAttempt(
        "p", "", index, 0, (), ended="stop", score=score, partial=partial, **values
    )


def whys(candidates: list[RejectionAttempt], **rule: Any) -> list[str]:
    return [choice.why for choice in choose(candidates, replace(SampleConfig(), **rule))]


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("scores", "rule", "expected"),
    [
        ((1.0, 0.9, 1.0), {}, ["full_success", "not_full", "full_success"]),
        (
            (0.8, 0.95, 0.7),
            {"success": 0.8, "max_kept": 1},
            ["surplus", "full_success", "not_full"],
        ),
        ((0.5, 0.6, 0.55), {}, ["not_best", "best_partial", "not_best"]),
        ((0.5, 0.6, 0.55), {"min_partial": 0.61}, ["not_best", "too_low", "not_best"]),
        ((0.2, 0.7, 0.7), {}, ["not_best", "best_partial", "not_best"]),  # the first of equals
    ],
)
def test_full_successes_are_kept_or_else_the_best_partial(scores, rule, expected) -> None:
    assert whys([candidate(i, score) for i, score in enumerate(scores)], **rule) == expected


def test_an_episode_is_ranked_by_its_partial_score_and_not_by_its_reward() -> None:
    found = [candidate(0, 0.0, partial=0.9), candidate(1, 0.0, partial=0.3)]
    assert whys(found) == ["best_partial", "not_best"]


@pytest.mark.parametrize("flaw", ["error", "unscored", "malformed", "truncated", "no_reward"])
def test_flawed_attempts_are_never_kept(flaw: str) -> None:
    found = [candidate(0, 1.0, flaw=flaw), candidate(1, 0.7)]
    assert whys(found) == [flaw, "best_partial"]


def test_successes_with_the_same_calls_or_text_are_one_and_take_one_place() -> None:
    orders = (("find", "book"), ("find", "book"), ("book", "find"))
    found = [candidate(i, 1.0, tools=tools) for i, tools in enumerate(orders)]
    assert whys(found) == ["full_success", "duplicate", "full_success"]
    assert whys(found, distinct="none") == ["full_success"] * 3
    assert whys(found, distinct="text") == ["full_success"] * 3
    found = [candidate(i, 1.0, text=text) for i, text in enumerate("aabc")]
    assert whys(found, max_kept=2) == ["full_success", "duplicate", "full_success", "surplus"]


def test_the_choice_does_not_depend_on_the_order_in_which_attempts_are_given() -> None:
    found = [
        candidate(0, 1.0, text="a"),
        candidate(1, 0.9, text="b"),
        candidate(2, 1.0, text="a"),
        candidate(3, 0.9, text="c"),
    ]
    rule = {"success": 0.9, "max_kept": 2}
    wanted = dict(zip(range(4), whys(found, **rule), strict=True))
    for order in itertools.permutations(found):
        assert dict(zip((c.index for c in order), whys(list(order), **rule), strict=True)) == wanted


# ---------------------------------------------------------------- scores of answers


def row(rubrics: Any = BOTH, text: str = EVIDENCE) -> PromptRow:
    empty: dict[str, Any] = {"positive_rubrics": [], "negative_rubrics": []}
    return PromptRow("p", "q", text, (1, 2), json.dumps(rubrics or empty))


def test_the_highest_reward_is_that_of_a_perfect_answer() -> None:
    reward = RewardConfig(verification_reward=10.0, paper_citation_weight=0.2)
    assert highest_reward(row(), reward) == pytest.approx(10.0)
    # Without evidence there is no citation to earn: full marks there are 0.8 of it.
    assert highest_reward(row(text="no evidence"), reward) == pytest.approx(8.0)
    assert highest_reward(row(None), reward) == pytest.approx(10.0)
    assert highest_reward(row(None, "no evidence"), reward) == 0.0


def test_the_highest_reward_under_other_aggregations_is_reachable_and_no_more() -> None:
    additive = RewardConfig(
        verification_reward=1.0, paper_citation_weight=0.5, combination="additive"
    )
    assert highest_reward(row(), additive) == pytest.approx(1.5)
    signed = RewardConfig(
        verification_reward=1.0, apply_paper_citation_reward=False, rubric_aggregation="signed_mean"
    )
    # One rubric to meet and one not to: the mean of +1 and 0.
    assert highest_reward(row(), signed) == pytest.approx(0.5)
    negative = {"positive_rubrics": [], "negative_rubrics": [NEGATIVE]}
    assert highest_reward(row(negative), signed) == 0.0
    two = {"positive_rubrics": [POSITIVE, {**POSITIVE, "title": "P2"}], "negative_rubrics": []}
    summed = replace(signed, rubric_aggregation="positive_sum")
    assert highest_reward(row(two), summed) == pytest.approx(1.0)


# ---------------------------------------------------------------- loss of episodes


def test_the_end_of_each_turn_carries_loss_and_foreign_tokens_do_not() -> None:
    end = (9,)
    ids = [1, 2, 9, 5, 5, 3, 4, 9, 6]
    own = [True, True, False, False, False, True, True, False, False]
    found_ids, loss = with_ends_of_turns(ids, own, end, room=100)
    assert found_ids == (1, 2, 9, 5, 5, 3, 4, 9)
    assert loss == (True, True, True, False, False, True, True, True)
    # A missing last end is appended, up to the context's length; a sampled one is not doubled.
    found = with_ends_of_turns([1, 2], [True, True], end, room=3)
    assert found == ((1, 2, 9), (True, True, True))
    assert with_ends_of_turns([1, 2], [True, True], end, room=2) == ((1, 2), (True, True))
    ids, own = [1, 9, 5, 2, 9], [True, True, False, True, True]
    assert with_ends_of_turns(ids, own, end, room=9) == (tuple(ids), tuple(own))


# ---------------------------------------------------------------- plans


RFT = RecipeConfig(
    stages=("data", "rft"), rft=SftConfig(pack_length=8192), sample=SampleConfig(attempts=2)
)


def with_changes(config: RecipeConfig, **changes: Any) -> RecipeConfig:
    for path, value in changes.items():
        section, _, name = path.partition("__")
        part: Any = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: part})
    return config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sample__attempts": 0}, "sample.attempts"),
        ({"sample__temperature": 0.0}, "sample.temperature"),
        ({"rft__pack_length": 6200}, "rft.pack_length"),
        ({"rft__optimizer": "muon", "rft__deepspeed_stage": 2}, "rft.optimizer"),
        (
            {"sample__generation_backend": "vllm", "grpo__vllm_tensor_parallel_size": 2},
            "sample.resources.gpus",
        ),
    ],
)
def test_impossible_sampling_is_refused_with_its_field(changes: dict[str, Any], field: str) -> None:
    check_config(RFT)
    with pytest.raises(ConfigurationError) as refused:
        check_config(with_changes(RFT, **changes))
    assert field in str(refused.value)


def test_episodes_must_fit_into_a_pack_and_ask_no_judge_as_answers_do() -> None:
    agent = replace(RFT, environment=EnvironmentConfig(name="desk"))
    check_config(agent)
    with pytest.raises(ConfigurationError, match=r"rft\.pack_length"):
        check_config(with_changes(agent, rft__pack_length=8191))
    assert [asks_judge(RFT, stage) for stage in ("sample", "rft")] == [True, False]
    assert not asks_judge(agent, "sample")
    assert asks_judge(with_changes(agent, environment__nl_assertions="judge"), "sample")
    assert not asks_judge(replace(RFT, stages=("data", "sft")))


def test_grpo_starts_from_rft_and_rft_from_samples() -> None:
    sources = {"model": "m", "data.sft": "s", "data.rl": "r"}
    config = replace(RFT, stages=("data", "sft", "rft", "grpo", "evaluate"))
    plan = make_plan(config, sources)
    stages = plan.by_name
    assert stages["sample"].inputs == {"data": "data", "policy": "sft"}
    assert stages["rft"].inputs == {"data": "sample", "policy": "sft"}
    assert stages["grpo"].inputs == {"data": "data", "policy": "rft"}
    assert {"evaluate-sft", "evaluate-rft", "evaluate-grpo"} <= set(stages)
    more = make_plan(with_changes(config, sample__attempts=4), sources).by_name
    same = [name for name in stages if more[name].id == stages[name].id]
    assert same == ["data", "sft", "evaluate-base", "evaluate-sft"]
