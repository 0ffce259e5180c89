"""What samples rollouts, and with which weights: the live model, a frozen copy, or servers.

In: an engine whose weights move. Out: completions under the weights of a known *version*: the
number of training steps that these weights have behind them.

| policy | samples | with | while the engine trains |
|---|---|---|---|
| :class:`LivePolicy` | on every rank, its share | the engine's own weights | no |
| :class:`CopyPolicy` | on every rank, its share | a copy made at each sync | yes |
| :class:`ServedPolicy` | on servers, for rank 0 | what was sent to them at each sync | yes |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from refiner_core.contract.types import (
    Completion,
    GenerationRequest,
    Generator,
    OnCompletion,
    SamplingParams,
    TurnDesk,
    TurnRequest,
    Turns,
)
from refiner_core.generation.completions import turn_generator
from refiner_core.training.engines.protocol import Engine

#: A generator over a model: ``(model, called after every token)``.
MakeGenerator = Callable[[Any, Callable[[int, int], None]], Generator]


class Policy(Protocol):
    """Samples with the weights of its last :meth:`sync`."""

    #: Whether it may sample in a thread while the engine trains.
    beside: bool
    #: Whether every rank samples a share; otherwise rank 0 has all of it.
    every_rank: bool
    #: Training steps behind the weights that it samples with.
    version: int

    def sync(self, engine: Engine, version: int) -> None:
        """Take over the engine's weights; all ranks call it together, while nothing is sampled."""
        ...

    def ready(self) -> AbstractContextManager[Any]:
        """What :meth:`generate` must be called inside of, on all ranks together."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion,
    ) -> list[Completion]:
        """As of :meth:`refiner_core.contract.types.Generator.generate`."""
        ...

    def turns(self, desk: TurnDesk) -> None:
        """As of :meth:`refiner_core.contract.types.TurnGenerator.turns`, inside of
        :meth:`ready` too; round by round where what samples has no turns of its own."""
        ...

    def cancel(self) -> None:
        """End a :meth:`generate` or :meth:`turns` that runs in another thread; it raises
        :class:`Cancelled`."""
        ...

    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        ...


class Servers(Protocol):
    """Servers that sample, as far as training knows them; rank 0 alone talks to them."""

    @property
    def generator(self) -> Generator:
        """Samples on them."""
        ...

    def sync(self, whole: AbstractContextManager[Any], version: str) -> None:
        """Give them the weights of a model; ``whole`` yields it, and is entered once."""
        ...


#: Starts servers for an engine's model, and ends them with its block. Who knows about processes and
#: GPUs gives it to rank 0.
OpenServers = Callable[[Engine], AbstractContextManager[Servers]]


class Cancelled(Exception):
    """Sampling was ended because the stage ends."""


class LivePolicy:
    """The engine's own model: always the newest weights, and nothing else meanwhile."""

    beside, every_rank = False, True

    def __init__(self, engine: Engine, generator: Generator) -> None:
        self._engine, self._generator, self.version = engine, generator, 0

    def sync(self, engine: Engine, version: int) -> None:
        """Nothing to do."""
        self.version = version

    def ready(self) -> AbstractContextManager[Any]:
        """The engine's weights, gathered where they are sharded."""
        return self._engine.whole()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion,
    ) -> list[Completion]:
        """Sample with the model as it is."""
        return self._generator.generate(requests, params, on_completion)

    def turns(self, desk: TurnDesk) -> None:
        """Sample turns with the model as it is."""
        turn_generator(self._generator).turns(desk)

    def cancel(self) -> None:
        """It never runs in another thread."""

    def cancelled(self) -> bool:
        """Never."""
        return False


