"""Policies, which sample rollouts: the live model, a frozen copy, or servers.

In: an engine whose weights change. Out: completions under the weights of a known *version*: the
number of training steps behind these weights.

| policy | samples | with | in parallel to training |
|---|---|---|---|
| :class:`Policy` | on every rank, its share | the engine's own weights | no |
| :class:`CopyPolicy` | on every rank, its share | a copy made at each sync | yes |
| :class:`ServedPolicy` | on servers, for rank 0 | weights sent at each sync | yes |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    OnCompletion,
    SamplingParams,
    TurnScheduler,
)
from refiner_core.generation.completions import turn_generator
from refiner_core.generation.saving import SaveWeights, model_tensors
from refiner_core.training.engines.protocol import Engine

if TYPE_CHECKING:
    from refiner_core.generation.vllm.client import VllmGenerator

#: Makes a generator over a model, from ``(model, called after every token)``.
MakeGenerator = Callable[[Any, Callable[[int, int], None]], Generator]


class Policy:
    """Sampler with the weights of its last :meth:`sync`. The base class uses the engine's own
    model: always the newest weights, and no sampling while the engine trains.

    ``ready`` gives a context for :meth:`generate`, entered on all ranks together.
    """

    #: Whether it may sample in a thread while the engine trains.
    beside = False
    #: Whether every rank samples a share; otherwise rank 0 samples everything.
    every_rank = True

    def __init__(
        self,
        generator: Generator | None,
        ready: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._generator, self.ready, self._stop = generator, ready, threading.Event()
        #: Training steps behind the current weights.
        self.version = 0

    def sync(self, engine: Engine, version: int) -> None:
        """Load the engine's weights; all ranks call it together, while nothing is sampled."""
        self.version = version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """See :meth:`refiner_core.contract.types.Generator.generate`."""
        return self._sampling().generate(requests, params, on_completion)

    def turns(self, desk: TurnScheduler) -> None:
        """See :meth:`refiner_core.contract.types.TurnGenerator.turns`; call it within
        :meth:`ready`. Works round by round if the generator has no turns of its own."""
        turn_generator(self._sampling()).turns(desk)

    def cancel(self) -> None:
        """Stop a :meth:`generate` or :meth:`turns` running in another thread, at its next sign of
        life; it raises :class:`~concurrent.futures.CancelledError`, or the scheduler's own
        exception."""
        self._stop.set()

    def cancelled(self) -> bool:
        """True if :meth:`cancel` was called."""
        return self._stop.is_set()

    def stop_if_cancelled(self) -> None:
        """Raise :class:`~concurrent.futures.CancelledError` after :meth:`cancel`."""
        if self._stop.is_set():
            raise CancelledError

    def _sampling(self) -> Generator:
        self.stop_if_cancelled()
        if self._generator is None:
            raise RuntimeError("rank 0 alone samples on servers")
        return self._generator


#: Starts servers for an engine's model; its context ends them. Given by code that manages processes
#: and GPUs: to rank 0, which gets the generator, and with servers on several nodes to all ranks,
#: where the first rank of another node saves the weights for its servers.
OpenServers = Callable[[Engine], "AbstractContextManager[VllmGenerator | SaveWeights | None]"]


class CopyPolicy(Policy):
    """A frozen copy of the model on every rank, at the cost of one more set of weights in memory.

    ``make_generator(model, on_step)`` makes the generator over the copy.
    """

    beside = True

    def __init__(self, model: Any, make_generator: MakeGenerator) -> None:
        self.model = model.requires_grad_(False)
        super().__init__(make_generator(self.model, lambda *_: self.stop_if_cancelled()))

    def sync(self, engine: Engine, version: int) -> None:
        """Copy the weights."""
        copies = model_tensors(self.model)
        for name, tensor in engine.weights(lambda _: True):
            copies[name].copy_(tensor)
        self.version = version


class ServedPolicy(Policy):
    """Servers that hold the weights. Rank 0 has ``servers``; the first rank of another node saves
    the weights for those of its node."""

    beside, every_rank = True, False

    def __init__(self, servers: VllmGenerator | None, save: SaveWeights | None = None) -> None:
        super().__init__(servers)
        self._servers, self._save = servers, save
        if servers is not None:
            servers.on_step = lambda *_: self.stop_if_cancelled()

    def sync(self, engine: Engine, version: int) -> None:
        """Send the weights to the servers. An error on one rank is raised on all ranks."""
        entered, saved, error = False, False, None

        def hand_over(prompt_of: Callable[[Any], Sequence[int]], save: SaveWeights) -> Tensor:
            nonlocal entered, saved
            entered = True
            logits = engine.hand_over(prompt_of, save)
            saved = True  # on every node
            return logits

        if self._servers is not None:
            try:
                self._servers.sync(hand_over, str(version))
            except Exception as raised:
                if entered and not saved:
                    raise  # on all ranks, already
                error = raised
        if not entered:  # the other ranks wait inside it
            engine.hand_over(lambda _: [0], self._save)
        engine.ranks.all_or_none(error)
        self.version = version
