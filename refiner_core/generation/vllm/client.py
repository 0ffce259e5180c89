"""Samples completions from vLLM servers over HTTP: the generator of clusters.

In: requests (prompt ids and a seed each) and sampling parameters. Out: completions in the order of
the requests, with the log-probabilities of the distribution that was sampled from.

How a call runs:

1. Each request is one HTTP request with its own seed, whatever server it goes to
   (:mod:`refiner_core.generation.vllm.wire`).
2. Prompts are spread over the servers; who runs out of work takes from the others
   (:mod:`refiner_core.generation.vllm.call`).
3. What a server gave up is asked again, and a server that is lost is replaced
   (:mod:`refiner_core.generation.vllm.call`).
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

import contextlib
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    OnCompletion,
    SamplingParams,
    TurnDesk,
    TurnRequest,
)
from refiner_core.generation.completions import check_params, check_window
from refiner_core.generation.vllm.call import Call, Shares
from refiner_core.generation.vllm.sync import WeightSync
from refiner_core.generation.vllm.wire import Question

#: How long an answer is waited for before the desk is asked again, seconds.
POLL_S = 0.02
#: How often the caller hears of progress while no turn is finished, seconds.
_TICK_S = 0.5


def _answers(call: Call) -> Iterator[tuple[int, Completion]]:
    """What has come: the first within :data:`POLL_S`, and what is there with it."""
    wait_s = POLL_S
    while True:
        try:
            answer = call.next(wait_s)
        except queue.Empty:
            return
        yield answer
        wait_s = 0.0


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
        with self.fleet.busy:
            rest = (params, self.fleet.stop_ids, self.fleet.version)
            shares = Shares(self.fleet.endpoints())
            for index, request in enumerate(requests):
                shares.add(index, request.prompt_ids)
            found: dict[int, Completion] = {}
            with self._call(shares, lambda index: Question(requests[index], *rest)) as call:
                while len(found) < len(requests):
                    with contextlib.suppress(queue.Empty):
                        index, completion = call.next(_TICK_S)
                        found[index] = completion
                        if on_completion is not None:
                            on_completion(index, completion)
                    if self.on_step is not None:
                        self.on_step(len(found), len(requests))
        return [found[index] for index in range(len(requests))]

    def turns(self, desk: TurnDesk) -> None:
        """Sample the turns of conversations, each as soon as it may begin.

        Each turn is a request of its own, with all of its context. The turns of a conversation go
        to one server, whose prefix cache has what came before. Errors as of :meth:`generate`, and
        those of the desk.
        """
        with self.fleet.busy:
            lanes = Shares(self.fleet.endpoints())
            questions: dict[int, Question] = {}
            self._serve(self._call(lanes, questions.__getitem__), lanes, questions, desk)

    def _serve(
        self, call: Call, lanes: Shares, questions: dict[int, Question], desk: TurnDesk
    ) -> None:
        """Work until the desk has no more. The call asks the numbers that ``lanes`` is told of, and
        looks them up in ``questions``."""
        room = self._in_flight * len(lanes.lanes)
        numbers = count()
        known: set[int] = set()
        flying: dict[int, TurnRequest] = {}
        begun = finished = 0
        told_at = time.monotonic()

        def ask(request: TurnRequest) -> None:
            check_params(request.params)
            sample = GenerationRequest(request.context_ids, request.seed)
            check_window([sample], request.params, self._window)
            index, conversation = next(numbers), request.conversation
            rest = (request.params, self.fleet.stop_ids, self.fleet.version)
            questions[index] = Question(sample, *rest)
            flying[index] = request
            known.add(conversation)
            call.change(lambda: lanes.add(index, conversation))

        def end(conversation: int) -> None:
            known.discard(conversation)
            call.change(lambda: lanes.end(conversation))

        with call:
            while True:
                turns = desk.take(max(0, room - len(known)), wait=not flying)
                for conversation in turns.ended:
                    end(conversation)
                for request in turns.begin:
                    ask(request)
                begun += len(turns.begin)
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

    def _call(self, shares: Shares, question: Callable[[int], Question]) -> Call:
        return Call(self.fleet, shares, question, self._in_flight, self._silence_s)
