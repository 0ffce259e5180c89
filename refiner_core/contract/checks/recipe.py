"""Checks across fields, made when a plan is made: impossible sizes are refused with the numbers.

Nothing here looks at the world; what the machine lacks is found at run time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from refiner_core.contract.checks.environment import check_environment
from refiner_core.contract.checks.secrets import check_secrets
from refiner_core.contract.checks.training import check_sampling, check_training
from refiner_core.contract.config import (
    RecipeConfig,
)
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import kinds_of
from refiner_core.contract.marks import walk
from refiner_core.contract.placement import STAGES
from refiner_core.contract.protocols import configs_under, refused_under
from refiner_core.contract.sections.command import check_command
from refiner_core.contract.sections.judging import addresses_of, refused_in_judge
from refiner_core.contract.sections.publish import refused_in_publish
from refiner_core.contract.sections.steering import Refusal, check_notify
from refiner_core.contract.services import asks_judge, serves


def _in_data(c: RecipeConfig) -> Iterator[Refusal]:
    data, trains_here = c.data, set(STAGES) & set(c.stages)
    if data.sft_path is None and "sft" in c.stages and not c.environment.name:
        yield (
            "The recipe has an `sft` stage, but `data.sft_path` is empty.",
            "demonstrations to train on",
            "set data.sft_path=FILE, or drop `sft` from `stages`",
        )
    on_prompts = any(kind.on_prompts for kind in kinds_of(c.stages))
    if data.rl_path is None and on_prompts and not c.environment.name:
        yield (
            "The recipe trains or evaluates on prompts, but `data.rl_path` is empty.",
            "prompts with rubrics",
            "set data.rl_path=FILE",
        )
    if data.all_held_out and trains_here:
        yield (
            "`data.all_held_out` is true, but the recipe trains.",
            "prompts to train on",
            "drop data.all_held_out; another set to evaluate on is named in a protocol file's "
            "`data`",
        )


def _in_judge(c: RecipeConfig) -> Iterator[Refusal]:
    judge, source = c.judge, c.reward.rubric_source
    if c.reward.instance_rubrics_only and source in ("static", "none"):
        yield (
            f"`reward.instance_rubrics_only` is true but `reward.rubric_source` is {source}: no "
            "rubric would be left.",
            "rubric_source `instance` or `instance+static`",
            "change one of the two",
        )
    if asks_judge(c) and judge.kind == "openai" and not (addresses_of(judge) or serves(judge)):
        yield (
            "`judge.kind` is openai, but neither an address nor a server to start is given.",
            "judge.base_url (a running server), or judge.serve.engine (one that refiner starts)",
            "set judge.base_url=http://127.0.0.1:8000/v1",
        )
    yield from refused_in_judge(judge)


def _in_publish(c: RecipeConfig) -> Iterator[Refusal]:
    publish, repository = c.publish, _repository(c)
    if repository is None:
        yield (
            f"`publish.repo_id` is {publish.repo_id!r}.",
            "only the placeholders {recipe}, {seed}, {step} and {fingerprint}",
            "correct publish.repo_id",
        )
    if any(part in ("", ".", "..") for part in (repository or "").split("/")):
        yield (
            f"`publish.repo_id` would be {repository!r}, outside of the target.",
            "names joined by single slashes, none of them empty, `.` or `..`",
            "set e.g. publish.repo_id=me/my-model, and the folder above it with publish.path=DIR",
        )
    yield from refused_in_publish(publish)


def _in_evaluate(c: RecipeConfig) -> Iterator[Refusal]:
    for name in ("models", "decoding") if "evaluate" in c.stages else ():
        values = getattr(c.evaluate, name)
        if not 0 < len(values) == len(set(values)):
            yield (
                f"`evaluate.{name}` is {list(values)}.",
                "at least one, and each at most once",
                f"correct evaluate.{name}, or drop `evaluate` from `stages`",
            )


def _repository(config: RecipeConfig) -> str | None:
    """``publish.repo_id`` with an example's values filled in; None if that cannot be done."""
    try:
        return config.publish.repo_id.format(
            recipe=config.recipe, seed=config.seed, step=1, fingerprint="0" * 8
        )
    except (ValueError, LookupError, AttributeError):
        return None


_FIELDS = dict(walk(RecipeConfig))
_VALUES = attrgetter(*_FIELDS)


def _out_of_range(config: RecipeConfig) -> Iterator[Refusal]:
    """Numbers that are none, or do not lie in the range that their declaration says."""
    for (path, info), value in zip(_FIELDS.items(), _VALUES(config), strict=True):
        finite = not isinstance(value, float) or math.isfinite(value)
        # None, where a field allows it, is "no limit" and not a number.
        if value is not None and not (finite and info.range.holds(value)):
            expected = info.range.words if finite else "a finite number"
            yield f"`{path}` is {value}.", expected, f"set {path}=… to such a value"


def check_config(config: RecipeConfig) -> RecipeConfig:
    """``config`` itself, or the first refusal.

    Raises
    ------
    ConfigurationError
        A value or a combination of values is impossible, or is a secret.
    """
    check_secrets(config)  # before the others, whose refusals repeat values
    for refusals in (_out_of_range, _in_data, _in_judge, _in_publish, _in_evaluate):
        for what, expected, fix in refusals(config):
            raise ConfigurationError(what, expected=expected, fix=fix)
    check_environment(config)
    if "command" in config.stages:
        check_command(config.command)
    check_training(config)
    check_sampling(config)
    check_notify(config.notify)
    for name, measured in configs_under(config).items():
        with refused_under(name):  # what a protocol may fix, of a recipe of its kind
            plain = RecipeConfig(stages=("data", "evaluate"), environment=measured.environment)
            parts = {part: getattr(measured, part) for part in ("data", "reward", "judge")}
            grpo = replace(plain.grpo, response_length=measured.grpo.response_length)
            _check_once(replace(plain, evaluate=measured.evaluate, grpo=grpo, **parts))
    return config


#: Thousands of trials measure under one protocol.
_check_once = functools.lru_cache(maxsize=64)(check_config)
