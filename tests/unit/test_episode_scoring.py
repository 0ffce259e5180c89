"""Scores of episodes: partial credit, shaped rewards, outages and the curriculum."""

from __future__ import annotations

from typing import Any

import pytest

from infra.jobs.failures import classify
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, EnvironmentOutage
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.sections.environment import (
    EnvironmentConfig,
    ShapingConfig,
    check_weights,
)
from refiner_core.contract.sections.training import CurriculumConfig
from refiner_core.environments.protocol import Check, EpisodeRecord, TurnRecord
from refiner_core.environments.scoring import (
    Curriculum,
    partial_score,
    require_episodes,
    shaped_reward,
)

TAU2 = ShapingConfig(
    alpha=0.25,
    alpha_by_domain=("retail=0.8", "airline=1", "telecom=1.6"),
    weights_by_domain=("telecom.action=0.35", "telecom.communicate=0.35", "telecom.environment=.3"),
)


def checks(**kinds: tuple[int, int]) -> tuple[Check, ...]:
    """``kind=(passed, all)``."""
    return tuple(
        Check(kind, f"{kind}-{i}", i < passed)
        for kind, (passed, total) in kinds.items()
        for i in range(total)
    )


def record(**changes: Any) -> EpisodeRecord:
    """A finished episode of two turns: actions 2/4 and what had to be said."""
    made = checks(action=(2, 4), communicate=(1, 1))
    values: dict[str, Any] = {
        "task_id": "r-1",
        "domain": "retail",
        "seed": 1,
        "status": "finished",
        "ended": "done",
        "first_messages": (("user", "hello"),),
        "turns": (
            TurnRecord("a", "ok", 3, 5, {"name": "look", "arguments": {}}, repaired="what"),
            TurnRecord("b", "ok", 8, 9, {"name": "no", "arguments": {}}, tool_error="wrong_tool"),
        ),
        "reward": 0.0,
        "partial": 0.5,
        "checks": tuple(vars(check) for check in made),
        "components": {"db": 0.0, "communicate": 1.0},
        "failure": "incomplete",
    }
    return EpisodeRecord(**(values | changes))


# ---------------------------------------------------------------- partial credit


@pytest.mark.parametrize(
    ("domain", "kinds", "expected"),
    [
        ("retail", {"action": (2, 4), "communicate": (1, 1)}, 0.4 / 0.65),
        ("retail", {"action": (2, 4)}, 0.5),
        ("retail", {"action": (4, 4), "communicate": (0, 2), "environment": (1, 1)}, 0.85),
        ("telecom", {"action": (2, 4), "communicate": (1, 1)}, 0.525 / 0.7),
        ("telecom", {"action": (0, 1), "communicate": (0, 1), "environment": (1, 1)}, 0.3),
        ("retail", {"nl_assertion": (1, 2)}, None),
        ("retail", {}, None),
    ],
)
def test_partial_is_the_weighted_share_of_the_present_kinds(domain, kinds, expected):
    found = partial_score(checks(**kinds), check_weights(TAU2, domain))
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grpo.curriculum.min_attempts", 0),
        ("grpo.curriculum.low", 0.8),
        ("environment.shaping.alpha", -0.1),
        ("environment.shaping.alpha_by_domain", ("a=1", "a=2")),
        ("environment.shaping.weights", ("action=-1",)),
        ("environment.shaping.weights_by_domain", ("t=1",)),
    ],
)
def test_invalid_settings_are_refused_with_their_field(field: str, value: Any) -> None:
    agent = {"environment.name": "desk", "environment.demonstrations": 10}
    with pytest.raises(ConfigurationError, match=field):
        check_config(replace_fields(RecipeConfig(), agent | {field: value}))


# ---------------------------------------------------------------- the reward


def test_the_total_is_reward_plus_alpha_times_partial() -> None:
    found = shaped_reward(record(), EnvironmentConfig(shaping=TAU2))
    assert found.status == "scored"
    assert found.total == pytest.approx(0.2 * 0.4 / 0.65)
    assert found.components == pytest.approx(
        {
            "reward": 0.0,
            "partial": 0.4 / 0.65,
            "alpha": 0.2,
            "success": 0.0,
            "turns": 2.0,
            "repairs": 1.0,
            "tool_errors": 1.0,
            "environment_db": 0.0,
            "environment_communicate": 1.0,
        }
    )
    solved = record(
        reward=1.0, failure=None, checks=tuple(map(vars, checks(action=(4, 4)))), domain="telecom"
    )
    assert shaped_reward(solved, EnvironmentConfig(shaping=TAU2)).total == pytest.approx(1.4)


def test_an_episode_that_ends_without_a_call_is_worth_nothing() -> None:
    """Otherwise a policy would be paid for calls that it cannot finish."""
    broken = record(ended="no_call", failure="no_call", reward=1.0)
    found = shaped_reward(broken, EnvironmentConfig(shaping=TAU2))
    assert (found.status, found.total) == ("malformed", 0.0)
    assert found.components["partial"] == pytest.approx(0.4 / 0.65)


def test_excluded_episodes_are_no_errors() -> None:
    excluded = shaped_reward(
        record(ended="no_call", failure="no_call"), EnvironmentConfig(unparsable="exclude")
    )
    failed = shaped_reward(
        record(status="error", ended="error", reward=None, error_kind="user_down", error="gone"),
        EnvironmentConfig(),
    )
    assert (excluded.status, excluded.total) == ("unscored", None)
    assert (failed.status, failed.total) == ("unscored", None)
    require_episodes([("user_down", "gone")], 10, 0.1, of="episodes of a step")
    with pytest.raises(EnvironmentOutage) as met:
        require_episodes([("user_down", "gone")] * 2, 4, 0.4, of="episodes of a step")
    assert "2 of 4 episodes of a step: user_down (2 times); for one: gone" in str(met.value)
    assert "environment.max_error_share" in str(met.value)
    outcome = classify(met.value)
    assert (outcome.failure, outcome.decision, outcome.exit_code) == (
        *("environment_outage", "resume"),
        7,
    )


# ---------------------------------------------------------------- curriculum


def test_tasks_that_teach_little_weigh_less_after_enough_attempts() -> None:
    curriculum = Curriculum(CurriculumConfig(enabled=True))
    for task, attempts, successes in (
        ("few", 4, 4),
        ("easy", 5, 4),
        ("hard", 5, 1),
        ("between", 5, 3),
        ("at the upper edge", 8, 6),
        ("at the lower edge", 8, 2),
    ):
        curriculum.count(task, attempts, successes)
    assert [curriculum.weight(task) for task in ("new", "few", "easy", "hard", "between")] == [
        *(1.0, 1.0, 0.1, 0.5, 1.0)
    ]
    assert curriculum.weight("at the upper edge") == curriculum.weight("at the lower edge") == 1.0