class CopyPolicy:
    """A frozen copy of the model on every rank: one more set of weights in memory.

    ``make_generator(model, on_step)`` gives what samples with it.
    """

    beside, every_rank = True, True

    def __init__(self, model: Any, make_generator: MakeGenerator) -> None:
        self.model, self.version = model.requires_grad_(False), 0
        self._stop = threading.Event()
        self._generator = make_generator(model, lambda *_: self._stop_if_cancelled())

    def sync(self, engine: Engine, version: int) -> None:
        """Copy the weights."""
        with engine.whole() as live, torch.no_grad():
            source = _tensors(live)
            for name, tensor in _tensors(self.model).items():
                tensor.copy_(source[name])
        self.version = version

    def ready(self) -> AbstractContextManager[Any]:
        """Nothing is needed."""
        return nullcontext()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion,
    ) -> list[Completion]:
        """Sample with the copy."""
        self._stop_if_cancelled()
        return self._generator.generate(requests, params, on_completion)

    def turns(self, desk: TurnDesk) -> None:
        """Sample turns with the copy."""
        turn_generator(self._generator).turns(_Stopped(desk, self._stop_if_cancelled))

    def cancel(self) -> None:
        """End it after the token that is being sampled, or once the desk answers."""
        self._stop.set()

    def cancelled(self) -> bool:
        """Whether it is to end."""
        return self._stop.is_set()

    def _stop_if_cancelled(self) -> None:
        if self._stop.is_set():
            raise Cancelled


class ServedPolicy:
    """Servers that hold the weights; ``servers`` is None on every rank but the first."""

    beside, every_rank = True, False

    def __init__(self, servers: Servers | None) -> None:
        self._servers, self.version = servers, 0
        self._stop = threading.Event()
        if servers is not None and hasattr(servers.generator, "on_step"):
            servers.generator.on_step = lambda *_: self._stop_if_cancelled()

    def sync(self, engine: Engine, version: int) -> None:
        """Send them the weights. An error of rank 0 is an error of all, wherever it happens."""
        whole, error = _Entered(engine.whole()), None
        if self._servers is not None:
            try:
                self._servers.sync(whole, str(version))
            except Exception as raised:
                error = raised
        if not whole.entered:  # the other ranks are in there and wait
            with whole:
                pass
        engine.ranks.all_or_none(error)
        self.version = version

    def ready(self) -> AbstractContextManager[Any]:
        """Nothing is needed."""
        return nullcontext()

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        params: SamplingParams,
        on_completion: OnCompletion,
    ) -> list[Completion]:
        """Sample on the servers."""

        def finished(index: int, completion: Completion) -> None:
            self._stop_if_cancelled()
            on_completion(index, completion)

        if self._servers is None:
            raise RuntimeError("rank 0 alone samples on servers")
        return self._servers.generator.generate(requests, params, finished)

    def turns(self, desk: TurnDesk) -> None:
        """Sample turns on the servers."""
        if self._servers is None:
            raise RuntimeError("rank 0 alone samples on servers")
        stopped = _Stopped(desk, self._stop_if_cancelled)
        turn_generator(self._servers.generator).turns(stopped)

    def cancel(self) -> None:
        """End it at the next sample that is finished, or sign of life of the generator."""
        self._stop.set()

    def cancelled(self) -> bool:
        """Whether it is to end."""
        return self._stop.is_set()

    def _stop_if_cancelled(self) -> None:
        if self._stop.is_set():
            raise Cancelled


class _Stopped:
    """A desk at which ``check`` is asked before and after each visit."""

    def __init__(self, desk: TurnDesk, check: Callable[[], None]) -> None:
        self._desk, self._check = desk, check

    def take(self, room: int, *, wait: bool) -> Turns:
        self._check()
        try:
            return self._desk.take(room, wait=wait)
        finally:
            self._check()  # a desk that stopped for this said so in its own way

    def finished(self, request: TurnRequest, completion: Completion) -> None:
        self._check()
        self._desk.finished(request, completion)


class _Entered:
    """A context that knows whether somebody was in it."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context, self.entered = context, False

    def __enter__(self) -> Any:
        self.entered = True
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters (a tied one once) and persistent buffers."""
    named = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    named.update((name, b) for name, b in model.named_buffers() if name in persistent)
    return named
