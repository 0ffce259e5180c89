"""A judge put together from what surrounds it, and the judge as a service.

In: a stage's work, or a configuration and a workspace. Out: the judge, for the time of a block. It
asks the workspace's store before it asks a server, so that a step that is repeated after a crash
costs no calls; while all servers are gone it says so, and ends when somebody wants the stage to
end. That prompts and rubrics are those of the plan is the worker's business; keys stay in the
environment, where the judge looks for them itself.

:func:`run_serve` is the worker that serves a judge, as long as somebody holds a lease;
:func:`judge_endpoints` says where to ask, while a lease is held. Where refiner starts no server,
the addresses are those of the recipe.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flows.stages.work import StageWork
from infra.host.processes import node_address
from infra.jobs.protocol import AttemptRef
from infra.services.judges import Server, live_endpoints, service_key, write_endpoint
from infra.store.orchestrators import Lease, LeaseWatch, attempt_holder, hand_holder
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted
from refiner_core.contract.plan_builder import judge_service
from refiner_core.contract.services import asks_judge, engine_of, serves
from refiner_core.contract.types import Endpoint, FreshJudge, Judge, Progress, StageIO
from refiner_core.generation.load import BUILTIN_PREFIX, resolve_ref

if TYPE_CHECKING:
    from infra.judgements.store import WorkspaceStore


log = logging.getLogger(__name__)

Endpoints = Callable[[], Sequence[Endpoint]]
_LOOK_S = 0.25
_ASK_EVERY_S = 5.0
_LEASES_EVERY_S = 2.0


def run_serve(work: StageWork) -> dict[str, Any]:
    """Start the judge's server, say where it answers, and keep it while it is needed.

    Returns
    -------
    dict
        ``ended``: why nobody needs it any more, in words. A service has no result: its attempt
        ends, and the next one that wants it starts another.

    Raises
    ------
    RefinerError
        It could not be started, or has ended by itself; or somebody wanted it to.
    """
    judge, ref = work.config.judge, AttemptRef(work.stage_id, work.attempt)
    folder = work.workspace.layout.service(work.stage_id)
    key, source = _key(judge, folder)
    work.io.progress(Progress(0, 0, "starting"))
    with Server(
        *(judge, folder),
        key=key,
        # Jobs on a cluster are on other nodes.
        host=node_address() if work.spec.identity["serve.reach"] == "cluster" else "127.0.0.1",
        weights=_weights(judge.model),
        log=str(work.workspace.layout.attempt(*ref).log),
        should_stop=work.io.should_stop,
        tell=work.starts("starting"),
    ) as server:
        process = str(server.process or "")
        named = {"model": judge.model, "process": process, "key_from": source}
        write_endpoint(work.workspace, ref, server.endpoint, **named)
        idle_s = _serve(work, server)
    why = f"nobody needed it for {idle_s:.0f} s"
    log.info("the server has ended: %s", why)
    return {"ended": why}


def _key(judge: JudgeConfig, folder: Path) -> tuple[str, str]:
    """A server's key, and where it comes from; one over transformers has none."""
    return ("", "none") if engine_of(judge) == "transformers" else service_key(folder)


def _weights(model: str) -> str | None:
    return resolve_ref(model) if model.startswith(BUILTIN_PREFIX) else None


def _serve(work: StageWork, server: Server) -> float:
    """Watch the server and its leases; returns for how long nobody has held one, seconds."""
    limit_s = work.config.judge.serve.idle_timeout_s
    leases = LeaseWatch(work.workspace, work.stage_id)
    looked = asked = time.monotonic()
    held = leases.look()
    while True:
        now = time.monotonic()
        work.check_fence("server ends")
        if work.io.should_stop():
            raise Interrupted(
                "The judge's server was asked to end",
                fix="nothing; who needs it next starts it again",
            )
        server.check_alive(ask=now - asked >= _ASK_EVERY_S)
        asked = now if now - asked >= _ASK_EVERY_S else asked
        if now - looked >= min(_LEASES_EVERY_S, limit_s / 4):
            looked, held = now, leases.look()
        values = {"leases": float(len(held)), "idle_s": round(leases.idle_s, 1)}
        if held:
            values["idle_s"] = 0.0
        work.io.progress(Progress(0, 0, "serving", values))
        if not held and leases.idle_s > limit_s:
            return leases.idle_s
        time.sleep(_LOOK_S)


# ---------------------------------------------------------------- those who ask


