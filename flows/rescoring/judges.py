"""Judges to ask by hand, with the workspace's store behind them.

In: a judge's plan, a workspace. Out: the judge, for the time of a block; before that, what the
store knows already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flows.rescoring.asking import JudgePlan
from infra.judgements.store import WorkspaceStore
from infra.workspace import Workspace
from refiner_core.contract.types import Judge
from refiner_core.judges.build import Surroundings, build_judge

_GIB = 2**30


@contextmanager
def judge_for(
    plan: JudgePlan, workspace: Workspace, on_pause: Callable[[str], None]
) -> Iterator[Judge]:
    """The judge of a plan; what it scores is kept as it comes.

    Raises
    ------
    ConfigurationError
        It is served nowhere that is known.
    """
    if not plan.served:
        yield build_judge(plan.config)
        return
    with store_of(plan, workspace) as store:
        around = Surroundings(store=store, on_pause=on_pause)
        judge = build_judge(plan.config, around)
        try:
            yield judge
        finally:
            close = getattr(judge, "close", None)
            if close is not None:
                close()


@contextmanager
def store_of(plan: JudgePlan, workspace: Workspace) -> Iterator[WorkspaceStore | None]:
    """The judgements that the workspace keeps; None where it keeps none."""
    limit = int(plan.config.cache_gb * _GIB)
    if not limit:
        yield None
        return
    folder = workspace.layout.judgements
    with WorkspaceStore(folder, writer="rescore", limit_bytes=limit) as store:
        yield store
