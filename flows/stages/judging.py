"""A judge with its store and servers, and the judge as a service.

In: a stage's work, or a configuration and a workspace. Out: the judge, within a block. It looks
into the workspace's store before it asks a server, so a step repeated after a crash makes no calls;
while all servers are gone it reports that, and stops waiting when the stage is asked to end. The
worker checks that prompts and rubrics are those of the plan; the judge reads keys from the
environment.

:func:`run_serve` is the worker that serves a judge while there is a lease; :func:`judge_endpoints`
holds a lease and returns the addresses. Without a server of refiner, these are the recipe's.
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
from infra.jobs.dispatcher import AttemptRef
from infra.ranks.messages import visible
from infra.services.judges import JudgeServerProcess, live_endpoints, service_key, write_endpoint
from infra.store.orchestrators import Lease, LeaseWatch, attempt_holder, hand_holder
from infra.store.workspace import Workspace
from refiner_core.contract.config import JudgeConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage
from refiner_core.contract.placement import judge_numbers
from refiner_core.contract.plan_builder import judge_service
from refiner_core.contract.protocols import golds_under
from refiner_core.contract.services import asks_judge, engine_of, serves
from refiner_core.contract.types import (
    REASONING,
    WITHOUT_REASONING,
    Endpoint,
    Judge,
    JudgeRequest,
    Progress,
    StageIO,
    StreamingJudge,
)
from refiner_core.generation.load import BUILTIN_PREFIX, resolve_ref

if TYPE_CHECKING:
    from infra.judgements.store import WorkspaceStore
    from refiner_core.training.monitor import Gold


log = logging.getLogger(__name__)

Endpoints = Callable[[], Sequence[Endpoint]]
_LOOK_S = 0.25
_ASK_EVERY_S = 5.0
_LEASES_EVERY_S = 2.0


def run_serve(work: StageWork) -> dict[str, Any]:
    """Start the judge's server, publish its address, and keep it while it is needed.

    Returns
    -------
    dict
        ``ended``: the reason of its end, in words. A service has no result: its attempt ends, and
        its next user starts another.

    Raises
    ------
    RefinerError
        It could not be started, has ended by itself, or was asked to end.
    """
    judge, ref = work.config.judge, AttemptRef(work.stage_id, work.attempt)
    folder = work.workspace.layout.service(work.stage_id)
    key, source = _key(judge, folder)
    work.io.progress(Progress(0, 0, "starting"))
    with JudgeServerProcess(
        *(judge, folder),
        key=key,
        # Jobs of a cluster run on other nodes.
        host=node_address() if work.spec.identity["serve.reach"] == "cluster" else "127.0.0.1",
        weights=_weights(judge.model),
        log=str(work.workspace.layout.attempt(*ref).log),
        should_stop=work.io.should_stop,
        tell=work.starts("starting"),
    ) as server:
        refuse_reasoning(judge, server.endpoint)
        process = str(server.process or "")
        named = {"model": judge.model, "process": process, "key_from": source}
        write_endpoint(work.workspace, ref, server.endpoint, **named)
        idle_s = _serve(work, server)
    why = f"it was idle for {idle_s:.0f} s"
    log.info("the server has ended: %s", why)
    return {"ended": why}


#: A question that any judge can answer in a few tokens.
_EASY = JudgeRequest("rubric", "What grows in the field?", "Wheat.", "The answer names a plant.")
_EASY_PATIENCE_S = 5.0


def refuse_reasoning(judge: JudgeConfig, endpoint: Endpoint) -> None:
    """Ask a server that has just started one question, before a trainer begins to wait for it.

    Raises
    ------
    ConfigurationError
        Its reply is cut by length, or is reasoning alone: every judgement would fail.
    """
    from refiner_core.judges import build_judge
    from refiner_core.judges.context import JudgeContext, usage_of

    config = replace(judge, max_retries=0, outage_patience_s=_EASY_PATIENCE_S)
    with contextlib.ExitStack() as stack:
        asked = build_judge(config, JudgeContext(endpoints=lambda: [endpoint]))
        stack.callback(getattr(asked, "close", lambda: None))
        try:
            [judgement] = asked.judge([_EASY])
        except JudgeOutage as error:  # its users wait for it, and report that
            log.warning("the judge's server did not answer a first question: %s", error.what)
            return
        usage = usage_of(asked)
    if usage is None or not {"reasoning", "length"} & usage.unusable.keys():
        return
    reasons = REASONING in judgement.detail
    raise ConfigurationError(
        f"The judge {judge.model} gives no score to an easy question: {judgement.detail}.",
        expected=f"a score within judge.max_tokens ({judge.max_tokens})",
        fix=WITHOUT_REASONING if reasons else "raise judge.max_tokens, or shorten judge.prompt",
    )


def _key(judge: JudgeConfig, folder: Path) -> tuple[str, str]:
    """A server's key and its origin; a server of transformers has none."""
    return ("", "none") if engine_of(judge) == "transformers" else service_key(folder)


