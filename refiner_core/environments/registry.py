"""Environments by name: the shipped one, tau2-bench, or a custom file.

In: the configuration, and the agent's user (training and evaluation may differ).
Out: an :class:`~refiner_core.environments.protocol.Environment`, and a digest for plans.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, cast

from refiner_core.contract.config import EnvironmentConfig, RecipeConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import imported_file
from refiner_core.contract.sections.environment import check_name
from refiner_core.contract.types import Judge
from refiner_core.environments.protocol import Environment

DESK, TAU2 = "desk", "tau2"


def user_of(config: RecipeConfig, *, evaluation: bool) -> UserConfig:
    """The user of an evaluation, or of training; an evaluation without its own user has the
    training's."""
    if evaluation and config.evaluate.user.model:
        return config.evaluate.user
    return config.environment.user


def open_environment(
    config: RecipeConfig, *, evaluation: bool, judge: Judge | None = None
) -> Environment:
    """The environment of a recipe.

    ``judge`` is asked about assertions in plain language, if ``environment.nl_assertions`` is
    ``judge``.

    Raises
    ------
    ConfigurationError
        There is none of that name, or it does not support an option (a user of its own, a domain).
    UnsupportedError
        A requirement is not installed here.
    """
    name = config.environment.name
    user = user_of(config, evaluation=evaluation)
    if name == DESK:
        from refiner_core.environments.desk import DeskEnvironment

        return DeskEnvironment(config.environment, user)
    if name == TAU2:
        from refiner_core.environments.tau2 import Tau2Environment

        return Tau2Environment(config.environment, user, judge)
    check_name(name)
    return load_own(config.environment, user)


def environment_digest(config: RecipeConfig) -> str:
    """Digest of the tasks and rules of a recipe's environment, for plans: without torch,
    network or a user simulator."""
    name = config.environment.name
    if name == DESK:
        from refiner_core.environments.desk import desk_digest

        return desk_digest(config.environment)
    if name == TAU2:
        from refiner_core.environments.tau2 import tau2_digest

        return tau2_digest(config.environment)

    return own_digest(config.environment)


def environment_notes(config: RecipeConfig) -> list[str]:
    """Missing requirements of an environment here; needed only to run, not to plan."""
    if config.environment.name != TAU2:
        return []
    from refiner_core.environments.tau2 import missing_tau2

    missing = missing_tau2()
    return [f"Its stages need it where they run: {missing}"] if missing else []


_FIX = "correct it, or the environment section; see refiner_core/environments/README.md"
#: Members of an environment used by the runner, the data stage and protocols.
_NEEDED = (
    *("name", "version", "deterministic", "speak", "finish"),
    *("domains", "tasks", "policy", "tools", "episode", "describe"),
)


def load_own(config: EnvironmentConfig, user: UserConfig) -> Environment:
    """The environment of a file.

    Raises
    ------
    ConfigurationError
        The file or name does not exist, cannot be imported or called, or lacks something.
    """
    file, name = _file_of(config)
    what = f"{name} of {file}"
    try:
        made: Any = getattr(imported_file(file, _FIX), name)(config, user)
    except ConfigurationError:
        raise
    except Exception as error:
        raise _wrong(
            f"{what} cannot be made: {type(error).__name__}: {error}",
            "a class or function that takes (EnvironmentConfig, UserConfig)",
        ) from error
    if missing := [part for part in _NEEDED if not hasattr(made, part)]:
        raise _wrong(
            f"What {what} makes has no {', '.join(missing)}.",
            "all members of refiner_core.environments.protocol.Environment",
        )
    # A recipe that names domains trains on those only, or not at all.
    if config.domains and sorted(made.domains()) != sorted(config.domains):
        raise _wrong(
            f"environment.domains is {', '.join(config.domains)}, and the domains that {what} "
            f"uses are {', '.join(made.domains()) or '(none)'}.",
            "domains() and tasks() to keep to config.domains if that names any",
        )
    return cast("Environment", made)


def _wrong(what: str, expected: str) -> ConfigurationError:
    return ConfigurationError(what, expected=expected, fix=_FIX)


def own_digest(config: EnvironmentConfig) -> str:
    """SHA-256 of the file, and of the tasks' file if there is one."""
    file, name = _file_of(config)
    whole = hashlib.sha256(f"{name}:".encode() + file.read_bytes())
    if config.tasks is not None:
        try:
            whole.update(Path(config.tasks).expanduser().read_bytes())
        except OSError as error:
            raise _wrong(
                f"environment.tasks={config.tasks} cannot be read: {error.strerror or error}.",
                "a file of tasks for the environment, or none for its own",
            ) from error
    return whole.hexdigest()


def _file_of(config: EnvironmentConfig) -> tuple[Path, str]:
    text, _, name = config.name.rpartition(":")
    file = Path(text).expanduser()
    if not file.is_file():
        raise _wrong(
            f"There is no file {file} (environment.name={config.name}).",
            "a Python file; relative paths are those of the folder that refiner runs in, in a "
            "recipe those of the recipe",
        )
    return file.resolve(), name
