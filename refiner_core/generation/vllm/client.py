"""Samples completions from vLLM servers over HTTP: the generator of clusters.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the distribution that was sampled from.

How a call runs:

1. Each request is one HTTP request with its own seed, whatever server it goes to
   (:mod:`refiner_core.generation.vllm.wire`).
2. Prompts are spread over the servers; who runs out of work takes from the others.
3. A sample that a server gave up (``abort``) is discarded and asked again. A server that says that
   it is full is waited for. One that is gone, ill or hung is replaced by the fleet; what it had in
   hand is asked again at once, of the others or of its successor.
4. ``on_completion`` runs in the calling thread, while the requests go on in another.

Turns of conversations are requests too. The desk is looked at whenever a turn is sampled, and every
:data:`POLL_S` seconds for tools that have ended since. Which turn comes back first is a matter of
the servers, so other than the embedded backend this one gives the same bits twice only as far as
the servers do.

Weights never change during a call: the fleet's lock is held. Seeds alone decide a sample, as far as
vLLM's kernels give the same sums in batches of another composition: in float32 that is usual, in
bfloat16 a sample may differ from some token on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
    TurnDesk,
    TurnRequest,
    Turns,
)
from refiner_core.generation.completions import check_window
from refiner_core.generation.vllm.sync import WeightSync
from refiner_core.generation.vllm.wire import (
    Question,
    Unusable,
    completion_body,
    read_completion,
    said,
)
from refiner_core.http.client import CONNECT_S, Answered, Client, LoopThread, Lost

log = logging.getLogger(__name__)

#: How long an answer is waited for before the desk is asked again, seconds.
POLL_S = 0.02
#: How often the caller hears of progress while no turn is finished, seconds.
_TICK_S = 0.5


@dataclass(eq=False)
class _Lane:
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


class _Shares:
    """The requests that nobody has in hand. Those of one key (samples of a prompt, turns of a
    conversation) go to one server, whose prefix cache has what they begin with."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.lanes = [_Lane(index, endpoint) for index, endpoint in enumerate(endpoints)]
        self._back: deque[int] = deque()
        self._home: dict[Hashable, _Lane] = {}
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

    def take(self, lane: _Lane, *, others: bool = True) -> int | None:
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

    def change(self, new: Iterable[tuple[int, Hashable]], ended: Iterable[Hashable]) -> None:
        """Add requests with their keys; of others there are no further ones."""
        for key in ended:
            self._home.pop(key, None)
        for index, key in new:
            self.add(index, key)

    def _moved(self, index: int, lane: _Lane) -> int:
        if (key := self._of.get(index)) in self._home:
            self._home[key] = lane
        return index


#: How long a server that says that it is full is left alone, seconds.
_FULL_S = 0.25
#: Failures in a row, with a server that says that it is well, before it is replaced all the same.
_FAILURES = 3
#: How often one sample may be given up by servers before that is no accident.
_MOST_ABORTS = 20


class _Call:
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
        shares: _Shares,
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

    def _fill(self, lane: _Lane, *, others: bool) -> None:
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

    async def _ask(self, lane: _Lane, index: int) -> None:
        body = completion_body(self._question(index))
        url = f"{lane.endpoint.url}/completions"
        answer = await self._client.post(url, lane.endpoint, body)
        del lane.flying[index]
        await self._take(lane, index, answer)
        self._pump()

    async def _take(self, lane: _Lane, index: int, answer: Answered | Lost) -> None:
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

    def _read(self, lane: _Lane, index: int, raw: bytes) -> None:
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

    async def _doubt(self, lane: _Lane, why: str) -> None:
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

    def _down(self, lane: _Lane, why: str) -> None:
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

    async def _revive(self, lane: _Lane, why: str) -> None:
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
    """What has come: the first within :data:`POLL_S`, and what is there with it."""
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
        """All of them, at the first call."""
        begin, self._waiting = self._waiting, ()
        return Turns(begin, (), False)

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        """Keep it, and tell of it."""
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
        Tokens of prompt and completion together that they were started for.
    in_flight
        Requests that a server is given at a time; what exceeds its own batch waits in its queue.
    silence_s
        A server that has work and answers nothing for so long counts as hung.
    on_step
        Called in the calling thread with (samples finished, samples asked for) after each sample
        and about twice a second: a sign of life in calls that take minutes. What it raises ends
        the call.
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

    def sync(self, whole: AbstractContextManager[Any], version: str) -> None:
        """Give all servers the weights of the model that ``whole`` yields; the first call starts
        them. See :meth:`refiner_core.generation.vllm.sync.WeightSync.sync`."""
        self.fleet.sync(whole, version)

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
            If prompt and new tokens together exceed the servers' window.
        StageFailed
            If a server answers with what was not asked for, or refuses a request.
        KilledError
            If servers had to be replaced more often than the recipe allows.
        """
        if not requests:
            return []
        batch = _Batch(requests, params, on_completion)
        self._serve(batch, lambda request: request.context_ids)
        return [batch.found[index] for index in range(len(requests))]

    def turns(self, desk: TurnDesk) -> None:
        """Sample the turns of conversations, each as soon as it may begin.

        Each turn is a request of its own, with all of its context. The turns of a conversation go
        to one server, whose prefix cache has what came before. Errors as of :meth:`generate`, and
        those of the desk.
        """
        self._serve(desk, lambda request: request.conversation)

    def _serve(self, desk: TurnDesk, key: Callable[[TurnRequest], Hashable]) -> None:
        """Work until the desk has no more; requests of one key go to one server."""
        with self.fleet.busy:
            weights = (self.fleet.stop_ids, self.fleet.version)
            shares = _Shares(self.fleet.endpoints())
            room = self._in_flight * len(shares.lanes)
            questions: dict[int, Question] = {}
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
                        questions[index] = Question(sample, request.params, *weights)
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