def _weights(model: str) -> str | None:
    return resolve_ref(model) if model.startswith(BUILTIN_PREFIX) else None


def _serve(work: StageWork, server: JudgeServerProcess) -> float:
    """Watch the server and its leases; returns the time without a lease, seconds."""
    limit_s = work.config.judge.serve.idle_timeout_s
    leases = LeaseWatch(work.workspace, work.stage_id)
    looked = asked = time.monotonic()
    held = leases.observe()
    while True:
        now = time.monotonic()
        work.check_fence("server ends")
        if work.io.should_stop():
            raise Interrupted(
                "The judge's server was asked to end", fix="nothing; its next user starts it again"
            )
        server.check_alive(ask=now - asked >= _ASK_EVERY_S)
        asked = now if now - asked >= _ASK_EVERY_S else asked
        if now - looked >= min(_LEASES_EVERY_S, limit_s / 4):
            looked, held = now, leases.observe()
        values = {"leases": float(len(held)), "idle_s": round(leases.idle_s, 1)}
        if held:
            values["idle_s"] = 0.0
        work.io.progress(Progress(0, 0, "serving", values))
        if not held and leases.idle_s > limit_s:
            return leases.idle_s
        time.sleep(_LOOK_S)


# ---------------------------------------------------------------- clients


@contextlib.contextmanager
def judge_endpoints(work: StageWork) -> Iterator[Endpoints | None]:
    """Addresses of a stage's judge, within the block; None without a server of refiner.


    A shared server is kept by a lease, and looked up at each call: while it is being replaced there
    is no address. A server beside the stage is started here and stopped afterwards.


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
        with _server_for(work) as server:
            refuse_reasoning(judge, server.endpoint)
            yield functools.partial(_endpoint_of, server)
    else:
        yield None


def _server_for(work: StageWork) -> JudgeServerProcess:
    judge, paths = work.config.judge, work.workspace.layout.attempt(work.stage_id, work.attempt)
    numbers = judge_numbers(work.config, work.spec.kind)
    return JudgeServerProcess(
        *(judge, paths.control),
        key=_key(judge, paths.control)[0],
        weights=_weights(judge.model),
        gpus=visible(numbers) if numbers else "",
        log=str(paths.log),
        prefix="[judge] ",
        should_stop=work.io.should_stop,
        tell=work.starts("starting the judge"),
    )


def _endpoint_of(server: JudgeServerProcess) -> list[Endpoint]:
    """The server's address. The death of the server ends the attempt: the next one starts another,
    which is faster than waiting with the GPUs held."""
    server.check_alive(ask=False)
    return [server.endpoint]


_GIB = 2**30
#: State in `refiner status` while all servers are gone.
WAITING = "waits for the judge"


@contextlib.contextmanager
def judge_for(work: StageWork) -> Iterator[tuple[Judge, StageIO]]:
    """The judge of a stage, and the stage's IO with the judge's pauses. A server of refiner is kept
    within the block, and at its end all judgements are on the disk. A stage without questions gets
    a judge that needs no server.

    Raises
    ------
    ConfigurationError
        The judge has no address, or its prompts cannot be read.
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
        # An evaluation with an occasion of its own is judged again; its attempts share their
        # judgements.
        if work.config.evaluate.occasion and work.spec.kind == "evaluate":
            judge = judge.fresh(work.stage_id) if isinstance(judge, StreamingJudge) else judge
        yield judge, io


