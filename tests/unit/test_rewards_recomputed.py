"""A stored rollout says what its reward would be under other settings, without asking a judge."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.types import RewardResult
from refiner_core.rewards import RewardInput, compute_rewards
from refiner_core.rewards.combine import total_reward
from tests.support.rewarding import ScriptedJudge, hashed_judge, rollout

PROMPT = "<tool_output><snippet id=a>one</snippet><snippet id=b>two</snippet></tool_output>"


TEXTS = st.sampled_from(
    [
        "<answer>Lead <snippet id=a>one</snippet> and <snippet id='b, z'>two</snippet></answer>",
        "I think: <answer><snippet id=a>one</snippet></answer>",
        "<answer>Nothing is cited here.</answer>",
        "<answer>cut",
        "<answer></answer>",
        "words",
    ]
)
PROMPTS = st.sampled_from([PROMPT, "Only a question."])
RUBRICS = st.lists(st.none() | st.floats(-3, 3), max_size=3).map(
    lambda weights: json.dumps(
        [{"description": f"d{i}", "weight": w} for i, w in enumerate(weights)]
    )
)
REWARDS = st.builds(
    RewardConfig,
    verification_reward=st.sampled_from([0.0, 1.0, 10.0, 0.1]),
    apply_paper_citation_reward=st.booleans(),
    paper_citation_weight=st.floats(0, 1),
    combination=st.sampled_from(["convex", "additive"]),
    gate_judge_score_with_format_bonus=st.booleans(),
    non_stop_penalty=st.booleans(),
    non_stop_penalty_value=st.sampled_from([0.0, -2.0]),
    rubric_source=st.sampled_from(["instance", "static", "instance+static", "none"]),
    instance_rubrics_only=st.booleans(),
    rubric_aggregation=st.sampled_from(["weighted_mean", "signed_mean", "positive_sum"]),
)  # every field: a new one makes this test fail until it is thought about


def rewarded(item: RewardInput, reward: RewardConfig, judge: ScriptedJudge) -> RewardResult:
    return compute_rewards([item], reward, judge)[0]


def test_every_reward_field_is_varied_below() -> None:
    fields = {f for f in RewardConfig.__dataclass_fields__ if f != "static_rubrics"}
    assert fields == set(REWARDS.wrapped_strategy.kwargs)  # type: ignore[attr-defined]


@settings(deadline=None)
@given(TEXTS, PROMPTS, RUBRICS, st.booleans(), REWARDS, st.integers(0, 99))
def test_under_its_own_settings_a_rollout_has_its_own_total(
    text: str, prompt: str, rubrics: str, stopped: bool, reward: RewardConfig, seed: int
) -> None:
    result = rewarded(rollout(text, rubrics, prompt, stopped), reward, hashed_judge(seed))
    stored = json.loads(json.dumps(dict(result.components)))
    assert total_reward(stored, reward, stopped) == result.total == stored["total"]


@settings(deadline=None)
@given(TEXTS, PROMPTS, RUBRICS, st.booleans(), REWARDS, REWARDS, st.integers(0, 99))
def test_other_settings_give_what_they_would_have_given(
    text: str, prompt: str, rubrics: str, stopped: bool, first: RewardConfig,
    second: RewardConfig, seed: int,
) -> None:  # fmt: skip
    """Scale, citation term, gate and penalty; the same rubrics under both."""
    second = replace(
        second,
        rubric_source=first.rubric_source,
        static_rubrics=first.static_rubrics,
        instance_rubrics_only=first.instance_rubrics_only,
        rubric_aggregation=first.rubric_aggregation,
    )
    stored = rewarded(rollout(text, rubrics, prompt, stopped), first, hashed_judge(seed))
    components = dict(stored.components)
    expected = rewarded(rollout(text, rubrics, prompt, stopped), second, hashed_judge(seed))
    assert total_reward(components, second, stopped) == expected.total


def test_an_unscored_rollout_has_no_total_under_any_setting() -> None:
    text = "<answer><snippet id=a>one</snippet></answer>"
    rubrics = json.dumps([{"description": "d"}])
    result = rewarded(rollout(text, rubrics, PROMPT), RewardConfig(), ScriptedJudge(lambda r: None))
    assert result.total is None
    with pytest.raises(DataError, match=r"rubric, citation.*unscored"):
        total_reward(result.components, RewardConfig(), True)
    padded = {**result.components, "rubric": None, "citation": float("nan")}  # as tables hold it
    with pytest.raises(DataError, match=r"rubric, citation.*unscored"):
        total_reward(padded, RewardConfig(), True)
