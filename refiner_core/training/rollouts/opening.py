"""From a recipe to its lane: answers to prompts, or episodes of tasks."""

from __future__ import annotations

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.types import Judge
from refiner_core.environments.protocol import Environment
from refiner_core.training.rollouts.lane import AnswerLane, Lane
from refiner_core.training.rollouts.rollout import RewardFunction


def open_lane(
    config: RecipeConfig,
    *,
    judge: Judge | None,
    rewards: RewardFunction | None,
    environment: Environment | None,
    samples: bool,
) -> Lane:
    """The lane of a recipe.

    Parameters
    ----------
    environment
        The one to use; None opens the recipe's, where it has one and this rank ``samples``.

    Raises
    ------
    ConfigurationError, UnsupportedError
        See :func:`refiner_core.environments.registry.open_environment`.
    """
    if not config.environment.name:
        return AnswerLane(config, judge, rewards)
    from refiner_core.training.rollouts.episode_lane import EpisodeLane

    return EpisodeLane(config, judge, environment, samples=samples)
