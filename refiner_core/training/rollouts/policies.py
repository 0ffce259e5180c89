"""Policies, which sample rollouts: the live model, a frozen copy, or servers.

In: an engine whose weights move. Out: completions under the weights of a known *version*: the
number of training steps that these weights have behind them.

| policy | samples | with | while the engine trains |
|---|---|---|---|
| :class:`Policy` | on every rank, its share | the engine's own weights | no |
| :class:`CopyPolicy` | on every rank, its share | a copy made at each sync | yes |
| :class:`ServedPolicy` | on servers, for rank 0 | what was sent to them at each sync | yes |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    OnCompletion,
    SamplingParams,
    TurnDesk,
)
from refiner_core.generation.completions import turn_generator
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.model.loading import model_tensors

if TYPE_CHECKING:
    from refiner_core.generation.vllm.client import VllmGenerator

#: A generator over a model: ``(model, called after every token)``.
MakeGenerator = Callable[[Any, Callable[[int, int], None]], Generator]


class Policy:
    """Sampler with the weights of its last :meth:`sync`; by itself it has the engine's own model:
    always the newest weights, and nothing else meanwhile.

    ``ready`` gives a context that :meth:`generate` must be called inside of, on all ranks together.
    """

    #: Whether it may sample in a thread while the engine trains.
    beside = False
    #: Whether every rank samples a share; otherwise rank 0 has all of it.
    every_rank = True

    def __init__(
        self,
        generator: Generator | None,
        ready: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._generator, self.ready, self._stop = generator, ready, threading.Event()
        #: Training steps behind the weights that it samples with.
        self.version = 0

    def sync(self, engine: Engine, version: int) -> None:
        """Take over the engine's weights; all ranks call it together, while nothing is sampled."""
        self.version = version

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion | None = None,
    ) -> list[Completion]:
        """As of :meth:`refiner_core.contract.types.Generator.generate`."""
        return self._sampling().generate(requests, params, on_completion)

    def turns(self, desk: TurnDesk) -> None:
        """As of :meth:`refiner_core.contract.types.TurnGenerator.turns`, inside of
        :meth:`ready` too; round by round where what samples has no turns of its own."""
        turn_generator(self._sampling()).turns(desk)

    def cancel(self) -> None:
        """End a :meth:`generate` or :meth:`turns` that runs in another thread, at its next sign of
        life; it raises :class:`Cancelled`, or what a desk raises that was told to stop."""
        self._stop.set()

    def cancelled(self) -> bool:
        """True if :meth:`cancel` was called."""
        return self._stop.is_set()

    def stop_if_cancelled(self) -> None:
        """Raise :class:`Cancelled` after :meth:`cancel`."""
        if self._stop.is_set():
            raise Cancelled

    def _sampling(self) -> Generator:
        self.stop_if_cancelled()
        if self._generator is None:
            raise RuntimeError("rank 0 alone samples on servers")
        return self._generator


#: Starts servers for an engine's model, and ends them with its block. Who knows about processes and
#: GPUs gives it to rank 0.
OpenServers = Callable[[Engine], "AbstractContextManager[VllmGenerator]"]


class Cancelled(Exception):
    """Sampling was ended because the stage ends."""


class CopyPolicy(Policy):
    """A frozen copy of the model on every rank: one more set of weights in memory.

    ``make_generator(model, on_step)`` gives what samples with it.
    """

    beside = True

    def __init__(self, model: Any, make_generator: MakeGenerator) -> None:
        self.model = model.requires_grad_(False)
        super().__init__(make_generator(self.model, lambda *_: self.stop_if_cancelled()))

    def sync(self, engine: Engine, version: int) -> None:
        """Copy the weights."""
        with engine.whole() as live, torch.no_grad():
            source = model_tensors(live)
            for name, tensor in model_tensors(self.model).items():
                tensor.copy_(source[name])
        self.version = version


class ServedPolicy(Policy):
    """Servers that hold the weights; ``servers`` is None on every rank but the first."""

    beside, every_rank = True, False

    def __init__(self, servers: VllmGenerator | None) -> None:
        super().__init__(servers)
        self._servers = servers
        if servers is not None:
            servers.on_step = lambda *_: self.stop_if_cancelled()

    def sync(self, engine: Engine, version: int) -> None:
        """Send them the weights. An error of rank 0 is an error of all, wherever it happens."""
        entered, error = False, None

        @contextmanager
        def whole() -> Iterator[Any]:
            nonlocal entered
            entered = True
            with engine.whole() as model:
                yield model

        if self._servers is not None:
            try:
                self._servers.sync(whole(), str(version))
            except Exception as raised:
                error = raised
        if not entered:  # the other ranks are in there and wait
            with whole():
                pass
        engine.ranks.all_or_none(error)
        self.version = version
