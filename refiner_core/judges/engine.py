"""The judge's engine: one event loop that brings calls to servers and judgements back.

In: batches and their calls, from any thread by way of the loop. Out: filled batches.

::

    calls ─ known or in flight? ─> queue ─> workers (at most `concurrency`)
                                              │  pick a server, ask, read
                                              │  again: after a wait, or when a server is back
                                              v
                                            batches

It also sends probes, tells pauses and looks up where servers are; :mod:`.asking` makes one request;
:mod:`refiner_core.http.fleet` says who is asked next, and who is left out. Knows nothing of
prompts: what a call says and how a reply is read is :mod:`.calls`'s business.

The clock of an item runs while it is being tried or waits to be tried again, and stands still while
nobody can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, JudgeOutage
from refiner_core.contract.types import Endpoint, Judgement, JudgementStore, StoredJudgement
from refiner_core.http.client import Client, Lost
from refiner_core.http.fleet import BreakerSettings, Fleet, Server
from refiner_core.judges.asking import Asking, Batch, Item
from refiner_core.judges.calls import Call, Reply
from refiner_core.judges.surroundings import Counts, Surroundings

log = logging.getLogger(__name__)

_LOOK_UP_EVERY_S = 1.0


def refused(server: Server, config: JudgeConfig) -> ConfigurationError:
    """A server refuses every call."""
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
        (
            "an OpenAI-compatible server that takes all fields of the request",
            "judge.base_url, judge.model, judge.max_tokens_field (newer OpenAI models take "
            "max_completion_tokens), judge.temperature=null (not sent), judge.extra_body, or "
            "judge.structured_output=auto (a schema only where it is taken)",
        ),
    )
    return ConfigurationError(
        f"The judge's server at {server.name} answers every call with HTTP {status}",
        expected=expected,
        fix=fix,
    )


def _outage(servers: Sequence[Server], config: JudgeConfig) -> JudgeOutage:
    tried = ", ".join(f"{s.name} ({s.last_words})" for s in servers) or "none is known"
    return JudgeOutage(
        f"No server of the judge has answered for {config.outage_patience_s:g} s: {tried}",
        expected="a server that answers; what was judged before is kept and not asked again",
        fix="start the judge's server and run the same command again "
        "(judge.outage_patience_s is how long it waits)",
    )


#: Scored calls that are remembered for batches that looked into the store just before.
_LATELY = 4096
#: Of its own: how long was waited is no part of a training's random states.
_JITTER = random.Random()


class Pace(NamedTuple):
    """Waits that tests shorten."""

    first_backoff_s: float = 0.5
    breaker: BreakerSettings = BreakerSettings()


class _Scored(NamedTuple):
    at: float
    judgements: tuple[Judgement, ...]


class Engine:
    """Everything but ``idle``, ``pause`` and the counts belongs to the loop's thread."""

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
        self._api_key_env = "" if around.endpoints is not None else config.api_key_env
        self._fleet = Fleet(time.monotonic, pace.breaker)
        self._items: dict[tuple[bytes, ...], Item] = {}
        self._lately: OrderedDict[tuple[bytes, ...], _Scored] = OrderedDict()
        self._queue: deque[Item] = deque()
        self._batches: set[Batch] = set()
        self._workers: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._minding = self._looking_up = False
        self._paused_since: float | None = None
        self._look_up_at = 0.0
        limits = (config.timeout_s, config.batch_timeout_s, config.outage_patience_s)
        self._tick_s = max(0.005, min(0.1, *(limit / 10 for limit in limits)))
        #: In words why nothing is asked now; empty while something is. Read from any thread.
        self.pause = ""

    @property
    def idle(self) -> bool:
        """Say whether nobody waits for anything; readable from any thread."""
        return not self._batches

    def backlog(self, batch: Batch) -> int:
        """Calls that nobody has taken up, with those of the batch that are on their way here; for
        the thread that hands over that batch."""
        return len(self._queue) + batch.handed - batch.taken

    # ---- from outside, by way of the loop

    def open(self) -> None:
        """Begin; to be called inside the loop."""
        config = self._config
        self._client = Client(self._api_key_env, config.timeout_s)
        self._asking = Asking(
            config, self._fleet, self._counts, self._client, self._pace.first_backoff_s
        )

    async def close(self) -> None:
        """End everything; who still waits is told."""
        self.fail(RuntimeError("the judge was closed while it was judging"))
        running = [*self._workers, *self._tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    def begin(self, batch: Batch) -> None:
        """A batch whose calls are to come."""
        rested = not self._batches
        self._batches.add(batch)
        if rested:
            self._fleet.begin_anew()
            self._renew()
        if not self._minding:
            self._minding = True
            self._spawn(self._mind(), self._tasks)

    def add(self, batch: Batch, calls: Sequence[Call]) -> None:
        """Calls of a batch."""
        batch.taken += len(calls)
        if batch.over.is_set():
            return
        for call in calls:
            lately = self._lately.get(call.keys)
            if lately is not None and lately.at >= batch.begun:
                batch.found.update(zip(call.requests, lately.judgements, strict=True))
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
        if not self._batches:
            self._end_pause()
        batch.over.set()

    def fail(self, error: BaseException) -> None:
        """End all batches with an error."""
        for batch in tuple(self._batches):
            self.drop(batch, error)

    # ---- items

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while self._queue:
            item = self._queue.popleft()
            item.task = task
            try:
                judgements = await self._judge(item)
            except asyncio.CancelledError:
                if not item.cut:
                    raise
                item.uncut()
                judgements = item.failed("it was given up")
            item.task = None
            self._finish(item, judgements)
        # Now, not when the loop comes to tell: what is added before that needs another worker.
        self._workers.discard(task)

    async def _judge(self, item: Item) -> tuple[Judgement, ...]:
        """Try until it is judged, or has failed for good, or nobody waits for it any more."""
        asking, most = self._asking, self._config.max_retries
        while item.waiting:
            server = self._fleet.pick(item.avoid) if item.plain_at is None else item.plain_at
            if server is None:
                await self._somebody()
                continue
            tried = await asking.ask(item, server)
            reply = tried.reply
            if reply.judgements is not None:
                self._keep(item.call, reply)
                self._settle()
                return reply.judgements
            item.last, item.best = reply.detail, reply.partial or item.best
            item.plain_at = server if asking.may_mean_the_schema(server, tried) else None
            waits = item.plain_at is None and asking.may_refuse_all(item, server, tried)
            self._settle()
            if tried.free:
                item.avoid = server
            if tried.free or waits or item.plain_at is not None:
                continue
            if reply.final:
                return item.failed(reply.detail)
            if isinstance(tried.answer, Lost) and tried.answer.reason == "timeout":
                limit_s = self._config.timeout_s
                return item.failed(f"no judgement within {limit_s:g} s, last: {item.last}")
            item.avoid = server
            item.tries += 1
            if item.tries > most and await asking.is_gone(server, tried.trouble):
                continue
            wait_s = asking.wait_s(item, server, tried)
            if item.tries > most or wait_s >= item.left_s:
                return item.failed(f"gave up after {item.tries} tries, last: {reply.detail}")
            item.left_s -= wait_s
            await asyncio.sleep(wait_s)
        return item.failed("it was given up")

    def _keep(self, call: Call, reply: Reply) -> None:
        tokens = reply.tokens  # all with the first: sums over judgements are those over calls
        for key, judgement in zip(call.keys, reply.judgements or (), strict=True):
            assert judgement.score is not None
            self._store.put(key, StoredJudgement(judgement.score, *tokens))
            tokens = (0, 0)

    def _finish(self, item: Item, judgements: tuple[Judgement, ...]) -> None:
        if self._items.get(item.call.keys) is item:
            del self._items[item.call.keys]
        scored = sum(judgement.status == "scored" for judgement in judgements)
        if scored == len(judgements):
            self._lately[item.call.keys] = _Scored(time.monotonic(), judgements)
            if len(self._lately) > _LATELY:
                self._lately.popitem(last=False)
        for number, (batch, requests) in enumerate(item.waiting):
            batch.found.update(zip(requests, judgements, strict=True))
            if not number and batch is item.owner:
                batch.own += scored
            batch.open.discard(item)
        waited, item.waiting = item.waiting, []
        for batch, _ in waited:  # afterwards: a batch may have asked it in several requests
            self._look_if_over(batch)

    def _leave(self, item: Item, batch: Batch) -> None:
        """A batch waits for this item no more; nobody else: it is given up."""
        batch.open.discard(item)
        item.waiting = [w for w in item.waiting if w[0] is not batch]
        if not item.waiting:
            self._items.pop(item.call.keys, None)
            item.cut_short("given_up")

    def _look_if_over(self, batch: Batch) -> None:
        if batch.sealed and not batch.open and not batch.over.is_set():
            self._counts.add(**batch.counts())
            self._batches.discard(batch)
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
            await asyncio.sleep(_JITTER.random() * self._pace.first_backoff_s)

    def _settle(self) -> None:
        """After an answer: let those go on who can, or end what cannot."""
        refusing = self._fleet.all_refuse()
        if refusing is not None:
            self.fail(refused(refusing, self._config))
        self._wake()

    def _wake(self) -> None:
        everybody = self._fleet.open_to_all
        while self._waiters and (everybody or self._fleet.open_to_one):
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                if not everybody:
                    return

    async def _mind(self) -> None:
        last = time.monotonic()
        try:
            while self._batches:
                await asyncio.sleep(self._tick_s)
                now = time.monotonic()
                paused_s = self._look_after(now, now - last)
                last = now
                self._asking.put_off(paused_s)
                self._asking.late(now)
                for batch in tuple(self._batches):
                    batch.expires_at += paused_s
                    if now >= batch.expires_at:
                        self._expire(batch)
                self._wake()
        finally:
            self._minding = False

    def _look_after(self, now: float, passed: float) -> float:
        """Look after servers; gives how long nobody could be asked since the last time, seconds.

        Raises
        ------
        JudgeOutage
            Nobody could be asked for longer than anybody wants to wait.
        """
        for server in self._fleet.due_probes():
            self._spawn(self._probe(server), self._tasks)
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
        """Somebody may be asked, or nobody wants to know any more."""
        if self.pause and self._paused_since is not None:
            log.info("the pause is over after %.1f s", time.monotonic() - self._paused_since)
        self._paused_since, self.pause = None, ""

    async def _probe(self, server: Server) -> None:
        server.breaker.probed(await self._client.alive(server))

    def _renew(self) -> None:
        """Look up where servers are: at once, or in a thread where that may take its time."""
        if self._around.endpoints is None:
            config = self._config
            addresses = [a for a in (config.base_url, *config.base_urls) if a]
            self._fleet.renew([Endpoint(address.rstrip("/")) for address in addresses])
        elif not self._looking_up and time.monotonic() >= self._look_up_at:
            self._looking_up = True
            self._spawn(self._look_up(self._around.endpoints), self._tasks)

    async def _look_up(self, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        try:
            self._fleet.renew(await asyncio.to_thread(endpoints))
        finally:
            self._looking_up = False
            self._look_up_at = time.monotonic() + _LOOK_UP_EVERY_S

    def _expire(self, batch: Batch) -> None:
        limit_s = self._config.batch_timeout_s
        for item in tuple(batch.open):
            why = f"no judgement within the {limit_s:g} s of its batch, last: {item.last}"
            for waiting, requests in item.waiting:
                if waiting is batch:
                    batch.found.update(zip(requests, item.failed(why), strict=True))
            self._leave(item, batch)
        self._look_if_over(batch)

    def _spawn(self, work: Coroutine[Any, Any, None], where: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        where.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            where.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self.fail(error)

        task.add_done_callback(ended)
