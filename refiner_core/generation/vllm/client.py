"""Samples completions from vLLM servers over HTTP: the generator of clusters.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the distribution that was sampled from.

How a call runs:

1. Each request is one HTTP request with its own seed, whatever server it goes to
   (:mod:`refiner_core.generation.vllm.wire`).
2. Prompts are spread over the servers; who runs out of work takes from the others
   (:mod:`refiner_core.generation.vllm.lanes`).
3. A sample that a server gave up (``abort``) is discarded and asked again. A server that says that
   it is full is waited for. A server that is gone, ill or hung is replaced by the fleet; what it
   had in hand is asked again at once, of the others or of its successor.
4. ``on_completion`` runs in the calling thread, while the requests go on in another.

Weights never change during a call: the fleet's lock is held. Seeds alone decide a sample, as far as
vLLM's kernels give the same sums in batches of another composition: in float32 that is usual, in
bfloat16 a sample may differ from some token on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from refiner_core.contract.errors import ConfigurationError, StageFailed
from refiner_core.contract.types import (
    Completion,
    Endpoint,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
)
from refiner_core.generation.limits import check_params, check_window
from refiner_core.generation.vllm.lanes import Lane, Shares
from refiner_core.generation.vllm.transport import Answered, Lost, Transport, said
from refiner_core.generation.vllm.wire import Asked, Unusable, completion_body, read_completion

log = logging.getLogger(__name__)

#: How often the caller hears of progress while no sample is finished, seconds.
_TICK_S = 0.5
#: How long a server that says that it is full is left alone, seconds.
_FULL_S = 0.25
#: Failures in a row, with a server that says that it is well, before it is replaced all the same.
_FAILURES = 3
#: How often one sample may be given up by servers before that is no accident.
_MOST_ABORTS = 20


class Fleet(Protocol):
    """The servers as the generator sees them."""

    #: Held while anybody samples, and while weights change.
    busy: threading.Lock

    @property
    def version(self) -> str:
        """The version of the weights that all of them have."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """Their addresses, in order."""
        ...

    def revive(self, index: int, why: str) -> Endpoint:
        """Replace one by another with the same weights; its address. May take minutes.

        Raises
        ------
        RefinerError
            That is not possible, or was necessary too often.
        """
        ...


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
        fleet: Fleet,
        *,
        window: int,
        in_flight: int = 512,
        silence_s: float = 1800.0,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        if in_flight < 1:
            raise ConfigurationError(
                f"{in_flight} requests at a time sample nothing",
                expected="1 or more",
                fix="set grpo.generation_batch_size",
            )
        self._fleet, self._window = fleet, window
        self._in_flight, self._silence_s = in_flight, silence_s
        self.on_step = on_step

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
            If parameters make no sense, a prompt is empty, or prompt and new tokens together exceed
            the servers' window.
        StageFailed
            If a server answers with what was not asked for, or refuses a request.
        KilledError
            If servers had to be replaced more often than the recipe allows.
        """
        if not requests:
            return []
        check_params(params)
        check_window(requests, params, self._window)
        with self._fleet.busy:
            asked = Asked(params, self._fleet.stop_ids, self._fleet.version)
            call = _Call(self._fleet, requests, asked, self._in_flight, self._silence_s)
            return self._collect(call, len(requests), on_completion)

    def _collect(
        self, call: _Call, count: int, on_completion: OnCompletion | None
    ) -> list[Completion]:
        found: dict[int, Completion] = {}
        with call:
            while len(found) < count:
                with contextlib.suppress(queue.Empty):
                    index, completion = call.next(_TICK_S)
                    found[index] = completion
                    if on_completion is not None:
                        on_completion(index, completion)
                if self.on_step is not None:
                    self.on_step(len(found), count)
        return [found[index] for index in range(count)]


class _Call:
    """One call at work, in a thread with an event loop of its own; ends with its ``with`` block."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Sequence[GenerationRequest],
        asked: Asked,
        in_flight: int,
        silence_s: float,
    ) -> None:
        self._fleet, self._requests, self._asked = fleet, requests, asked
        self._in_flight, self._silence_s = in_flight, silence_s
        self._shares = Shares(requests, fleet.endpoints())
        self._aborts: dict[int, int] = {}
        self._left = len(requests)
        self._found: queue.SimpleQueue[tuple[int, Completion] | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="refiner-rollouts", daemon=True)

    def __enter__(self) -> _Call:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

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

    # ---- in the thread of the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._work())
        except BaseException as error:
            self._found.put(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _work(self) -> None:
        self._transport = Transport()
        try:
            self._start(self._watch())
            self._pump()
            await self._over.wait()
        finally:
            running = tuple(self._tasks)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._transport.close()

    def _pump(self) -> None:
        """Give work to every server that has room for it."""
        now = self._loop.time()
        for lane in self._shares.lanes:
            while lane.up and now >= lane.held_until and len(lane.flying) < self._in_flight:
                index = self._shares.take(lane)
                if index is None:
                    lane.held_until = 0.0  # nothing is left that it could be waited for with
                    break
                if not lane.flying and not lane.held_until:
                    lane.heard_at = now
                lane.flying[index] = self._start(self._ask(lane, index))

    async def _ask(self, lane: Lane, index: int) -> None:
        body = completion_body(self._requests[index], self._asked)
        answer = await self._transport.complete(lane.endpoint, body)
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
        elif answer.status == 503 and await self._transport.is_well(lane.endpoint):
            lane.held_until = self._loop.time() + _FULL_S  # its queue is full
            self._loop.call_later(_FULL_S, self._pump)
        elif answer.status >= 500:
            await self._doubt(lane, f"HTTP {answer.status}: {said(answer.raw, lane.endpoint)}")
        else:
            raise StageFailed(
                f"The rollout server at {lane.endpoint.url} refuses a request with HTTP "
                f"{answer.status}: {said(answer.raw, lane.endpoint)}",
                expected="a vLLM server of a version that takes all fields of the request",
                fix="see grpo.rollout_server.args, and the version of vLLM",
            )

    def _read(self, lane: Lane, index: int, raw: bytes) -> None:
        try:
            read = read_completion(raw, self._requests[index], self._asked)
        except Unusable as error:
            raise StageFailed(
                f"The rollout server at {lane.endpoint.url} answers with what was not asked for: "
                f"{error}",
                expected="what vLLM answers to a completion request with return_token_ids",
                fix="see the version of vLLM (0.32 is known to work) and grpo.rollout_server.args",
            ) from error
        if read != "abort":
            self._left -= 1
            self._found.put((index, read))
            if not self._left:
                self._over.set()
            return
        self._aborts[index] = self._aborts.get(index, 0) + 1
        if self._aborts[index] > _MOST_ABORTS:
            raise StageFailed(
                f"Rollout servers gave up one sample {self._aborts[index]} times (`abort`)",
                expected="nobody else who pauses the servers or aborts their requests",
                fix="see that nobody but this stage asks them",
            )
        self._shares.give_back(index)

    async def _doubt(self, lane: Lane, why: str) -> None:
        """A request failed: is it the server? One that is well may fail now and then."""
        lane.failed += 1
        endpoint = lane.endpoint
        if lane.failed < _FAILURES and await self._transport.is_well(endpoint):
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
            self._over.set()
