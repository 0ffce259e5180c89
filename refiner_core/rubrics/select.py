"""Which rubrics a rollout is judged by.

In: a row's rubric JSON and the reward configuration. Out: rubrics, the row's own first.
"""

from __future__ import annotations

from typing import Any

from refiner_core.contract.config import RewardConfig
from refiner_core.rubrics.row import Rubric, parse_rubrics
from refiner_core.rubrics.sets import load_rubric_set


def select_rubrics(row_rubrics: Any, reward: RewardConfig) -> tuple[Rubric, ...]:
    """The rubrics that ``rubric_source`` asks for.

    ``instance_rubrics_only`` drops static ones, whatever the source: they are then neither judged,
    nor part of the reward, nor logged. Under ``static`` nothing is left.

    Raises
    ------
    DataError
        The row's rubrics do not fit (see :func:`~refiner_core.rubrics.row.normalise_rubrics`).
    ConfigurationError
        The static set cannot be loaded.
    """
    source = reward.rubric_source
    rubrics: tuple[Rubric, ...] = ()
    if source in ("instance", "instance+static"):
        rubrics += parse_rubrics(row_rubrics)
    if source in ("static", "instance+static") and not reward.instance_rubrics_only:
        rubrics += load_rubric_set(reward.static_rubrics).rubrics
    return rubrics
