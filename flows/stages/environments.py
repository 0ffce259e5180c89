"""The environment of a stage: what it was planned with, or the stage is refused.

In: the sources of a stage and its configuration. Out: the digest of the environment. One of one's
own is a file that may be edited between plan and job; half a run under other rules is worse than
none.
"""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError


def as_planned(sources: Mapping[str, str], config: RecipeConfig) -> str:
    """The digest of a stage's environment; empty where it has none. ``sources`` are the stage's.

    Raises
    ------
    ConfigurationError
        Its tasks or rules are not those that the stage was planned with.
    """
    if not config.environment.name:
        return ""
    from refiner_core.environments.registry import environment_digest

    planned, found = sources.get("environment", ""), environment_digest(config)
    if found != planned:
        raise ConfigurationError(
            f"The environment {config.environment.name} is not what this stage was planned with: "
            f"its digest is {found[:24]}, and was {planned[:24]}.",
            expected="the same tasks and rules from the plan to the last attempt",
            fix="put the file back as it was, or run the recipe again, which plans it anew",
        )
    return found
