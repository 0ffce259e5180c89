"""Sampling of completions from vLLM servers over HTTP, for clusters.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the sampled distribution.

How a call works:

1. Each request is one HTTP request with its own seed, independent of its server
   (:mod:`refiner_core.generation.vllm.wire`).
2. Prompts are spread over the servers; an idle server takes requests of the others.
3. A sample aborted by a server (``abort``) is discarded and requested again. A server that reports
   a full queue gets a pause. The fleet replaces a server that is gone, ill or hung; its running
   requests are repeated at once, on the others or on its replacement.
4. ``on_completion`` runs in the calling thread, while requests continue in another.

Turns of conversations are requests too. The desk is polled whenever a turn is sampled, and every
:data:`POLL_S` seconds for finished tools. The order of finished turns depends on the servers, so,
unlike the embedded backend, this one is reproducible only as far as the servers are.

Weights never change during a call: the fleet's lock is held. Seeds alone decide a sample, as far as
vLLM's kernels give the same sums in different batches: usual in float32; in bfloat16 a sample may
differ from some token on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urljoin

from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import (
    Completion,
    Endpoint,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
    TurnRequest,
    Turns,
    TurnScheduler,
)
from refiner_core.generation.completions import check_window
from refiner_core.generation.saving import HandOver
from refiner_core.generation.vllm.sync import WeightSync
from refiner_core.generation.vllm.wire import (
    InvalidResponse,
    SampleQuery,
    completion_body,
    read_completion,
    said,
)
from refiner_core.http.client import CONNECT_S, Client, HttpAnswer, LoopThread, LostAnswer

log = logging.getLogger(__name__)

#: Longest wait for an answer before the desk is polled again, seconds.
POLL_S = 0.02
#: Interval of the progress callback while no turn is finished, seconds.
_TICK_S = 0.5


@dataclass(eq=False)
class _ServerShare:
    """One server and its share.

    ``answered_at`` is the time of its last answer or its first work (seconds of the loop's clock);
    ``held_until`` is the end of a pause after a full queue; ``failed`` counts consecutive
    failures.
    """

    index: int
    endpoint: Endpoint
    queue: deque[int] = field(default_factory=deque)
    flying: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    up: bool = True
    answered_at: float = 0.0
    held_until: float = 0.0
    failed: int = 0


class _Shares:
    """The unassigned requests. Those of one key (samples of a prompt, turns of a conversation) go
    to one server, whose prefix cache has their common prefix."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.lanes = [_ServerShare(index, endpoint) for index, endpoint in enumerate(endpoints)]
        self._back: deque[int] = deque()
        self._home: dict[Hashable, _ServerShare] = {}
        self._of: dict[int, Hashable] = {}

    def add(self, index: int, key: Hashable) -> None:
        """Add request ``index`` for the server of its key; a new key, or one whose server is gone,
        goes to the server with the fewest keys."""
        home = self._home.get(key)
        if home is None or not home.up:
            keys = Counter(lane.index for lane in self._home.values())
            up = [lane for lane in self.lanes if lane.up] or self.lanes
            home = min(up, key=lambda lane: keys[lane.index])
        self._home[key] = home
        self._of[index] = key
        home.queue.append(index)

    def take(self, lane: _ServerShare, *, others: bool = True) -> int | None:
        """The next request for that server; with ``others`` also from another's share, whose key
        then moves to that server. None if none is left."""
        if self._back:
            return self._moved(self._back.popleft(), lane)
        if lane.queue or not others:
            return lane.queue.popleft() if lane.queue else None
        longest = max(self.lanes, key=lambda other: len(other.queue))
        return self._moved(longest.queue.pop(), lane) if longest.queue else None

    def give_back(self, index: int) -> None:
        """Return a request that must be repeated, by the first idle server."""
        self._back.append(index)

    def change(self, new: Iterable[tuple[int, Hashable]], ended: Iterable[Hashable]) -> None:
        """Add requests with their keys; drop the ended keys."""
        for key in ended:
            self._home.pop(key, None)
        for index, key in new:
            self.add(index, key)

    def _moved(self, index: int, lane: _ServerShare) -> int:
        if (key := self._of.get(index)) in self._home:
            self._home[key] = lane
        return index


#: Pause after a server reports a full queue, seconds.
_FULL_S = 0.25
#: Consecutive failures after which a server is replaced even if it reports good health.
_FAILURES = 3
#: Aborts of one sample that are accepted as accidental.
_MOST_ABORTS = 20


class _Call:
    """A running call, from the beginning to the end of its ``with`` block.

    Parameters
    ----------
    fleet
        The servers; the caller holds their lock.
    shares
        Numbers of questions, and their servers. Used by the call's thread alone from now on.
    question
        The question of a number.
    in_flight, silence_s
        See :class:`~refiner_core.generation.vllm.client.VllmGenerator`.
    """

    def __init__(
        self,
        fleet: WeightSync,
        shares: _Shares,
        question: Callable[[int], SampleQuery],
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

    def __enter__(self) -> _Call:
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
            No sample finished within that time.
        """
        item = self._found.get(timeout=timeout_s)
        if isinstance(item, BaseException):
            raise item
        return item

    def change(self, shares: Callable[[], None]) -> None:
        """Change the shares in the call's thread, and continue with them."""

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
        """Give work to every server with free capacity."""
        if not self._tasks:
            return  # not started yet
        for others in (False, True):  # own requests first, so that no server takes all
            for lane in self._shares.lanes:
                self._fill(lane, others=others)

    def _fill(self, lane: _ServerShare, *, others: bool) -> None:
        now = self._loop.time()
        while lane.up and now >= lane.held_until and len(lane.flying) < self._in_flight:
            index = self._shares.take(lane, others=others)
            if index is None:
                if others:
                    lane.held_until = 0.0  # no request is left to retry
                return
            if not lane.flying and not lane.held_until:
                lane.answered_at = now
            lane.flying[index] = self._start(self._ask(lane, index))

    async def _ask(self, lane: _ServerShare, index: int) -> None:
        body = completion_body(self._question(index))
        url = f"{lane.endpoint.url}/completions"
        answer = await self._client.post(url, lane.endpoint, body)
        del lane.flying[index]
        await self._take(lane, index, answer)
        self._pump()

    async def _take(self, lane: _ServerShare, index: int, answer: HttpAnswer | LostAnswer) -> None:
        """Handle an answer for its sample and for its server."""
        if isinstance(answer, HttpAnswer) and answer.status == 200:
            lane.answered_at, lane.held_until, lane.failed = self._loop.time(), 0.0, 0
            self._read(lane, index, answer.raw)
            return
        self._shares.give_back(index)
        if isinstance(answer, LostAnswer):
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
                expected="a vLLM version that accepts all fields of the request",
                fix="check grpo.rollout_server.args, and the version of vLLM",
            )

    def _read(self, lane: _ServerShare, index: int, raw: bytes) -> None:
        try:
            read = read_completion(raw, self._question(index))
        except InvalidResponse as error:
            raise StageFailed(
                f"The rollout server at {lane.endpoint.url} sent an unusable answer: {error}",
                expected="what vLLM answers to a completion request with return_token_ids",
                fix="check the vLLM version (0.32 is known to work) and grpo.rollout_server.args",
            ) from error
        if read != "abort":
            self._found.put((index, read))
            return
        self._aborts[index] = self._aborts.get(index, 0) + 1
        if self._aborts[index] > _MOST_ABORTS:
            raise StageFailed(
                f"Rollout servers gave up one sample {self._aborts[index]} times (`abort`)",
                expected="no other client that pauses the servers or aborts their requests",
                fix="make sure that only this stage uses the servers",
            )
        self._shares.give_back(index)

    async def _is_well(self, endpoint: Endpoint) -> bool:
        """True if the server reports a live engine, on a route outside the API."""
        return await self._client.probe(urljoin(endpoint.url, "/health"), endpoint) == 200

    async def _doubt(self, lane: _ServerShare, why: str) -> None:
        """Handle a failed request; a healthy server may fail occasionally."""
        lane.failed += 1
        endpoint = lane.endpoint
        if lane.failed < _FAILURES and await self._is_well(endpoint):
            return
        if lane.endpoint is endpoint:
            self._down(lane, why)

    async def _watch(self) -> None:
        """Detect silent servers."""
        while True:
            await asyncio.sleep(min(1.0, self._silence_s / 4))
            now = self._loop.time()
            for lane in self._shares.lanes:
                has_work = lane.flying or lane.held_until
                if lane.up and has_work and now - lane.answered_at > self._silence_s:
                    self._down(lane, f"it has answered nothing for {now - lane.answered_at:.0f} s")

    def _down(self, lane: _ServerShare, why: str) -> None:
        """Mark a server as lost; others do its work until it is replaced."""
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

    async def _revive(self, lane: _ServerShare, why: str) -> None:
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


def _answers(call: _Call) -> Iterator[tuple[int, Completion]]:
    """Finished samples: the first within :data:`POLL_S`, and all that are ready with it."""
    wait_s = POLL_S
    while True:
        try:
            answer = call.next(wait_s)
        except queue.Empty:
            return
        yield answer
        wait_s = 0.0


class _Batch:
    """A desk of requests, each a conversation of one turn."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None,
    ) -> None:
        self._waiting = tuple(
            TurnRequest(index, request.prompt_ids, request.seed, params)
            for index, request in enumerate(requests)
        )
        self._on_completion = on_completion
        self.found: dict[int, Completion] = {}

    def take(self, room: int, *, wait: bool) -> Turns:
        """All requests at the first call, none later."""
        begin, self._waiting = self._waiting, ()
        return Turns(begin, (), False)

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """Store the completion, and report it."""
        self.found[request.conversation] = completion
        if self._on_completion is not None:
            self._on_completion(request.conversation, completion)


class VllmGenerator:
    """A :class:`~refiner_core.contract.types.Generator` over a fleet of vLLM servers.

    Parameters
    ----------
    fleet
        The servers.
    window
        Tokens of prompt and completion together that the servers were started with.
    in_flight
        Requests per server at a time; those beyond its own batch wait in its queue.
    silence_s
        A server with work that sends no answer for so long counts as hung.
    on_step
        Called in the calling thread with (samples finished, samples requested) after each sample
        and about twice a second: a sign of life in calls that take minutes. An exception from it
        ends the call.
    """

    def __init__(
        self,
        fleet: WeightSync,
        *,
        window: int,
        in_flight: int = 512,
        silence_s: float = 1800.0,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        self.fleet, self._window = fleet, window
        self._in_flight, self._silence_s = in_flight, silence_s
        self.on_step = on_step

    def sync(self, hand_over: HandOver, version: str) -> None:
        """Send all servers a model's weights; the first call starts them. See
        :meth:`refiner_core.generation.vllm.sync.WeightSync.sync`."""
        self.fleet.sync(hand_over, version)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """Sample one completion per request, in order.

        Raises
        ------
        ConfigurationError
            Prompt and new tokens together exceed the servers' window.
        StageFailed
            A server sends an unusable answer, or refuses a request.
        KilledError
            Servers had to be replaced more often than the recipe allows.
        """
        if not requests:
            return []
        batch = _Batch(requests, params, on_completion)
        self._serve(batch, lambda request: request.context_ids)
        return [batch.found[index] for index in range(len(requests))]

    def turns(self, desk: TurnScheduler) -> None:
        """Sample the turns of conversations, each started as early as possible.

        Each turn is a separate request with its whole context. The turns of a conversation go to
        one server, whose prefix cache holds the earlier tokens. Raises the errors of
        :meth:`generate` and of the desk.
        """
        self._serve(desk, lambda request: request.conversation)

    def _serve(self, desk: TurnScheduler, key: Callable[[TurnRequest], Hashable]) -> None:
        """Work until the desk has no more turns; requests of one key go to one server."""
        with self.fleet.busy:
            weights = (self.fleet.stop_ids, self.fleet.version)
            shares = _Shares(self.fleet.endpoints())
            room = self._in_flight * len(shares.lanes)
            questions: dict[int, SampleQuery] = {}
            flying: dict[int, TurnRequest] = {}
            known: set[int] = set()
            begun = finished = 0
            told_at = time.monotonic()
            get = questions.__getitem__
            with _Call(self.fleet, shares, get, self._in_flight, self._silence_s) as call:
                while True:
                    turns = desk.take(max(0, room - len(known)), wait=not flying)
                    known.difference_update(turns.ended)
                    known.update(request.conversation for request in turns.begin)
                    new = list(enumerate(turns.begin, start=begun))
                    begun += len(new)
                    for index, request in new:
                        sample = GenerationRequest(request.context_ids, request.seed)
                        check_window([sample], request.params, self._window)
                        questions[index] = SampleQuery(sample, request.params, *weights)
                        flying[index] = request
                    keys = [(index, key(request)) for index, request in new]
                    call.change(partial(shares.change, keys, turns.ended))
                    if not flying and not turns.more:
                        return
                    before = finished
                    for index, completion in _answers(call) if flying else ():
                        del questions[index]
                        finished += 1
                        desk.finished(flying.pop(index), completion)
                    now = time.monotonic()
                    if self.on_step is not None and (finished > before or now - told_at >= _TICK_S):
                        told_at = now
                        self.on_step(finished, begun)
