"""The judge's engine: one event loop that brings calls to servers and judgements back.

In: batches and their calls, from any thread by way of the loop. Out: filled batches.

::

    calls ─ known or in flight? ─> queue ─> workers (at most `concurrency`)
                                              │  pick a server, ask, read
                                              │  again: after a wait, or when a server is back
                                              v
                                            batches

The clock of an item runs while it is being tried or waits to be tried again, and stands still while
nobody can be asked. A *minder* ticks while there is work: it cuts short what is late, probes
servers that are left out, looks up where servers are when none answers, and ends it all when that
lasts too long.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, JudgeOutage
from refiner_core.contract.types import Endpoint, Judgement, JudgementStore, StoredJudgement
from refiner_core.judges.build import Surroundings
from refiner_core.judges.calls import Call
from refiner_core.judges.served.breaker import Trouble
from refiner_core.judges.served.client import Answered, Client, Flight, Lost
from refiner_core.judges.served.fleet import BreakerSettings, Fleet, Server
from refiner_core.judges.served.outcome import Outcome, outcome_of
from refiner_core.judges.served.usage import Counts
from refiner_core.judges.served.work import Batch, Item

log = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
_LOOK_UP_EVERY_S = 1.0
#: Scored calls that are remembered for those who looked into the store just before.
_LATELY = 4096
#: What a server says that does not know `response_format`.
_NO_SCHEMA = frozenset({400, 404, 415, 422, 501})


class Pace(NamedTuple):
    """Waits that tests shorten."""

    first_backoff_s: float = 0.5
    breaker: BreakerSettings = BreakerSettings()


class _Tried(NamedTuple):
    """A request that has ended. ``free``: its server is gone, which counts against no item."""

    answer: Answered | Lost
    outcome: Outcome
    free: bool
    structured: bool


class Engine:
    """Everything but ``pause``, ``idle`` and the counts belongs to the loop's thread."""

    def __init__(
        self,
        config: JudgeConfig,
        around: Surroundings,
        store: JudgementStore,
        counts: Counts,
        pace: Pace,
    ) -> None:
        self._config, self._around, self._store = config, around, store
        self._counts, self._pace = counts, pace
        self._fleet = Fleet(time.monotonic, pace.breaker)
        self._client: Client | None = None
        self._items: dict[tuple[bytes, ...], Item] = {}
        self._lately: OrderedDict[tuple[bytes, ...], tuple[Judgement, ...]] = OrderedDict()
        self._queue: deque[Item] = deque()
        self._batches: set[Batch] = set()
        self._workers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._minding = self._looking_up = False
        self._look_up_at = 0.0
        self._paused_since: float | None = None
        limits = (config.timeout_s, config.batch_timeout_s, config.outage_patience_s)
        self._tick_s = max(0.005, min(0.1, *(limit / 10 for limit in limits)))
        #: In words why nothing is asked now; empty while something is. Read from any thread.
        self.pause = ""

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything; readable from any thread."""
        return not self._batches

    # ---- from outside, by way of the loop

    def open(self) -> None:
        """Begin; to be called inside the loop."""
        self._client = Client(self._config.api_key_env, self._config.timeout_s)

    async def close(self) -> None:
        """End everything; who still waits is told."""
        self.fail(RuntimeError("the judge was closed while it was judging"))
        running = [*self._workers, *self._tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def begin(self, batch: Batch) -> None:
        """A batch whose calls are to come."""
        if not self._batches:
            self._fleet.forgive()
        self._batches.add(batch)
        if not self._minding:
            self._minding = True
            self._spawn(self._mind(), self._tasks)

    def add(self, batch: Batch, calls: Sequence[Call]) -> None:
        """Calls of a batch."""
        if batch.over.is_set():
            return
        for call in calls:
            lately = self._lately.get(call.keys)
            if lately is not None:
                batch.found.update(zip(call.requests, lately, strict=True))
                continue
            item = self._items.get(call.keys)
            if item is None:
                item = Item(call, self._config.timeout_s, batch)
                self._items[call.keys] = item
                self._queue.append(item)
            item.waiting.append((batch, call.requests))
            batch.open.add(item)
        for _ in range(min(self._config.concurrency - len(self._workers), len(self._queue))):
            self._spawn(self._work(), self._workers)

    def seal(self, batch: Batch) -> None:
        """No more calls of this batch."""
        batch.sealed = True
        self._look_if_over(batch)

    def drop(self, batch: Batch, error: BaseException | None = None) -> None:
        """Nobody waits for it any more."""
        if batch.over.is_set():
            return
        for item in tuple(batch.open):
            self._leave(item, batch)
        self._batches.discard(batch)
        batch.error = error
        batch.over.set()

    def fail(self, error: BaseException) -> None:
        """End all batches with an error."""
        for batch in tuple(self._batches):
            self.drop(batch, error)
        self._end_pause()

    # ---- items

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while self._queue:
            item = self._queue.popleft()
            if not item.waiting:
                continue
            item.task = task
            try:
                judgements = await self._judge(item)
            except asyncio.CancelledError:
                if not item.cut:
                    raise
                task.uncancel()
                limit_s = self._config.timeout_s
                judgements = item.failed(f"no judgement within {limit_s:g} s, last: {item.last}")
            item.task = None
            self._finish(item, judgements)

    async def _judge(self, item: Item) -> tuple[Judgement, ...]:
        """Try until it is judged, or has failed for good."""
        while True:
            if item.cut:
                raise asyncio.CancelledError
            server = self._fleet.pick(item.avoid) if item.plain_at is None else item.plain_at
            if server is None:
                await self._somebody()
                continue
            tried = await self._try(item, server)
            outcome = tried.outcome
            if outcome.judgements is not None:
                self._keep(item.call, outcome)
                return outcome.judgements
            item.last, item.best = outcome.reason, outcome.partial or item.best
            item.plain_at = server if self._may_mean_the_schema(server, tried) else None
            if item.plain_at is not None or tried.free or self._may_refuse_all(item, server, tried):
                item.avoid = server if tried.free else item.avoid
                continue
            if outcome.final:
                return item.failed(outcome.reason)
            item.avoid = server
            item.tries += 1
            if item.tries > self._config.max_retries and await self._is_gone(server, outcome):
                continue
            wait_s = self._wait_s(item, server)
            if item.tries > self._config.max_retries or wait_s >= item.left_s:
                return item.failed(f"gave up after {item.tries} tries, last: {outcome.reason}")
            item.left_s -= wait_s
            await asyncio.sleep(wait_s)

    async def _try(self, item: Item, server: Server) -> _Tried:
        """One request."""
        assert self._client is not None
        structured = self._is_structured(item, server)
        body = item.body(self._config, structured=structured)
        self._counts.call(again=item.sent > 0)
        item.sent += 1
        begun = time.monotonic()
        flight = Flight(server, begun, begun + item.left_s, self._fleet.begins(server))
        item.flight = flight
        trouble, free = Trouble.BUSY, False  # of one that is given up nothing is known
        try:
            answer = await self._client.ask(flight, body)
            outcome = outcome_of(answer, item.call)
            trouble = outcome.trouble
            self._note(server, answer, outcome, structured=structured)
        except asyncio.CancelledError:
            if item.cut == "timeout":
                trouble, item.last = Trouble.SICK, "no answer in time"
            self._count(flight, item.cut or "given_up", item.cut or "given_up")
            raise
        finally:
            item.flight = None
            free = self._fleet.ended(server, item.call.keys, trouble, trial=flight.trial)
            self._settle()
        self._count(flight, answer.reason if isinstance(answer, Lost) else "", outcome.unusable)
        if not free:
            item.left_s = flight.expires_at - time.monotonic()
        return _Tried(answer, outcome, free, structured)

    def _count(self, flight: Flight, lost: str, unusable: str) -> None:
        if not flight.status:
            self._counts.lost(lost)
            return
        self._counts.answer(flight.status, time.monotonic() - flight.begun)
        if flight.status == 200 and unusable:
            self._counts.unusable(unusable)

    def _note(
        self, server: Server, answer: Answered | Lost, outcome: Outcome, *, structured: bool
    ) -> None:
        """What an answer tells about its server, beyond its breaker."""
        if outcome.judgements is None:
            server.last_words = outcome.reason
        if isinstance(answer, Lost):
            return
        if answer.retry_after_s:
            held_until = time.monotonic() + answer.retry_after_s
            server.held_until = max(server.held_until, held_until)
        if answer.status != 200:
            return
        self._fleet.answered(server)
        if structured:
            server.structured = "yes"
        elif server.structured == "unknown" and self._config.structured_output == "auto":
            server.structured = "no"
            log.info("%s takes no schema for replies; it is asked without one", server.name)

    def _is_structured(self, item: Item, server: Server) -> bool:
        wanted = self._config.structured_output
        if item.call.schema is None or wanted == "none":
            return False
        return wanted == "json_schema" or (
            server.structured != "no" and item.plain_at is not server
        )

    def _may_mean_the_schema(self, server: Server, tried: _Tried) -> bool:
        """Whether it may be the schema that it did not take: it is asked again without one."""
        return (
            tried.structured
            and self._config.structured_output == "auto"
            and server.structured != "yes"
            and isinstance(tried.answer, Answered)
            and tried.answer.status in _NO_SCHEMA
        )

    def _may_refuse_all(self, item: Item, server: Server, tried: _Tried) -> bool:
        """Whether a final answer may not be meant for this item alone: it waits to know."""
        answer = tried.answer
        if not tried.outcome.final or isinstance(answer, Lost) or answer.status == 200:
            return False
        own = self._fleet.turned_down(server, item.call.keys, answer.status)
        self._settle()
        return not own

    async def _is_gone(self, server: Server, outcome: Outcome) -> bool:
        """Before an item is given up because nobody was there: is somebody there?"""
        assert self._client is not None
        if outcome.trouble is not Trouble.GONE or server.breaker.state != "closed":
            return False
        if await self._client.alive(server):
            return False
        server.breaker.open()
        return True

    def _wait_s(self, item: Item, server: Server) -> float:
        """Full jitter, and what the server asked for on top."""
        first_s = self._pace.first_backoff_s
        longest = min(_MAX_BACKOFF_S, first_s * 2.0 ** (item.tries - 1))
        return self._fleet.wait_s(server) + random.random() * longest

    def _keep(self, call: Call, outcome: Outcome) -> None:
        self._counts.tokens(*outcome.tokens)
        tokens = outcome.tokens  # all with the first: sums over judgements are those over calls
        for key, judgement in zip(call.keys, outcome.judgements or (), strict=True):
            assert judgement.score is not None
            self._store.put(key, StoredJudgement(judgement.score, *tokens))
            tokens = (0, 0)

    def _finish(self, item: Item, judgements: tuple[Judgement, ...]) -> None:
        if self._items.get(item.call.keys) is item:
            del self._items[item.call.keys]
        scored = sum(judgement.status == "scored" for judgement in judgements)
        if scored == len(judgements):
            self._lately[item.call.keys] = judgements
            if len(self._lately) > _LATELY:
                self._lately.popitem(last=False)
        for number, (batch, requests) in enumerate(item.waiting):
            batch.found.update(zip(requests, judgements, strict=True))
            if not number and batch is item.owner:
                batch.own += scored
            batch.open.discard(item)
            self._look_if_over(batch)
        item.waiting.clear()

    def _leave(self, item: Item, batch: Batch) -> None:
        """A batch waits for this item no more; nobody else: it is given up."""
        batch.open.discard(item)
        item.waiting = [w for w in item.waiting if w[0] is not batch]
        if not item.waiting:
            self._items.pop(item.call.keys, None)
            item.cut_short("given_up")

    def _look_if_over(self, batch: Batch) -> None:
        if batch.sealed and not batch.open and not batch.over.is_set():
            self._batches.discard(batch)
            self._counts.settled(**batch.counts())
            if not self._batches:
                self._end_pause()
            batch.over.set()

    # ---- waiting for servers

    async def _somebody(self) -> None:
        """Wait until somebody may be asked. All come back within a while, not at once."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
        if self._fleet.open_to_all:
            await asyncio.sleep(random.random() * self._pace.first_backoff_s)

    def _settle(self) -> None:
        """After a change: let those go on who can, or end what cannot."""
        refusing = self._fleet.all_refuse()
        if refusing is not None:
            self.fail(_refused(refusing, self._config))
        self._wake()

    def _wake(self) -> None:
        everybody = self._fleet.open_to_all
        while self._waiters and (everybody or self._fleet.open_to_one):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not everybody:
                    return

    # ---- the minder

    async def _mind(self) -> None:
        self._renew()
        last = time.monotonic()
        try:
            while self._batches:
                await asyncio.sleep(self._tick_s)
                now = time.monotonic()
                self._watch_pause(now, now - last)
                last = now
                self._cut_late(now)
                for server in self._fleet.due_probes():
                    self._spawn(self._probe(server), self._tasks)
                self._wake()
        finally:
            self._minding = False

    def _watch_pause(self, now: float, passed: float) -> None:
        if self._fleet.up or not self._batches:
            self._end_pause()
            return
        if self._paused_since is None:
            self._paused_since, passed = now, 0.0
        elif not self.pause:  # longer than a moment
            names = ", ".join(server.name for server in self._fleet.servers) or "none is known"
            patience_s = self._config.outage_patience_s
            self.pause = f"no server of the judge answers ({names}); waiting up to {patience_s:g} s"
            log.warning("%s", self.pause)
        self._counts.paused(passed)
        for batch in self._batches:
            batch.expires_at += passed
        for item in self._items.values():
            if item.flight is not None and not item.flight.trial:
                item.flight.expires_at += passed
        if now - self._paused_since >= self._config.outage_patience_s:
            self.fail(_outage(self._fleet.servers, self._config))
        elif self._around.endpoints is not None:
            self._renew()

    def _end_pause(self) -> None:
        if self.pause and self._paused_since is not None:
            log.info("the pause is over after %.1f s", time.monotonic() - self._paused_since)
        self._paused_since, self.pause = None, ""

    def _cut_late(self, now: float) -> None:
        for item in self._items.values():
            if item.flight is not None and now >= item.flight.expires_at:
                item.cut_short("timeout")
        for batch in [b for b in self._batches if now >= b.expires_at]:
            limit_s = self._config.batch_timeout_s
            for item in tuple(batch.open):
                why = f"no judgement within the {limit_s:g} s of its batch, last: {item.last}"
                for waiting, requests in item.waiting:
                    if waiting is batch:
                        batch.found.update(zip(requests, item.failed(why), strict=True))
                self._leave(item, batch)
            self._look_if_over(batch)

    async def _probe(self, server: Server) -> None:
        assert self._client is not None
        alive = await self._client.alive(server)
        server.breaker.probed(alive)
        if not alive:
            server.last_words = "no answer"
        self._wake()

    def _renew(self) -> None:
        """Look up where servers are: at once, or in a thread where that may take its time."""
        if self._around.endpoints is None:
            config = self._config
            addresses = [a for a in (config.base_url, *config.base_urls) if a]
            self._fleet.renew([Endpoint(address.rstrip("/")) for address in addresses])
        elif not self._looking_up and time.monotonic() >= self._look_up_at:
            self._looking_up = True
            self._spawn(self._look_up(), self._tasks)

    async def _look_up(self) -> None:
        assert self._around.endpoints is not None
        try:
            found = await asyncio.to_thread(self._around.endpoints)
        finally:
            self._looking_up = False
            self._look_up_at = time.monotonic() + _LOOK_UP_EVERY_S
        self._fleet.renew(found)
        self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None], where: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        where.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            where.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.fail(error)

        task.add_done_callback(ended)


def _outage(servers: Sequence[Server], config: JudgeConfig) -> JudgeOutage:
    tried = ", ".join(f"{s.name} ({s.last_words})" for s in servers) or "none is known"
    return JudgeOutage(
        f"No server of the judge has answered for {config.outage_patience_s:g} s: {tried}",
        expected="a server that answers; what was judged before is kept and not asked again",
        fix="start the judge's server and run the same command again "
        "(judge.outage_patience_s is how long it waits)",
    )


def _refused(server: Server, config: JudgeConfig) -> ConfigurationError:
    status = server.refused
    key = f"export {config.api_key_env}=… (judge.api_key_env names the variable)"
    expected, fix = {
        401: ("the key of that server", key),
        403: ("a key that may use that server", key),
        404: (
            "an address that ends like http://HOST:PORT/v1, and a model that is served there",
            f"judge.base_url, or judge.model ({config.model!r} now)",
        ),
    }.get(
        status,
        ("an OpenAI-compatible server", "judge.base_url, judge.model or judge.max_tokens_field"),
    )
    return ConfigurationError(
        f"The judge's server at {server.name} answers every call with HTTP {status}",
        expected=expected,
        fix=fix,
    )