@contextlib.contextmanager
def judge_endpoints(work: StageWork) -> Iterator[Endpoints | None]:
    """Addresses at which a stage asks its judge, for as long as it works; None where refiner serves
    none.

    A shared server is kept by a lease, and looked up anew at each call: it may have been replaced
    elsewhere, and while it is there is no address. One beside the stage is started here and ended
    afterwards.

    Raises
    ------
    RefinerError
        A server beside the stage could not be started.
    """
    judge = work.config.judge
    service = judge_service(work.config)
    if service is not None:
        folder = work.workspace.layout.service(service.id)
        with Lease(folder, attempt_holder(work.stage_id, work.attempt)):
            yield functools.partial(live_endpoints, work.workspace, service.id)
    elif serves(judge):
        with _server_beside(work) as server:
            yield functools.partial(_endpoint_of, server)
    else:
        yield None


def _server_beside(work: StageWork) -> Server:
    judge, paths = work.config.judge, work.workspace.layout.attempt(work.stage_id, work.attempt)
    return Server(
        *(judge, paths.control),
        key=_key(judge, paths.control)[0],
        weights=_weights(judge.model),
        log=str(paths.log),
        prefix="[judge] ",
        should_stop=work.io.should_stop,
        tell=work.starts("starting the judge"),
    )


def _endpoint_of(server: Server) -> list[Endpoint]:
    """The server's address. One that has died ends the attempt: the next one starts another, which
    is sooner than to wait for this one with the GPUs held."""
    server.check_alive(ask=False)
    return [server.endpoint]


_GIB = 2**30
#: What `refiner status` shows of a stage while all servers are gone.
WAITING = "waits for the judge"


@contextlib.contextmanager
def judge_for(work: StageWork) -> Iterator[tuple[Judge, StageIO]]:
    """The judge of a stage, and the stage's IO, through which the judge's pauses are told too. A
    server that refiner starts is kept as long as the block lasts, and all that was judged is on the
    disk when it ends. A stage that asks none is given a judge that needs no server.

    Raises
    ------
    ConfigurationError
        Nothing says where the judge is, or its prompts cannot be read.
    RefinerError
        Its server could not be started.
    """
    noted = _NotedIO(work.io)
    io = cast(StageIO, noted)
    if not asks_judge(work.config, work.spec.kind):
        from refiner_core.judges import LexicalJudge

        yield LexicalJudge(), io
        return
    with _asking(
        *(work.config.judge, work.workspace, f"{work.stage_id}-{work.attempt}"),
        judge_endpoints(work),
        should_stop=work.io.should_stop,
        on_pause=noted.pause,
    ) as judge:
        # An evaluation of an occasion of its own is judged afresh; what its attempts have been
        # answered before it keeps.
        if work.config.evaluate.occasion and work.spec.kind == "evaluate":
            judge = judge.fresh(work.stage_id) if isinstance(judge, FreshJudge) else judge
        yield judge, io


@contextlib.contextmanager
def _asking(
    config: JudgeConfig,
    workspace: Workspace,
    writer: str,
    addresses: AbstractContextManager[Endpoints | None],
    **more: Any,
) -> Iterator[Judge]:
    """A judge behind the workspace's store, for the time of a block."""
    from refiner_core.judges import build_judge
    from refiner_core.judges.surroundings import Surroundings

    with contextlib.ExitStack() as stack:
        endpoints = stack.enter_context(addresses)
        store = stack.enter_context(stored(config, workspace, writer))
        judge = build_judge(config, Surroundings(store=store, endpoints=endpoints, **more))
        stack.callback(getattr(judge, "close", lambda: None))
        yield judge


def judge_by_hand(
    config: JudgeConfig, workspace: Workspace, *, writer: str = "by-hand", calls: bool = True
) -> AbstractContextManager[Judge]:
    """A judge for commands outside of stages, with the same store behind it. A server that a run
    has started is kept as long as the block lasts. Without ``calls`` the store is known to answer
    everything, and no server need run.

    Raises
    ------
    ConfigurationError
        Nothing says where the judge is, or its prompts cannot be read.
    """
    return _asking(config, workspace, writer, endpoints_by_hand(workspace, config, calls=calls))


@contextlib.contextmanager
def endpoints_by_hand(
    workspace: Workspace, config: JudgeConfig, *, calls: bool = True
) -> Iterator[Endpoints | None]:
    """Addresses of a server that a run has started, which is kept meanwhile; None where the
    configuration says where to ask.

    Raises
    ------
    ConfigurationError
        No such server runs, and there will be ``calls``.
    """

    service = judge_service(replace(RecipeConfig(), judge=config))
    if service is None or config.base_url or config.base_urls:
        yield None
        return
    if not live_endpoints(workspace, service.id):
        if not calls:
            yield tuple
            return
        raise ConfigurationError(
            f"No server of the judge {config.model} runs in {workspace.root}",
            expected="a server that a run has started (see `refiner judge servers`), or an address",
            fix="set judge.base_url to a server that answers, or start a run that needs this one",
        )
    with Lease(workspace.layout.service(service.id), hand_holder()):
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)
