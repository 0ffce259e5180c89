"""Judges to ask by hand, with the workspace's store behind them.

In: a judge's plan, a workspace. Out: the judge, for the time of a block; before that, what the
store knows already. A server that a run has started is asked where it answers, and kept meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from flows.judging import stored
from flows.rescoring.asking import JudgePlan
from infra.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.plan import judge_service
from refiner_core.contract.types import Endpoint, Judge, JudgementStore
from refiner_core.judges.build import Surroundings, build_judge

_WRITER = "rescore"


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
    with ExitStack() as stack:
        around = Surroundings()
        if plan.served:
            around = Surroundings(
                store=stack.enter_context(stored(plan.config, workspace, _WRITER)),
                endpoints=_endpoints(workspace, stack, plan.config),
                on_pause=on_pause,
            )
        judge = build_judge(plan.config, around)
        stack.callback(getattr(judge, "close", lambda: None))
        yield judge


@contextmanager
def store_of(plan: JudgePlan, workspace: Workspace) -> Iterator[JudgementStore | None]:
    """The judgements that the workspace keeps; None where it keeps none."""
    with stored(plan.config, workspace, _WRITER) as store:
        yield store


def _endpoints(
    workspace: Workspace, stack: ExitStack, config: JudgeConfig
) -> Callable[[], Sequence[Endpoint]] | None:
    """Where a server is that refiner has started; None where it starts none."""
    service = judge_service(replace(RecipeConfig(), judge=config))
    if service is None or config.base_url or config.base_urls:
        return None
    from infra.services.leases import HeldLease, Lease, hand_holder
    from infra.services.registry import live_endpoints

    if not live_endpoints(workspace, service.id, config):
        raise ConfigurationError(
            f"No server of the judge {config.model} runs in {workspace.root}",
            expected="a server that a run has started (see `refiner judge servers`), or an address",
            fix="set judge.base_url to a server that answers, or start a run that needs this one",
        )
    lease = Lease(workspace.layout.service(service.id), hand_holder())
    stack.enter_context(HeldLease(lease))
    return functools.partial(live_endpoints, workspace, service.id, config)
