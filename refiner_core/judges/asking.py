"""One request for one item: what an answer means, and what it teaches.

Items are calls on their way (one request each) and belong to the engine's thread; a batch (one
submit) is filled there and waited for elsewhere. By the time that a request has ended, the fleet
and the counts know of it. One that hangs is cut short from outside (:meth:`Asking.late`), which is
an ending like others: it may be the item's fault, or that of a server from which nothing is heard
any more.

==================================== ======== ==========================================
answer                               server   call
==================================== ======== ==========================================
200 with judgements                  well     scored
200 without                          well     again, or failed where that would not help
408, 429                             busy     again
502, 503, 504, connection lost       gone     again
other 5xx                            sick     again
anything else                        well     failed
==================================== ======== ==========================================
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.http.client import Answered, Client, Flight, Lost
from refiner_core.http.fleet import Fleet, Server, Trouble
from refiner_core.judges.calls import Call, Reply, read_reply, request_body
from refiner_core.judges.surroundings import Counts

_BUSY = frozenset({408, 429})
_GONE = frozenset({502, 503, 504})
_LOST = {
    "refused": "no connection",
    "connection": "the connection was lost",
    "truncated": "the reply broke off",
    "too_long": "the reply is too long",
    "timeout": "no answer in time",
}
_TROUBLE_OF_LOST = {"too_long": Trouble.NONE, "timeout": Trouble.SICK}


def outcome_of(answer: Answered | Lost, call: Call) -> tuple[Reply, Trouble]:
    """Read an answer, and what it says about its server."""
    if isinstance(answer, Lost):
        words = f"{_LOST[answer.reason]}{f' ({answer.error})' if answer.error else ''}"
        trouble = _TROUBLE_OF_LOST.get(answer.reason, Trouble.GONE)
        return Reply(None, answer.reason, words), trouble
    status = answer.status
    if status == 200:
        return read_reply(answer.raw, call), Trouble.NONE
    reply = Reply(detail=f"HTTP {status}")
    if status in _BUSY:
        return reply, Trouble.BUSY
    if status >= 500:
        return reply, Trouble.GONE if status in _GONE else Trouble.SICK
    return reply._replace(final=True), Trouble.NONE


_encode = json.JSONEncoder(separators=(",", ":")).encode


class Batch:
    """The requests of one submit, and what is known of them so far."""

    def __init__(self, requests: Sequence[JudgeRequest], limit_s: float) -> None:
        self.requests = tuple(requests)
        self.begun = time.monotonic()
        #: Monotonic seconds; moved on by the length of each pause.
        self.expires_at = self.begun + limit_s
        self.found: dict[JudgeRequest, Judgement] = {}
        self.stored: set[JudgeRequest] = set()
        #: Judgements that were scored by calls made for this batch.
        self.own = 0
        self.open: set[Item] = set()
        #: Calls that its caller has handed to the loop, and those that the loop has seen: each is
        #: counted by one thread alone.
        self.handed = self.taken = 0
        self.sealed = False
        self.over = threading.Event()
        self.error: BaseException | None = None

    def counts(self) -> dict[str, int]:
        """Say how its judgements came about, each counted once."""
        failed = sum(self.found[r].status == "failed" for r in self.requests)
        stored = sum(r in self.stored for r in self.requests)
        shared = len(self.requests) - failed - stored - self.own
        return {"stored": stored, "shared": shared, "failed": failed}


@dataclass(slots=True, eq=False)
class Item:
    """One call on its way, whoever waits for it."""

    call: Call
    left_s: float
    owner: Batch
    waiting: list[tuple[Batch, tuple[JudgeRequest, ...]]] = field(default_factory=list)
    #: Tries that counted, and all that were sent.
    tries: int = 0
    sent: int = 0
    last: str = "it was not asked yet"
    best: tuple[Judgement | None, ...] = ()
    #: The server that is asked only if there is no other: it has just failed.
    avoid: Server | None = None
    #: The server that did not take the schema and is asked again without one.
    plain_at: Server | None = None
    bodies: dict[bool, bytes] = field(default_factory=dict)
    flight: Flight | None = None
    task: asyncio.Task[Any] | None = None
    cut: Literal["", "timeout", "given_up"] = ""

    def body(self, config: JudgeConfig, *, structured: bool) -> bytes:
        """The request's body, made once."""
        made = self.bodies.get(structured)
        if made is None:
            made = _encode(request_body(self.call, config, structured=structured)).encode()
            self.bodies[structured] = made
        return made

    def failed(self, detail: str) -> tuple[Judgement, ...]:
        """Give what is left of it: what could be read of a batched reply, and failures."""
        failure = Judgement("failed", None, detail)
        known = self.best or (None,) * len(self.call.requests)
        return tuple(judgement or failure for judgement in known)

    def cut_short(self, why: Literal["timeout", "given_up"]) -> None:
        """End it wherever it is, unless it is ended already."""
        if self.task is not None and not self.cut:
            self.cut = why
            if self.task is not asyncio.current_task():  # which looks for itself
                self.task.cancel()

    def uncut(self) -> None:
        """Its cutting short was noticed and dealt with."""
        self.cut = ""
        if self.task is not None:
            self.task.uncancel()


log = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
#: Of its own: how long was waited is no part of a training's random states.
_JITTER = random.Random()
#: What a server says that does not know `response_format`.
_NO_SCHEMA = frozenset({400, 404, 415, 422, 501})


class Tried(NamedTuple):
    """A request that has ended. ``free``: its server is gone, which counts against no item."""

    answer: Answered | Lost
    reply: Reply
    trouble: Trouble
    free: bool = False
    structured: bool = False


class Asking:
    """Belongs to the loop's thread, as all that it is given."""

    def __init__(
        self,
        config: JudgeConfig,
        fleet: Fleet,
        counts: Counts,
        client: Client,
        first_backoff_s: float,
    ) -> None:
        self._config, self._fleet, self._counts, self._client = config, fleet, counts, client
        self._first_backoff_s = first_backoff_s
        self._flying: set[Item] = set()
        self._looks: dict[Server, asyncio.Task[bool]] = {}

    async def ask(self, item: Item, server: Server) -> Tried:
        """Make one request; raises nothing but the cancellation of one that nobody waits for."""
        structured = self._is_structured(item, server)
        body = item.body(self._config, structured=structured)
        self._counts.add(calls=1, retries=int(item.sent > 0))
        item.sent += 1
        begun = time.monotonic()
        flight = Flight(server, begun, begun + item.left_s, self._fleet.begins(server))
        item.flight = flight
        self._flying.add(item)
        answer: Answered | Lost = Lost("given_up")
        reply, trouble = Reply(reason="given_up"), Trouble.BUSY  # nothing is known of the server
        try:
            answer = await self._client.ask(flight, body)
            reply, trouble = outcome_of(answer, item.call)
        except asyncio.CancelledError:
            if item.cut != "timeout":
                raise
            item.uncut()
            answer = Lost("timeout")
            reply, trouble = outcome_of(answer, item.call)
        finally:
            item.flight = None
            self._flying.discard(item)
            self._count(flight, answer, reply)
            free = self._fleet.ended(server, item.call.keys, trouble, trial=flight.trial)
        if not free:
            item.left_s = flight.expires_at - time.monotonic()
        if isinstance(answer, Lost) and answer.reason == "timeout":
            free = await self._is_silent(item, server, begun)
        self._note(server, answer, reply, structured=structured)
        return Tried(answer, reply, trouble, free, structured)

    def late(self, now: float) -> None:
        """Cut short what has used up its time."""
        for item in self._flying:
            if item.flight is not None and now >= item.flight.expires_at:
                item.cut_short("timeout")

    def put_off(self, seconds: float) -> None:
        """Nobody could be asked for so long: clocks stand still, but for trials."""
        for item in self._flying:
            if item.flight is not None and not item.flight.trial:
                item.flight.expires_at += seconds

    async def is_gone(self, server: Server, trouble: Trouble) -> bool:
        """Before an item is given up because nobody was there: is somebody there?"""
        if trouble is not Trouble.GONE or server.breaker.state != "closed":
            return False
        return not await self._found(server)

    def wait_s(self, item: Item, server: Server, tried: Tried) -> float:
        """Until the next try: full jitter, and on top what the server asked for."""
        longest = min(_MAX_BACKOFF_S, self._first_backoff_s * 2.0 ** (item.tries - 1))
        asked = isinstance(tried.answer, Answered) and tried.answer.retry_after_s > 0
        return (self._fleet.wait_s(server) if asked else 0.0) + _JITTER.random() * longest

    def may_mean_the_schema(self, server: Server, tried: Tried) -> bool:
        """Say whether it may be the schema that it did not take: it is asked again without one."""
        return (
            tried.structured
            and self._config.structured_output == "auto"
            and server.structured != "yes"
            and isinstance(tried.answer, Answered)
            and tried.answer.status in _NO_SCHEMA
        )

    def may_refuse_all(self, item: Item, server: Server, tried: Tried) -> bool:
        """Say whether a final answer may not be meant for this item alone: it waits to know."""
        answer = tried.answer
        if not tried.reply.final or isinstance(answer, Lost) or answer.status == 200:
            return False
        return not self._fleet.turned_down(server, item.call.keys, answer.status)

    def _is_structured(self, item: Item, server: Server) -> bool:
        wanted = self._config.structured_output
        if item.call.schema is None or wanted == "none":
            return False
        return wanted == "json_schema" or (
            server.structured != "no" and item.plain_at is not server
        )

    def _count(self, flight: Flight, answer: Answered | Lost, reply: Reply) -> None:
        if not flight.status:
            self._counts.count("lost", answer.reason if isinstance(answer, Lost) else "")
            return
        prompt, completion = reply.tokens
        seconds = time.monotonic() - flight.begun
        self._counts.count("answers", flight.status)
        self._counts.add(latency_s=seconds, prompt_tokens=prompt, completion_tokens=completion)
        if reply.served and reply.judgements:
            self._counts.count("served", reply.served)
        if flight.status == 200 and reply.reason:
            self._counts.count("unusable", reply.reason)

    def _note(
        self, server: Server, answer: Answered | Lost, reply: Reply, *, structured: bool
    ) -> None:
        """Note what an answer tells about its server, beyond its breaker."""
        if reply.judgements is None:
            server.last_words = reply.detail
        if isinstance(answer, Lost):
            return
        server.heard_at = time.monotonic()
        if answer.retry_after_s:
            server.held_until = max(server.held_until, server.heard_at + answer.retry_after_s)
        if answer.status != 200:
            return
        self._fleet.answered(server)
        if structured:
            server.structured = "yes"
        elif server.structured == "unknown" and self._config.structured_output == "auto":
            server.structured = "no"
            log.info("%s takes no schema for replies; it is asked without one", server.name)

    async def _is_silent(self, item: Item, server: Server, begun: float) -> bool:
        """Whether a call has hung because its server is dead without having hung up (its node is
        gone, or the network): nothing was heard since, and nobody is found. The item's clock then
        begins anew."""
        if server.heard_at >= begun or await self._found(server):
            return False
        item.left_s = self._config.timeout_s
        return True

    async def _found(self, server: Server) -> bool:
        """Look whether anybody is there; all who wonder at the same time look once."""
        look = self._looks.get(server)
        if look is None:
            look = self._looks[server] = asyncio.create_task(self._client.alive(server))
            look.add_done_callback(lambda _: self._looks.pop(server, None))
        alive = await asyncio.shield(look)
        if not alive and server.breaker.state == "closed":
            server.breaker.open()
        return alive
