"""One call at work on a fleet of vLLM servers: a thread with an event loop of its own.

In: what is to be asked, by number, and who asks it of which server
(:mod:`refiner_core.generation.vllm.call`). Out: completions by number, as they come, whatever
happens to servers meanwhile. More may be asked while it works.

A sample that a server gave up (``abort``) is discarded and asked again. A server that says that it
is full is waited for. A server that is gone, ill or hung is replaced by the fleet; what it had in
hand is asked again at once, of the others or of its successor.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import Completion, Endpoint
from refiner_core.generation.vllm.sync import WeightSync
from refiner_core.generation.vllm.wire import (
    Question,
    Unusable,
    completion_body,
    read_completion,
    said,
)
from refiner_core.http.client import CONNECT_S, Answered, Client, LoopThread, Lost


@dataclass(eq=False)
class Lane:
    """One server and its share.

    ``heard_at`` is when it last answered or was given its first work (seconds of the loop's clock);
    ``held_until`` when it may be asked again after it said that it is full; ``failed`` counts
    failures in a row.
    """

    index: int
    endpoint: Endpoint
    queue: deque[int] = field(default_factory=deque)
    flying: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    up: bool = True
    heard_at: float = 0.0
    held_until: float = 0.0
    failed: int = 0


class Shares:
    """The requests that nobody has in hand. Those of one key (samples of a prompt, turns of a
    conversation) go to one server, whose prefix cache has what they begin with."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.lanes = [Lane(index, endpoint) for index, endpoint in enumerate(endpoints)]
        self._back: deque[int] = deque()
        self._home: dict[Hashable, Lane] = {}
        self._of: dict[int, Hashable] = {}

    def add(self, index: int, key: Hashable) -> None:
        """Request ``index``, for the server of its key; a new key, or one whose server is gone,
        for who has fewest keys."""
        home = self._home.get(key)
        if home is None or not home.up:
            keys = Counter(lane.index for lane in self._home.values())
            up = [lane for lane in self.lanes if lane.up] or self.lanes
            home = min(up, key=lambda lane: keys[lane.index])
        self._home[key] = home
        self._of[index] = key
        home.queue.append(index)

    def take(self, lane: Lane, *, others: bool = True) -> int | None:
        """The next request for that server, with ``others`` also of another's share, whose key is
        that server's from now on; None where none is left."""
        if self._back:
            return self._moved(self._back.popleft(), lane)
        if lane.queue or not others:
            return lane.queue.popleft() if lane.queue else None
        longest = max(self.lanes, key=lambda other: len(other.queue))
        return self._moved(longest.queue.pop(), lane) if longest.queue else None

    def give_back(self, index: int) -> None:
        """It has to be asked again, of whoever is free first."""
        self._back.append(index)

    def end(self, key: Hashable) -> None:
        """There are no further requests of it."""
        self._home.pop(key, None)

    def _moved(self, index: int, lane: Lane) -> int:
        if (key := self._of.get(index)) in self._home:
            self._home[key] = lane
        return index


log = logging.getLogger(__name__)

#: How long a server that says that it is full is left alone, seconds.
_FULL_S = 0.25
#: Failures in a row, with a server that says that it is well, before it is replaced all the same.
_FAILURES = 3
#: How often one sample may be given up by servers before that is no accident.
_MOST_ABORTS = 20


class Call:
    """Works from the beginning to the end of its ``with`` block.

    Parameters
    ----------
    fleet
        The servers; its lock is held by who makes this.
    shares
        Numbers of questions, and who asks which. The call's thread alone touches it from now on.
    question
        The question of a number.
    in_flight, silence_s
        As of :class:`~refiner_core.generation.vllm.client.VllmGenerator`.
    """

    def __init__(
        self,
        fleet: WeightSync,
        shares: Shares,
        question: Callable[[int], Question],
        in_flight: int,
        silence_s: float,
    ) -> None:
        self._fleet, self._shares, self._question = fleet, shares, question
        self._in_flight, self._silence_s = in_flight, silence_s
        self._aborts: dict[int, int] = {}
        self._client: Client
        self._found: queue.SimpleQueue[tuple[int, Completion] | BaseException] = queue.SimpleQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread: LoopThread | None = None

    def __enter__(self) -> Call:
        hooks = (self._begin, self._close, self._found.put)
        self._thread = LoopThread("refiner-rollouts", *hooks)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._thread.end(timeout_s=None)

    def next(self, timeout_s: float) -> tuple[int, Completion]:
        """The next finished sample.

        Raises
        ------
        queue.Empty
            None within that time.
        """
        item = self._found.get(timeout=timeout_s)
        if isinstance(item, BaseException):
            raise item
        return item

    def change(self, shares: Callable[[], None]) -> None:
        """Change what is shared out, in the call's thread, and go on with it."""

        def changed() -> None:
            shares()
            self._pump()

        assert self._thread is not None
        self._thread.call(changed)

    # ---- in the thread of the loop

    def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = Client("", CONNECT_S, own=True)
        self._start(self._watch())
        self._pump()

    async def _close(self) -> None:
        running = tuple(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    def _pump(self) -> None:
        """Give work to every server that has room for it."""
        if not self._tasks:
            return  # it is about to begin
        for others in (False, True):  # what is its own first, so that nobody takes all at once
            for lane in self._shares.lanes:
                self._fill(lane, others=others)

    def _fill(self, lane: Lane, *, others: bool) -> None:
        now = self._loop.time()
        while lane.up and now >= lane.held_until and len(lane.flying) < self._in_flight:
            index = self._shares.take(lane, others=others)
            if index is None:
                if others:
                    lane.held_until = 0.0  # nothing is left that it could be waited for with
                return
            if not lane.flying and not lane.held_until:
                lane.heard_at = now
            lane.flying[index] = self._start(self._ask(lane, index))

    async def _ask(self, lane: Lane, index: int) -> None:
        body = completion_body(self._question(index))
        url = f"{lane.endpoint.url}/completions"
        answer = await self._client.post(url, lane.endpoint, body)
        del lane.flying[index]
        await self._take(lane, index, answer)
        self._pump()

    async def _take(self, lane: Lane, index: int, answer: Answered | Lost) -> None:
        """What an answer means for its sample and for its server."""
        if isinstance(answer, Answered) and answer.status == 200:
            lane.heard_at, lane.held_until, lane.failed = self._loop.time(), 0.0, 0
            self._read(lane, index, answer.raw)
            return
        self._shares.give_back(index)
        if isinstance(answer, Lost):
            await self._doubt(lane, answer.error)
        elif answer.status == 503 and await self._is_well(lane.endpoint):
            lane.held_until = self._loop.time() + _FULL_S  # its queue is full
            self._loop.call_later(_FULL_S, self._pump)
        elif answer.status >= 500:
            why = f"HTTP {answer.status}: {said(answer.raw, lane.endpoint)}"
            await self._doubt(lane, why)
        else:
            raise StageFailed(
                f"The rollout server at {lane.endpoint.url} refuses a request with HTTP "
                f"{answer.status}: {said(answer.raw, lane.endpoint)}",
                expected="a vLLM server of a version that takes all fields of the request",
                fix="see grpo.rollout_server.args, and the version of vLLM",
            )

    def _read(self, lane: Lane, index: int, raw: bytes) -> None:
        try:
            read = read_completion(raw, self._question(index))
        except Unusable as error:
            raise StageFailed(
                f"The rollout server at {lane.endpoint.url} answers with what was not asked for: "
                f"{error}",
                expected="what vLLM answers to a completion request with return_token_ids",
                fix="see the version of vLLM (0.32 is known to work) and grpo.rollout_server.args",
            ) from error
        if read != "abort":
            self._found.put((index, read))
            return
        self._aborts[index] = self._aborts.get(index, 0) + 1
        if self._aborts[index] > _MOST_ABORTS:
            raise StageFailed(
                f"Rollout servers gave up one sample {self._aborts[index]} times (`abort`)",
                expected="nobody else who pauses the servers or aborts their requests",
                fix="see that nobody but this stage asks them",
            )
        self._shares.give_back(index)

    async def _is_well(self, endpoint: Endpoint) -> bool:
        """True if the server says that its engine lives: outside of the path of the API."""
        return await self._client.probe(urljoin(endpoint.url, "/health"), endpoint) == 200

    async def _doubt(self, lane: Lane, why: str) -> None:
        """A request failed: is it the server? One that is well may fail now and then."""
        lane.failed += 1
        endpoint = lane.endpoint
        if lane.failed < _FAILURES and await self._is_well(endpoint):
            return
        if lane.endpoint is endpoint:
            self._down(lane, why)

    async def _watch(self) -> None:
        """Look for servers from which nothing is heard any more."""
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now = self._loop.time()
            for lane in self._shares.lanes:
                has_work = lane.flying or lane.held_until
                if lane.up and has_work and now - lane.heard_at > self._silence_s:
                    self._down(lane, f"it has answered nothing for {now - lane.heard_at:.0f} s")

    def _down(self, lane: Lane, why: str) -> None:
        """That server is no more: others do its work until it is replaced."""
        if not lane.up:
            return
        lane.up = False
        log.warning("rollout server %d at %s is lost: %s", lane.index, lane.endpoint.url, why)
        for index, task in lane.flying.items():
            task.cancel()
            self._shares.give_back(index)
        lane.flying.clear()
        self._start(self._revive(lane, why))
        self._pump()

    async def _revive(self, lane: Lane, why: str) -> None:
        lane.endpoint = await asyncio.to_thread(self._fleet.revive, lane.index, why)
        lane.up, lane.failed, lane.held_until = True, 0, 0.0
        self._pump()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._found.put(error)
