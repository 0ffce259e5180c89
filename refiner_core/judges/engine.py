"""The judge's engine: one event loop that sends calls to servers and returns judgements.

In: batches and their calls, from any thread through the loop. Out: filled batches.

::

    calls ─ known or in flight? ─> items, one task each (at most `concurrency` running)
                                             │  pick a server, send, read
                                             │  retry: after a wait, or when a server is back
                                              v
                                            batches

==================================== ======== ==========================================
answer                               server   call
==================================== ======== ==========================================
200 with judgements                  well     scored
200 without                          well     retry, or failed if a retry would not help
408, 429                             busy     retry
502, 503, 504, connection lost       gone     retry
other 5xx                            sick     retry
anything else                        well     failed
==================================== ======== ==========================================

It also sends probes, reports pauses and looks up the addresses of servers;
:mod:`refiner_core.http.fleet` chooses the next server, and leaves servers out. The engine knows
nothing of prompts: :mod:`.calls` writes calls and reads replies.

The clock of an item runs while it is tried or waits for a retry, and stops while no server is
available. A request that hangs may be the fault of its item, or of a silent server: in the latter
case it is retried, and its clock starts again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, JudgeOutage
from refiner_core.contract.types import (
    Endpoint,
    Judgement,
    JudgementStore,
    JudgeRequest,
    StoredJudgement,
)
from refiner_core.http.client import Client, HttpAnswer, LostAnswer
from refiner_core.http.fleet import BreakerSettings, Fleet, FleetServer, Trouble
from refiner_core.judges.calls import ChatCall, Reply, read_reply, request_body
from refiner_core.judges.context import JudgeContext, UsageCounts

log = logging.getLogger(__name__)

_LOOK_UP_EVERY_S = 1.0
_MAX_BACKOFF_S = 30.0
#: A separate generator: waiting times must not affect a training's random states.
_JITTER = random.Random()
_BUSY = frozenset({408, 429})
_GONE = frozenset({502, 503, 504})
#: Words of a server that does not support `response_format`.
_NO_SCHEMA = frozenset({400, 404, 415, 422, 501})
_LOST = {
    "refused": "no connection",
    "connection": "the connection was lost",
    "truncated": "the reply broke off",
    "too_long": "the reply is too long",
    "timeout": "no answer in time",
}
_TROUBLE_OF_LOST: dict[str, Trouble] = {"too_long": "none", "timeout": "sick"}
_encode = json.JSONEncoder(separators=(",", ":")).encode


def outcome_of(answer: HttpAnswer | LostAnswer, call: ChatCall) -> tuple[Reply, Trouble]:
    """Read an answer: its reply, and the state of its server."""
    if isinstance(answer, LostAnswer):
        words = f"{_LOST[answer.reason]}{f' ({answer.error})' if answer.error else ''}"
        trouble = _TROUBLE_OF_LOST.get(answer.reason, "gone")
        return Reply(None, answer.reason, words), trouble
    status = answer.status
    if status == 200:
        return read_reply(answer.raw, call), "none"
    reply = Reply(detail=f"HTTP {status}")
    if status in _BUSY:
        return reply, "busy"
    if status >= 500:
        return reply, "gone" if status in _GONE else "sick"
    return reply._replace(final=True), "none"


class JudgeBatch:
    """The requests of one submit, with their results so far. Filled in the engine's thread, awaited
    elsewhere."""

    def __init__(self, requests: Sequence[JudgeRequest], limit_s: float) -> None:
        self.requests = tuple(requests)
        #: Monotonic seconds; extended by the length of each pause.
        self.expires_at = time.monotonic() + limit_s
        self.found: dict[JudgeRequest, Judgement] = {}
        self.stored: set[JudgeRequest] = set()
        #: Judgements scored by calls that were made for this batch.
        self.own = 0
        self.open: set[_Item] = set()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def counts(self) -> dict[str, int]:
        """Judgements by their origin, each counted once."""
        failed = sum(self.found[r].status == "failed" for r in self.requests)
        stored = sum(r in self.stored for r in self.requests)
        shared = len(self.requests) - failed - stored - self.own
        return {"stored": stored, "shared": shared, "failed": failed}


@dataclass(slots=True, eq=False)
class _Item:
    """One running call, shared by its batches."""

    call: ChatCall
    left_s: float
    waiting: list[tuple[JudgeBatch, tuple[JudgeRequest, ...]]] = field(default_factory=list)
    #: Counted tries, and all requests sent.
    tries: int = 0
    sent: int = 0
    last: str = "it was not asked yet"
    #: A server that just failed, used only if there is no other.
    avoid: FleetServer | None = None
    #: A server that refused the schema and is asked again without one.
    plain_at: FleetServer | None = None
    task: asyncio.Task[None] | None = None

    def failed(self, detail: str) -> tuple[Judgement, ...]:
        """Failed judgements, one per request."""
        return (Judgement("failed", None, detail),) * len(self.call.requests)


class _EndedRequest(NamedTuple):
    """A finished request. ``free``: its server is gone, so that the try does not count."""

    answer: HttpAnswer | LostAnswer
    reply: Reply
    trouble: Trouble
    free: bool
    structured: bool


def refused(server: FleetServer, config: JudgeConfig) -> ConfigurationError:
    """Error for a server that refuses every call."""
    key = f"{config.api_key_env} (judge.api_key_env names the variable)"
    if server.refused in (401, 403):
        expected, fix = "a key that may use that server", f"export the key as {key}"
    else:
        expected = "an OpenAI-compatible server that serves the model and takes all fields"
        fix = (
            f"judge.base_url (it ends like http://HOST:PORT/v1), judge.model ({config.model!r} "
            "now), judge.max_tokens_field (newer OpenAI models take max_completion_tokens), "
            "judge.temperature=null (not sent), judge.extra_body, or judge.structured_output=auto"
        )
    return ConfigurationError(
        f"The judge's server at {server.name} answers every call with HTTP {server.refused}",
        expected=expected,
        fix=fix,
    )


def _outage(servers: Sequence[FleetServer], config: JudgeConfig) -> JudgeOutage:
    tried = ", ".join(f"{s.name} ({s.last_words})" for s in servers) or "none is known"
    return JudgeOutage(
        f"No server of the judge has answered for {config.outage_patience_s:g} s: {tried}",
        expected="a server that answers; what was judged before is kept and not asked again",
        fix="start the judge's server and run the same command again "
        "(judge.outage_patience_s is the longest wait)",
    )


class JudgeEngine:
    """Everything except ``idle``, ``pause`` and the counts belongs to the loop's thread.

    ``first_backoff_s`` and ``breaker``: see :class:`~refiner_core.judges.openai.OpenAIJudge`.
    """

    def __init__(
        self,
        config: JudgeConfig,
        around: JudgeContext,
        store: JudgementStore,
        counts: UsageCounts,
        first_backoff_s: float,
        breaker: BreakerSettings,
    ) -> None:
        self._config, self._around, self._store, self._counts = config, around, store, counts
        self._first_backoff_s = first_backoff_s
        self._fleet = Fleet(time.monotonic, breaker)
        self._items: dict[tuple[bytes, ...], _Item] = {}
        self._batches: set[JudgeBatch] = set()
        self._slots = asyncio.Semaphore(config.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: dict[FleetServer, asyncio.Task[bool]] = {}
        self._minding: asyncio.Task[None] | None = None
        self._looking_up: asyncio.Task[None] | None = None
        #: Set, and replaced by a new one, when a server becomes available.
        self._changed = asyncio.Event()
        self._paused_since: float | None = None
        self._look_up_at = 0.0
        limits = (config.timeout_s, config.batch_timeout_s, config.outage_patience_s)
        self._tick_s = max(0.005, min(0.1, *(limit / 10 for limit in limits)))
        #: Why no server is available now; empty if one is. Read from any thread.
        self.pause = ""

    @property
    def idle(self) -> bool:
        """True if no batch waits; readable from any thread."""
        return not self._batches

    # ---- called from outside, through the loop

    def open(self) -> None:
        """Start; must be called inside the loop."""
        given = self._around.endpoints is not None
        api_key_env = "" if given else self._config.api_key_env
        self._client = Client(api_key_env, self._config.timeout_s)

    async def close(self) -> None:
        """Stop everything; waiting callers get an error."""
        self.fail(RuntimeError("the judge was closed while it was judging"))
        running = tuple(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    def begin(self, batch: JudgeBatch, calls: Sequence[ChatCall]) -> None:
        """Start the calls of a batch, except those that the store answers."""
        rested = not self._batches
        self._batches.add(batch)
        if rested:
            self._fleet.begin_anew()
            self._renew()
        if self._minding is None or self._minding.done():
            self._minding = self._spawn(self._mind())
        known = iter(self._store.get([key for call in calls for key in call.keys]))
        for call in calls:
            scores = [one.score for _ in call.keys if (one := next(known)) is not None]
            if len(scores) == len(call.keys):
                batch.stored.update(call.requests)
                scored = (Judgement("scored", score) for score in scores)
                batch.found.update(zip(call.requests, scored, strict=True))
                continue
            item = self._items.get(call.keys)
            if item is None:
                item = self._items[call.keys] = _Item(call, self._config.timeout_s)
                item.task = self._spawn(self._work(item))
            item.waiting.append((batch, call.requests))
            batch.open.add(item)
        self._check_over(batch)

    def drop(self, batch: JudgeBatch, error: BaseException | None = None) -> None:
        """Drop a batch that is no longer awaited."""
        if batch.over.is_set():
            return
        for item in tuple(batch.open):
            self._leave(item, batch)
        batch.error = error
        self._end(batch)

    def fail(self, error: BaseException) -> None:
        """End all batches with an error."""
        for batch in tuple(self._batches):
            self.drop(batch, error)

    # ---- items

    async def _work(self, item: _Item) -> None:
        async with self._slots:
            judgements = await self._judge(item)
        self._items.pop(item.call.keys, None)
        waited, item.waiting = item.waiting, []
        if waited:
            waited[0][0].own += sum(judgement.status == "scored" for judgement in judgements)
        for batch, requests in waited:
            batch.found.update(zip(requests, judgements, strict=True))
            batch.open.discard(item)
        for batch, _ in waited:  # afterwards: several requests of a batch may share the call
            self._check_over(batch)

    async def _judge(self, item: _Item) -> tuple[Judgement, ...]:
        """Try until it is judged, or failed for good; cancelled when no batch waits any more."""
        config, fleet = self._config, self._fleet
        while True:
            server = item.plain_at or fleet.pick(item.avoid)
            if server is None:
                await self._somebody()
                continue
            answer, reply, trouble, free, structured = await self._ask(item, server)
            if reply.judgements is not None:
                self._keep(item.call, reply)
                self._settle()
                return reply.judgements
            item.last = reply.detail
            status = answer.status if isinstance(answer, HttpAnswer) else 0
            may_mean_the_schema = (
                structured
                and config.structured_output == "auto"
                and server.structured != "yes"
                and status in _NO_SCHEMA
            )
            item.plain_at = server if may_mean_the_schema else None
            again = free or may_mean_the_schema
            if not again and reply.final and status not in (0, 200):
                # The refusal may concern all items: wait to find out.
                again = not fleet.turned_down(server, item.call.keys, status)
            self._settle()
            if free:
                item.avoid = server
            if again:
                continue
            if reply.final:
                return item.failed(reply.detail)
            if isinstance(answer, LostAnswer) and answer.reason == "timeout":
                return item.failed(f"no judgement within {config.timeout_s:g} s, last: {item.last}")
            item.avoid = server
            item.tries += 1
            over = item.tries > config.max_retries
            doubtful = over and trouble == "gone" and server.state == "closed"
            if doubtful and not await self._found(server):
                continue
            wait_s = self._wait_s(item, server, answer)
            if over or wait_s >= item.left_s:
                return item.failed(f"gave up after {item.tries} tries, last: {reply.detail}")
            item.left_s -= wait_s
            await asyncio.sleep(wait_s)

    async def _ask(self, item: _Item, server: FleetServer) -> _EndedRequest:
        """Make one request; raises only if it is cancelled."""
        structured = self._is_structured(item, server)
        body = _encode(request_body(item.call, self._config, structured=structured)).encode()
        self._counts.add(calls=1, retries=int(item.sent > 0))
        item.sent += 1
        begun, trial = time.monotonic(), self._fleet.begins(server)
        answer: HttpAnswer | LostAnswer = LostAnswer("given_up")
        reply = Reply(reason="given_up")
        trouble: Trouble = "busy"  # the server's state is unknown
        try:
            try:
                async with asyncio.timeout(item.left_s):
                    answer = await self._client.post(server.chat_url, server.endpoint, body)
            except TimeoutError:
                answer = LostAnswer("timeout")
            reply, trouble = outcome_of(answer, item.call)
        finally:
            seconds = time.monotonic() - begun
            self._count(answer, reply, seconds)
            free = self._fleet.ended(server, item.call.keys, trouble, trial=trial)
        if not free:
            item.left_s -= seconds
        if (
            isinstance(answer, LostAnswer)
            and answer.reason == "timeout"
            and server.answered_at < begun
        ):
            free = not await self._found(server)
            item.left_s = self._config.timeout_s if free else item.left_s
        self._note(server, answer, reply, structured=structured)
        return _EndedRequest(answer, reply, trouble, free, structured)

    def _is_structured(self, item: _Item, server: FleetServer) -> bool:
        wanted = self._config.structured_output
        if item.call.schema is None or wanted == "none":
            return False
        taken = server.structured != "no" and item.plain_at is not server
        return wanted == "json_schema" or taken

    def _count(self, answer: HttpAnswer | LostAnswer, reply: Reply, seconds: float) -> None:
        if isinstance(answer, LostAnswer):
            self._counts.count("lost", answer.reason)
            return
        prompt, completion = reply.tokens
        self._counts.count("answers", answer.status)
        self._counts.add(latency_s=seconds, prompt_tokens=prompt, completion_tokens=completion)
        self._counts.add(reasoned=int(reply.reasoned))
        if reply.served and reply.judgements:
            self._counts.count("served", reply.served)
        if answer.status == 200 and reply.reason:
            self._counts.count("unusable", reply.reason)

    def _note(
        self,
        server: FleetServer,
        answer: HttpAnswer | LostAnswer,
        reply: Reply,
        *,
        structured: bool,
    ) -> None:
        """Record facts about a server from an answer, beyond its breaker."""
        if reply.judgements is None:
            server.last_words = reply.detail
        if isinstance(answer, LostAnswer):
            return
        server.answered_at = time.monotonic()
        if answer.retry_after_s:
            server.held_until = max(server.held_until, server.answered_at + answer.retry_after_s)
        if answer.status != 200:
            return
        self._fleet.answered(server)
        if structured:
            server.structured = "yes"
        elif server.structured == "unknown" and self._config.structured_output == "auto":
            server.structured = "no"
            log.info("%s does not accept a schema for replies; continuing without one", server.name)

    def _wait_s(self, item: _Item, server: FleetServer, answer: HttpAnswer | LostAnswer) -> float:
        """Wait before the next try: full jitter, plus the wait that the server requested."""
        longest = min(_MAX_BACKOFF_S, self._first_backoff_s * 2.0 ** (item.tries - 1))
        asked = isinstance(answer, HttpAnswer) and answer.retry_after_s > 0
        return (self._fleet.wait_s(server) if asked else 0.0) + _JITTER.random() * longest

    def _keep(self, call: ChatCall, reply: Reply) -> None:
        tokens = reply.tokens  # all with the first, so that their sum is that over calls
        for key, judgement in zip(call.keys, reply.judgements or (), strict=True):
            assert judgement.score is not None
            self._store.put(key, StoredJudgement(judgement.score, *tokens))
            tokens = (0, 0)

    def _leave(self, item: _Item, batch: JudgeBatch) -> None:
        """Detach a batch from an item; an item without batches is cancelled."""
        batch.open.discard(item)
        item.waiting = [w for w in item.waiting if w[0] is not batch]
        if not item.waiting and item.task is not None:
            self._items.pop(item.call.keys, None)
            item.task.cancel()

    def _check_over(self, batch: JudgeBatch) -> None:
        if not batch.open and not batch.over.is_set():
            self._counts.add(**batch.counts())
            self._end(batch)

    def _end(self, batch: JudgeBatch) -> None:
        self._batches.discard(batch)
        if not self._batches:
            self._end_pause()
        batch.over.set()

    # ---- waiting for servers

    async def _somebody(self) -> None:
        """Wait until a server is available. Waiters return spread over a while, not all at once."""
        await self._changed.wait()
        if self._fleet.open_to_all:
            await asyncio.sleep(_JITTER.random() * self._first_backoff_s)

    def _settle(self) -> None:
        """After an answer: release waiting items, or end batches that cannot be judged."""
        refusing = self._fleet.all_refuse()
        if refusing is not None:
            self.fail(refused(refusing, self._config))
        self._wake()

    def _wake(self) -> None:
        if self._fleet.open_to_all or self._fleet.open_to_one:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _mind(self) -> None:
        last = time.monotonic()
        while self._batches:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            paused_s = self._supervise(now, now - last)
            last = now
            for batch in tuple(self._batches):
                batch.expires_at += paused_s
                if now >= batch.expires_at:
                    self._expire(batch)
            self._wake()

    def _supervise(self, now: float, passed: float) -> float:
        """Check the servers; returns the seconds without any available server since the last time.

        Raises
        ------
        JudgeOutage
            No server was available for longer than the configured patience.
        """
        for server in self._fleet.due_probes():
            self._spawn(self._probe(server))
        if self._fleet.up:
            self._end_pause()
            return 0.0
        if self._paused_since is None:
            self._paused_since = now
            return 0.0
        patience_s = self._config.outage_patience_s
        if not self.pause:
            names = ", ".join(server.name for server in self._fleet.servers) or "none is known"
            waits = f"waiting up to {patience_s:g} s"
            self.pause = f"no server of the judge answers ({names}); {waits}"
            log.warning("%s", self.pause)
        self._counts.add(paused_s=passed)
        if now - self._paused_since >= patience_s:
            raise _outage(self._fleet.servers, self._config)
        if self._around.endpoints is not None:
            self._renew()
        return passed

    def _end_pause(self) -> None:
        """End a pause: a server is available, or nothing waits any more."""
        if self.pause and self._paused_since is not None:
            log.info("the pause is over after %.1f s", time.monotonic() - self._paused_since)
        self._paused_since, self.pause = None, ""

    async def _probe(self, server: FleetServer) -> None:
        server.probed(await self._client.alive(server))

    def _renew(self) -> None:
        """Look up the addresses of servers: at once, or in a thread if that may take long."""
        if self._around.endpoints is None:
            config = self._config
            addresses = [a for a in (config.base_url, *config.base_urls) if a]
            self._fleet.renew([Endpoint(address.rstrip("/")) for address in addresses])
            return
        at_it = self._looking_up is not None and not self._looking_up.done()
        if not at_it and time.monotonic() >= self._look_up_at:
            self._looking_up = self._spawn(self._look_up(self._around.endpoints))

    async def _look_up(self, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        try:
            self._fleet.renew(await asyncio.to_thread(endpoints))
        finally:
            self._look_up_at = time.monotonic() + _LOOK_UP_EVERY_S

    def _expire(self, batch: JudgeBatch) -> None:
        limit_s = self._config.batch_timeout_s
        for item in tuple(batch.open):
            why = f"no judgement within the {limit_s:g} s of its batch, last: {item.last}"
            for waiting, requests in item.waiting:
                if waiting is batch:
                    batch.found.update(zip(requests, item.failed(why), strict=True))
            self._leave(item, batch)
        self._check_over(batch)

    async def _found(self, server: FleetServer) -> bool:
        """Check whether a server responds; simultaneous checks are merged."""
        look = self._looks.get(server)
        if look is None:
            look = self._looks[server] = asyncio.create_task(self._client.alive(server))
            look.add_done_callback(lambda _: self._looks.pop(server))
        alive = await asyncio.shield(look)
        if not alive and server.state == "closed":
            server.open()
        return alive

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.fail(error)

        task.add_done_callback(ended)
        return task
