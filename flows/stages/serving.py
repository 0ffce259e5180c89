"""The judge as a service: the worker that serves it, and what those who ask it do for it.

In: a stage's work. Out, for ``run_serve``: a server that answers, and lives as long as somebody
holds a lease; for :func:`judge_endpoints`: where to ask, while a lease is held. Where refiner
starts no server, there is nothing to do, and the addresses are those of the recipe.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flows.stages.work import StageWork
from infra.jobs.protocol import AttemptRef
from infra.jobs.restart import AttemptClosed
from infra.services.keys import service_key
from infra.services.registry import live_endpoints, write_endpoint
from infra.services.server import Order, Server, node_address
from infra.store.leases import HeldLease, Lease, LeaseWatch, attempt_holder
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.plan import judge_service
from refiner_core.contract.services import engine_of, serves
from refiner_core.contract.types import Endpoint, Progress
from refiner_core.generation.load import BUILTIN_PREFIX, resolve_ref

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
    key, source = "", "none"
    if engine_of(judge) != "transformers":
        key, source = service_key(folder)
    order = Order(
        judge=judge,
        mark=folder,
        key=key,
        host=_host(work),
        weights=_weights(judge.model),
        log=str(work.workspace.layout.attempt(*ref).log),
    )

    def tell(seconds: float) -> None:
        work.io.progress(Progress(0, 0, "starting", {"seconds": round(seconds)}))

    work.io.progress(Progress(0, 0, "starting"))
    with Server(order, should_stop=work.io.should_stop, tell=tell) as server:
        process = str(server.process or "")
        named = {"model": judge.model, "process": process, "key_from": source}
        write_endpoint(work.workspace, ref, server.endpoint, **named)
        idle_s = _serve(work, server)
    why = f"nobody needed it for {idle_s:.0f} s"
    log.info("the server has ended: %s", why)
    return {"ended": why}


def _host(work: StageWork) -> str:
    """Where it listens: jobs on a cluster are on other nodes."""
    return node_address() if work.spec.identity["serve.reach"] == "cluster" else "127.0.0.1"


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
        if work.workspace.is_stale(work.stage_id, work.attempt):
            raise AttemptClosed(
                f"Attempt {work.attempt} of {work.stage_id} was given up",
                fix="nothing; whoever gave it up goes on",
            )
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
    """Where a stage asks its judge, for as long as it works; None where refiner serves none.

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
        with HeldLease(Lease(folder, attempt_holder(work.stage_id, work.attempt))):
            yield functools.partial(live_endpoints, work.workspace, service.id)
    elif serves(judge):
        with _server_beside(work) as server:
            yield functools.partial(_endpoint_of, server)
    else:
        yield None


def _server_beside(work: StageWork) -> Server:
    judge, paths = work.config.judge, work.workspace.layout.attempt(work.stage_id, work.attempt)
    key = ""
    if engine_of(judge) != "transformers":
        key, _ = service_key(paths.control)
    order = Order(
        judge=judge,
        mark=paths.control,
        key=key,
        weights=_weights(judge.model),
        log=str(paths.log),
        prefix="[judge] ",
    )

    def tell(seconds: float) -> None:
        work.io.progress(Progress(0, 0, "starting the judge", {"seconds": round(seconds)}))

    return Server(order, should_stop=work.io.should_stop, tell=tell)


def _endpoint_of(server: Server) -> list[Endpoint]:
    """The server's address. One that has died ends the attempt: the next one starts another, which
    is sooner than to wait for this one with the GPUs held."""
    server.check_alive(ask=False)
    return [server.endpoint]
