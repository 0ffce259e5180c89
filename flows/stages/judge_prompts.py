"""The prompts of a stage's judge: what it was planned with, from its beginning to its end.

In: the record of a stage and its configuration. Out: nothing; within the block the prompts that the
configuration names are those of the plan, or the stage is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import StageSpec


@contextlib.contextmanager
def planned_prompts(spec: StageSpec, config: RecipeConfig) -> Iterator[None]:
    """Ask the judge as planned. Stages that ask none are left alone.

    Raises
    ------
    ConfigurationError
        The prompts' folder is gone, or says something else than when the stage was planned.
    """
    digest = spec.sources.get("judge_prompt")
    if digest is None:
        yield
        return
    from refiner_core.judges.prompting import hold_judge_prompts

    with hold_judge_prompts(config.judge.prompt, config.judge.form, digest):
        yield
