"""Judges to ask by hand, with the workspace's store behind them.

In: a judge's plan, a workspace. Out: the judge, for the time of a block; before that, what the
store knows already. A server that a run has started is asked where it answers, and kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.rescoring.asking import JudgePlan
from flows.stages.judging import judge_by_hand, stored
from infra.store.workspace import Workspace
from refiner_core.contract.types import Judge, JudgementStore
from refiner_core.judges.build import build_judge

_WRITER = "rescore"


@contextmanager
def judge_for(
    plan: JudgePlan, workspace: Workspace, on_pause: Callable[[str], None]
) -> Iterator[Judge]:
    """The judge of a plan; what it scores is kept as it comes.

    Raises
    ------
    ConfigurationError
        There are calls to make, and it is served nowhere that is known.
    """
    if plan.served:
        by_hand = judge_by_hand(
            plan.config, workspace, writer=_WRITER, on_pause=on_pause, calls=plan.calls > 0
        )
        with by_hand as judge:
            yield judge
    else:
        yield build_judge(plan.config)


@contextmanager
def store_of(plan: JudgePlan, workspace: Workspace) -> Iterator[JudgementStore | None]:
    """The judgements that the workspace keeps; None where it keeps none."""
    with stored(plan.config, workspace, _WRITER) as store:
        yield store
