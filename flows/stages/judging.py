"""The one place where a judge is put together from what surrounds it.

In: a stage's work, or a configuration and a workspace. Out: the judge, for the time of a block. It
asks the workspace's store before it asks a server, so that a step that is repeated after a crash
costs no calls; while all servers are gone it says so, and ends when somebody wants the stage to
end. That prompts and rubrics are those of the plan is the worker's business; keys stay in the
environment, where the judge looks for them itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, NoSpaceError
from refiner_core.contract.services import asks_judge
from refiner_core.contract.types import (
    Endpoint,
    FreshJudge,
    Judge,
    Progress,
    SavedCheckpoint,
    StageIO,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flows.stages.work import StageWork
    from infra.judgements.store import WorkspaceStore
    from refiner_core.judges.surroundings import Surroundings

Endpoints = Callable[[], Sequence[Endpoint]]
_GIB = 2**30
#: What `refiner status` shows of a stage while all servers are gone.
WAITING = "waits for the judge"


class StageJudge(NamedTuple):
    """A stage's judge, and the stage's IO, through which the judge's pauses are told too."""

    judge: Judge
    io: StageIO


@contextlib.contextmanager
def judge_for(work: StageWork) -> Iterator[StageJudge]:
    """The judge of a stage. A server that refiner starts is kept as long as the block lasts, and
    all that was judged is on the disk when it ends. A stage that asks none is given one that needs
    no server.

    Raises
    ------
    ConfigurationError
        Nothing says where the judge is, or its prompts cannot be read.
    RefinerError
        Its server could not be started.
    """
    from flows.stages.serving import judge_endpoints
    from refiner_core.judges.build import build_judge
    from refiner_core.judges.surroundings import Surroundings

    io = _NotedIO(work.io)
    if not asks_judge(work.config, work.spec.kind):
        yield StageJudge(build_judge(JudgeConfig(), Surroundings()), io)
        return
    with contextlib.ExitStack() as stack:
        endpoints = stack.enter_context(judge_endpoints(work))
        writer = f"{work.stage_id}-{work.attempt}"
        around = Surroundings(
            store=stack.enter_context(stored(work.config.judge, work.workspace, writer)),
            endpoints=endpoints,
            should_stop=work.io.should_stop,
            on_pause=io.pause,
        )
        yield StageJudge(
            _for_occasion(work, stack.enter_context(_built(work.config.judge, around))), io
        )


def _for_occasion(work: StageWork, judge: Judge) -> Judge:
    """An evaluation of an occasion of its own is judged afresh; what its attempts have been
    answered before it keeps."""
    occasion = work.config.evaluate.occasion
    if occasion and work.spec.kind == "evaluate" and isinstance(judge, FreshJudge):
        return judge.fresh(work.stage_id)
    return judge


@contextlib.contextmanager
def judge_by_hand(
    config: JudgeConfig,
    workspace: Workspace,
    *,
    writer: str = "by-hand",
    on_pause: Callable[[str], None] = lambda _: None,
    calls: bool = True,
) -> Iterator[Judge]:
    """A judge for commands outside of stages, with the same store behind it. A server that a run
    has started is kept as long as the block lasts. Without ``calls`` the store is known to answer
    everything, and no server need run.

    Raises
    ------
    ConfigurationError
        Nothing says where the judge is, or its prompts cannot be read.
    """
    from refiner_core.judges.surroundings import Surroundings

    with contextlib.ExitStack() as stack:
        around = Surroundings(
            store=stack.enter_context(stored(config, workspace, writer)),
            endpoints=stack.enter_context(endpoints_by_hand(workspace, config, calls=calls)),
            on_pause=on_pause,
        )
        yield stack.enter_context(_built(config, around))


@contextlib.contextmanager
def endpoints_by_hand(
    workspace: Workspace, config: JudgeConfig, *, calls: bool = True
) -> Iterator[Endpoints | None]:
    """Where a server answers that a run has started, which is kept meanwhile; None where the
    configuration says where to ask.

    Raises
    ------
    ConfigurationError
        No such server runs, and there will be ``calls``.
    """
    from refiner_core.contract.plan import judge_service

    service = judge_service(replace(RecipeConfig(), judge=config))
    if service is None or config.base_url or config.base_urls:
        yield None
        return
    from infra.services.registry import live_endpoints
    from infra.store.leases import HeldLease, Lease, hand_holder

    if not live_endpoints(workspace, service.id):
        if not calls:
            yield tuple
            return
        raise ConfigurationError(
            f"No server of the judge {config.model} runs in {workspace.root}",
            expected="a server that a run has started (see `refiner judge servers`), or an address",
            fix="set judge.base_url to a server that answers, or start a run that needs this one",
        )
    with HeldLease(Lease(workspace.layout.service(service.id), hand_holder())):
        yield functools.partial(live_endpoints, workspace, service.id)


@contextlib.contextmanager
def stored(
    config: JudgeConfig, workspace: Workspace, writer: str
) -> Iterator[WorkspaceStore | None]:
    """The workspace's store of judgements; None for a judge that costs nothing, and where
    ``judge.cache_gb`` is 0."""
    limit_bytes = int(config.cache_gb * _GIB)
    if config.kind == "lexical" or limit_bytes <= 0:
        yield None
        return
    from infra.judgements.store import WorkspaceStore

    folder = workspace.layout.judgements
    with WorkspaceStore(folder, writer=writer, limit_bytes=limit_bytes) as store:
        yield store


@contextlib.contextmanager
def _built(config: JudgeConfig, around: Surroundings) -> Iterator[Judge]:
    from refiner_core.judges.build import build_judge

    judge = build_judge(config, around)
    close: Callable[[], None] = getattr(judge, "close", lambda: None)
    try:
        yield judge
    finally:
        close()


class _NotedIO:
    """A stage's IO that knows how far the stage said it was, so that a pause can say so too."""

    def __init__(self, io: StageIO) -> None:
        self._io = io
        self._last = Progress(0, 0)

    def pause(self, why: str) -> None:
        """All servers are gone, or (empty) one is back."""
        last = self._last
        self._io.progress(Progress(last.done, last.total, WAITING, last.values) if why else last)

    def progress(self, progress: Progress) -> None:
        self._last = progress
        self._io.progress(progress)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._io.log_metrics(step, metrics)

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._io.save_rollouts(step, rows)

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        return self._io.latest_checkpoint()

    def pass_over(self, checkpoint: SavedCheckpoint, why: str) -> None:
        self._io.pass_over(checkpoint, why)

    def new_checkpoint(self, step: int) -> contextlib.AbstractContextManager[Path]:
        return self._io.new_checkpoint(step)

    def room_again(self, error: NoSpaceError) -> bool:
        return self._io.room_again(error)

    def should_stop(self) -> bool:
        return self._io.should_stop()
