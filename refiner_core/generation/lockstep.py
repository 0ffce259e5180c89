"""Turns of conversations over a generator that knows none: round by round.

In: a :class:`~refiner_core.contract.types.Generator`. Out: a
:class:`~refiner_core.contract.types.TurnGenerator` over it.

A round is all turns that a desk has ready, sampled by one call of ``generate`` for each kind of
sampling parameters, every context as a prompt of its own. Nothing joins a round that has begun, and
no keys are kept between rounds: simple, and slower than
:meth:`~refiner_core.generation.transformers_backend.TransformersGenerator.turns`. Completions go to
the desk as each ends, so tools of those that ended early run beside the rest of the round.
"""

from __future__ import annotations

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    SamplingParams,
    TurnDesk,
    TurnGenerator,
    TurnRequest,
    Turns,
)

#: Conversations under way at a time, where the generator does not say how many it decodes together.
ROOM = 256


class LockstepTurns:
    """A :class:`~refiner_core.contract.types.TurnGenerator` over any generator.

    Parameters
    ----------
    generator
        Samples the rounds.
    room
        Most conversations under way; None: as many as the generator decodes together
        (``batch_size``), else :data:`ROOM`.
    """

    def __init__(self, generator: Generator, *, room: int | None = None) -> None:
        self._generator = generator
        self._room = room or int(getattr(generator, "batch_size", ROOM))

    def turns(self, desk: TurnDesk) -> None:
        """Sample rounds until the desk has no more. Errors as of ``generate`` and of the desk."""
        known: set[int] = set()

        def ask(*, wait: bool) -> Turns:
            turns = desk.take(max(0, self._room - len(known)), wait=wait)
            known.difference_update(turns.ended)
            known.update(request.conversation for request in turns.begin)
            return turns

        while True:
            turns = ask(wait=True)
            begin = turns.begin
            if turns.ended and turns.more:  # there is more room than the desk knew
                begin += ask(wait=False).begin
            if not begin and not turns.more:
                return
            by_params: dict[SamplingParams, list[TurnRequest]] = {}
            for request in begin:
                by_params.setdefault(request.params, []).append(request)
            for params, requests in by_params.items():
                self._sample(desk, params, requests)

    def _sample(self, desk: TurnDesk, params: SamplingParams, requests: list[TurnRequest]) -> None:
        def finished(index: int, completion: Completion) -> None:
            desk.finished(requests[index], completion)

        self._generator.generate(
            [GenerationRequest(request.context_ids, request.seed) for request in requests],
            params,
            finished,
        )


def turn_generator(generator: Generator | TurnGenerator) -> TurnGenerator:
    """The generator itself where it samples turns, else lockstep over it."""
    return generator if isinstance(generator, TurnGenerator) else LockstepTurns(generator)
