"""Turns of conversations on vLLM servers: one HTTP request each.

In: a desk that hands out turns, and a call that asks servers. Out: completions, told to the desk in
the calling thread; the servers go on meanwhile, and batch what they have by themselves.

The desk is looked at whenever a turn is sampled, and every :data:`POLL_S` seconds for tools that
have ended since. Which turn comes back first is a matter of the servers, so other than the embedded
backend this one gives the same bits twice only as far as the servers do.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from itertools import count

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
    TurnDesk,
    TurnRequest,
)
from refiner_core.generation.limits import check_params, check_window
from refiner_core.generation.vllm.call import Call, Question
from refiner_core.generation.vllm.lanes import Conversations
from refiner_core.generation.vllm.wire import Asked

#: How long an answer is waited for before the desk is asked again, seconds.
POLL_S = 0.02
#: How often the caller hears of progress while no turn is finished, seconds.
_TICK_S = 0.5


def serve_turns(
    call: Call,
    lanes: Conversations,
    questions: dict[int, Question],
    desk: TurnDesk,
    *,
    asked: Callable[[SamplingParams], Asked],
    window: int,
    room: int,
    on_step: Callable[[int, int], None] | None,
) -> None:
    """Work until the desk has no more.

    Parameters
    ----------
    call, lanes, questions
        Asks the numbers that ``lanes`` is told of, and looks them up in ``questions``.
    desk
        Gives turns and takes completions.
    asked
        What is the same for all turns with these parameters.
    window
        Tokens of context and completion together.
    room
        Most conversations under way.
    on_step
        Called with (turns finished, turns begun) after turns end, and about twice a second.
    """
    numbers = count()
    known: set[int] = set()
    flying: dict[int, TurnRequest] = {}
    begun = finished = 0
    told_at = time.monotonic()

    def ask(request: TurnRequest) -> None:
        check_params(request.params)
        sample = GenerationRequest(request.context_ids, request.seed)
        check_window([sample], request.params, window)
        index, conversation = next(numbers), request.conversation
        questions[index] = Question(sample, asked(request.params))
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
            if on_step is not None and (finished > before or now - told_at >= _TICK_S):
                told_at = now
                on_step(finished, begun)


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
