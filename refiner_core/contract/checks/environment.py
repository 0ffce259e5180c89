"""Checks of a recipe with an environment, made when a plan is made.

What an environment itself cannot do (a domain that it does not have, a user without an endpoint) is
refused where it is opened.
"""

from __future__ import annotations

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.sections.environment import check_name, check_shaping, check_user
from refiner_core.contract.sections.training import check_curriculum

#: In the place of a source of rows: what the environment itself has.
BUILTIN_ROWS = "builtin:synthetic"
#: Fields that mean nothing without an environment, or nothing with one.
ONLY_OF_AGENTS = ("environment.", "evaluate.user.", "grpo.curriculum.", "grpo.credit")
_NOT_OF_AGENTS = (
    "data.rl_path",
    "data.rl_split",
    "data.rl_revision",
    "data.held_out_fraction",
    "data.refiner_mode",
    "data.max_rl_rows",
    "data.synthetic_sft_rows",
    "data.synthetic_rl_rows",
    "data.all_held_out",
    "grpo.stop_strings",
)


_DEFAULTS = {path: info.default for path, info in walk(RecipeConfig)}
_OF_AGENTS = tuple(p for p in _DEFAULTS if p.startswith(ONLY_OF_AGENTS))


def check_environment(config: RecipeConfig) -> None:
    """Refuse what cannot be meant.

    Raises
    ------
    ConfigurationError
        A value is impossible, or is set where it means nothing.
    """
    if not config.environment.name:
        _refuse_without(config)
        return
    _check_splits(config)
    check_shaping(config.environment.shaping)
    check_name(config.environment.name)
    _refuse_with(config)
    _check_demonstrations(config)
    check_user("environment", config.environment.user)
    check_user("evaluate", config.evaluate.user)
    _check_user_of_tau2(config)
    check_curriculum(config.grpo.curriculum)


def _refuse_without(config: RecipeConfig) -> None:
    """A recipe without an environment that sets something of one means another recipe."""
    for path in _OF_AGENTS:
        value = get_field(config, path)
        if value != _DEFAULTS[path]:
            raise ConfigurationError(
                f"`{path}` is {_shown(value)}, but the recipe has no environment.",
                expected="environment.name, or the default of what only an agent's recipe has",
                fix=f"set environment.name=desk (or another), or drop {path}",
            )


def _refuse_with(config: RecipeConfig) -> None:
    for path in _NOT_OF_AGENTS:
        value = get_field(config, path)
        if value != _DEFAULTS[path] and not (path == "data.rl_path" and value is None):
            raise ConfigurationError(
                f"`{path}` is {_shown(value)}, which means nothing with environment.name="
                f"{config.environment.name}.",
                expected="tasks and splits of the environment (environment.tasks, "
                "environment.train_split, environment.test_split, environment.max_train_tasks)",
                fix=f"drop {path}",
            )


def _check_splits(config: RecipeConfig) -> None:
    if config.environment.train_split == config.environment.test_split:
        raise ConfigurationError(
            "`environment.train_split` and `environment.test_split` are both "
            f"{config.environment.test_split!r}: the tasks of training are no test of it.",
            expected="two splits that share no task",
            fix="set environment.test_split to another one",
        )


def _check_demonstrations(config: RecipeConfig) -> None:
    environment, own_rows = config.environment, config.data.sft_path in (None, BUILTIN_ROWS)
    if "sft" in config.stages and own_rows and not environment.demonstrations:
        raise ConfigurationError(
            "The recipe has an `sft` stage, but no demonstrations: data.sft_path names no file, "
            "and environment.demonstrations is 0.",
            expected="conversations to learn from",
            fix="set environment.demonstrations=500 (where the environment has an expert), or "
            "data.sft_path=FILE",
        )
    if environment.demonstrations and not own_rows:
        raise ConfigurationError(
            f"Demonstrations come from data.sft_path={config.data.sft_path}, and "
            f"environment.demonstrations is {environment.demonstrations}.",
            expected="one source of demonstrations",
            fix="drop one of the two",
        )


def _check_user_of_tau2(config: RecipeConfig) -> None:
    if config.environment.name == "tau2" and not config.environment.user.model:
        raise ConfigurationError(
            "`environment.user.model` is empty, and tau2-bench has no user without a model.",
            expected="a simulated user at an OpenAI-compatible endpoint",
            fix="set environment.user.model=NAME and environment.user.base_url=…",
        )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
