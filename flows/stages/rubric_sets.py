"""The static rubrics of a stage: what it was planned with, from its beginning to its end.

In: the record of a stage and its configuration. Out: nothing; within the block the set that the
configuration names is the one of the plan, or the stage is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import StageSpec


@contextlib.contextmanager
def planned_rubrics(spec: StageSpec, config: RecipeConfig) -> Iterator[None]:
    """Judge by the rubrics of the plan. Stages that judge by no static ones are left alone.

    Raises
    ------
    ConfigurationError
        The set's file is gone, or says something else than when the stage was planned.
    """
    digest = spec.sources.get("rubrics")
    if digest is None:
        yield
        return
    from refiner_core.rubrics import hold_rubrics

    with hold_rubrics(config.reward.static_rubrics, digest):
        yield
