"""Environments by name: the shipped one, tau2-bench, or a file of one's own.

In: the configuration, and which user the agent talks to (training and evaluation may have another).
Out: an :class:`~refiner_core.environments.protocol.Environment`, and a digest for plans.
"""

from __future__ import annotations

from refiner_core.contract.config import RecipeConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Judge
from refiner_core.environments.protocol import Environment

DESK, TAU2 = "desk", "tau2"


def user_of(config: RecipeConfig, *, evaluation: bool) -> UserConfig:
    """The user of an evaluation, or of training; an evaluation without one of its own has the
    training's."""
    if evaluation and config.evaluate.user.model:
        return config.evaluate.user
    return config.environment.user


def open_environment(
    config: RecipeConfig, *, evaluation: bool, judge: Judge | None = None
) -> Environment:
    """The environment of a recipe.

    ``judge`` is asked about assertions in plain language, where ``environment.nl_assertions`` says
    so.

    Raises
    ------
    ConfigurationError
        There is none of that name, or it cannot be what is asked (a user of its own, a domain).
    UnsupportedError
        What it needs is not installed here.
    """
    name = config.environment.name
    user = user_of(config, evaluation=evaluation)
    if name == DESK:
        from refiner_core.environments.desk import DeskEnvironment

        return DeskEnvironment(config.environment, user)
    if name == TAU2:
        from refiner_core.environments.tau2 import Tau2Environment

        return Tau2Environment(config.environment, user, judge)
    if ".py:" in name:
        from refiner_core.environments.own import load_own

        return load_own(config.environment, user)
    raise ConfigurationError(
        f"There is no environment {name!r} (environment.name).",
        expected="`desk`, `tau2`, or FILE.py:NAME",
        fix="correct environment.name, or leave it empty for the refiner's task",
    )


def environment_digest(config: RecipeConfig) -> str:
    """What identifies the tasks and rules of a recipe's environment, for plans: without torch,
    network or a user simulator."""
    name = config.environment.name
    if name == DESK:
        from refiner_core.environments.desk import desk_digest

        return desk_digest(config.environment)
    if name == TAU2:
        from refiner_core.environments.tau2 import tau2_digest

        return tau2_digest(config.environment)
    from refiner_core.environments.own import own_digest

    return own_digest(config.environment)


def environment_notes(config: RecipeConfig) -> list[str]:
    """What an environment still lacks here; it is not needed to plan, only to run."""
    if config.environment.name != TAU2:
        return []
    from refiner_core.environments.tau2 import missing_tau2

    missing = missing_tau2()
    return [f"Where its stages run it is needed: {missing}"] if missing else []