@contextlib.contextmanager
def gold_judges(work: StageWork) -> Iterator[list[Gold]]:
    """The judges of a stage's monitor, each under its protocol; errors as for
    :func:`judge_for`."""
    from refiner_core.training.monitor import Gold

    with contextlib.ExitStack() as stack:
        found = []
        for name, config in golds_under(work.config).items():
            judge = _asking(
                *(config.judge, work.workspace, f"{work.stage_id}-{work.attempt}-{name}"),
                judge_endpoints(replace(work, config=config)),
                should_stop=work.io.should_stop,
            )
            found.append(Gold(name, config, stack.enter_context(judge)))
        yield found


@contextlib.contextmanager
def _asking(
    config: JudgeConfig,
    workspace: Workspace,
    writer: str,
    addresses: AbstractContextManager[Endpoints | None],
    **more: Any,
) -> Iterator[Judge]:
    """A judge behind the workspace's store, within a block."""
    from refiner_core.judges import build_judge
    from refiner_core.judges.context import JudgeContext

    with contextlib.ExitStack() as stack:
        endpoints = stack.enter_context(addresses)
        store = stack.enter_context(stored(config, workspace, writer))
        judge = build_judge(config, JudgeContext(store=store, endpoints=endpoints, **more))
        stack.callback(getattr(judge, "close", lambda: None))
        yield judge


def judge_by_hand(
    config: JudgeConfig, workspace: Workspace, *, writer: str = "by-hand", calls: bool = True
) -> AbstractContextManager[Judge]:
    """A judge for commands outside of stages, with the same store. A server started by a run is
    kept within the block. Without ``calls`` the store answers everything, and no server is needed.

    Raises
    ------
    ConfigurationError
        The judge has no address, or its prompts cannot be read.
    """
    return _asking(config, workspace, writer, endpoints_by_hand(workspace, config, calls=calls))


@contextlib.contextmanager
def endpoints_by_hand(
    workspace: Workspace, config: JudgeConfig, *, calls: bool = True
) -> Iterator[Endpoints | None]:
    """Addresses of a server started by a run, kept within the block; None if the configuration has
    an address.

    Raises
    ------
    ConfigurationError
        No such server is running, and there will be ``calls``.
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
            f"No server of the judge {config.model} is running in {workspace.root}",
            expected="a server that a run has started (see `refiner judge servers`), or an address",
            fix="set judge.base_url to a server that answers, or start a run that needs this one",
        )
    with Lease(workspace.layout.service(service.id), hand_holder()):
        yield functools.partial(live_endpoints, workspace, service.id)


@contextlib.contextmanager
def stored(
    config: JudgeConfig, workspace: Workspace, writer: str
) -> Iterator[WorkspaceStore | None]:
    """The workspace's store of judgements; None for a judge without cost, and if ``judge.cache_gb``
    is 0."""
    limit_bytes = int(config.cache_gb * _GIB)
    if config.kind == "lexical" or limit_bytes <= 0:
        yield None
        return
    from infra.judgements.store import WorkspaceStore

    folder = workspace.layout.judgements
    with WorkspaceStore(folder, writer=writer, limit_bytes=limit_bytes) as store:
        yield store


class _NotedIO:
    """A stage's IO that remembers the last progress, to report it with a pause."""

    def __init__(self, io: StageIO) -> None:
        self._io = io
        self._last = Progress(0, 0)

    def pause(self, why: str) -> None:
        """Report that all servers are gone, or (empty) that one is back."""
        last = self._last
        self._io.progress(Progress(last.done, last.total, WAITING, last.values) if why else last)

    def progress(self, progress: Progress) -> None:
        self._last = progress
        self._io.progress(progress)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)
