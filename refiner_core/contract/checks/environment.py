"""Checks of a recipe with an environment, made when a plan is made.

Limits of the environment itself (an unknown domain, a user without an endpoint) are checked where
it is opened.
"""

from __future__ import annotations

import functools

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import walk
from refiner_core.contract.sections.environment import check_name, check_shaping

#: Name of the environment's own rows, in place of a source.
BUILTIN_ROWS = "builtin:synthetic"
#: Fields without a meaning if there is no environment, or if there is one.
ONLY_OF_AGENTS = ("environment.", "evaluate.user.", "grpo.curriculum.", "grpo.credit")
_NOT_OF_AGENTS = (
    *("data.rl_path", "data.rl_split", "data.rl_revision", "data.held_out_fraction"),
    *("data.refiner_mode", "data.max_rl_rows", "data.synthetic_sft_rows"),
    *("data.synthetic_rl_rows", "data.all_held_out", "grpo.stop_strings"),
)
#: Default values, which count as unset.
_DEFAULTS = {path: [info.default] for path, info in walk(RecipeConfig)}
_DEFAULTS["data.rl_path"].append(None)
_OF_AGENTS = tuple(p for p in _DEFAULTS if p.startswith(ONLY_OF_AGENTS))


def check_environment(config: RecipeConfig) -> None:
    """Refuse an invalid environment.

    Raises
    ------
    ConfigurationError
        A value is impossible, or has no meaning here.
    """
    refuse = functools.partial(refuse_fields, config)
    environment, rows = config.environment, config.data.sft_path
    idle = _NOT_OF_AGENTS if environment.name else _OF_AGENTS
    changed = [path for path in idle if get_field(config, path) not in _DEFAULTS[path]]
    if not environment.name:
        for path in changed:
            refuse(
                True,
                path,
                "environment.name, or the default: the recipe has no environment",
                f"set environment.name=desk (or another), or drop {path}",
            )
        return
    check_shaping(environment.shaping)
    check_name(environment.name)
    for path in changed:
        refuse(
            True,
            f"{path} environment.name",
            "tasks and splits of the environment (environment.tasks, environment.train_split, "
            "environment.test_split, environment.max_train_tasks)",
            f"drop {path}, which has no meaning with an environment",
        )
    refuse(
        environment.train_split == environment.test_split,
        "environment.train_split environment.test_split",
        "two splits without a common task: training tasks are no test",
        "set environment.test_split to another one",
    )
    own_rows = rows in (None, BUILTIN_ROWS)
    refuse(
        "sft" in config.stages and own_rows and not environment.demonstrations,
        "environment.demonstrations data.sft_path",
        "conversations to learn from, because the recipe has an `sft` stage",
        "set environment.demonstrations=500 (where the environment has an expert), or "
        "data.sft_path=FILE",
    )
    refuse(
        environment.demonstrations and not own_rows,
        "environment.demonstrations data.sft_path",
        "one source of demonstrations",
        "drop one of the two",
    )
    refuse(
        environment.name == "tau2" and not environment.user.model,
        "environment.name environment.user.model",
        "a simulated user at an OpenAI-compatible endpoint: tau2-bench has no other user",
        "set environment.user.model=NAME and environment.user.base_url=…",
    )
    low, high = config.grpo.curriculum.low, config.grpo.curriculum.high
    refuse(
        not 0 <= low <= high <= 1,
        "grpo.curriculum.low grpo.curriculum.high",
        "shares with 0 <= low <= high <= 1",
        "set grpo.curriculum.low=0.25 and grpo.curriculum.high=0.75",
    )
