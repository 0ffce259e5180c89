"""Judges to ask by hand, with the workspace's store behind them.

In: a judge's configuration, a workspace. Out: the judge, for the time of a block, and the store
that knows what has been judged before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flows.rescoring.asking import JudgePlan
from infra.workspace import Workspace
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judge, JudgementStore
from refiner_core.judges import build_judge


@contextmanager
def judge_for(plan: JudgePlan, workspace: Workspace) -> Iterator[Judge]:
    """The judge of a plan.

    Raises
    ------
    ConfigurationError
        It is served nowhere that is known.
    """
    yield build_judge(plan.config)


def store_of(config: JudgeConfig, workspace: Workspace) -> JudgementStore | None:
    """The judgements that the workspace keeps; None where it keeps none."""
    return None
