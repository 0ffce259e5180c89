"""The processes that train one model together, and what they tell each other.

In: how many there are and which one this is. Out: values that all agree on. What is decided once
(where to resume, whether to stop, what was sampled) is decided by rank 0 and broadcast, so that no
two ranks can take different turns: under ZeRO-3 they would wait for each other for ever.

Gradients do not travel here; that is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.types import Progress, SavedCheckpoint, StageIO

T = TypeVar("T")


class Ranks(Protocol):
    """One process among ``world``; every method is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...

    @property
    def local_rank(self) -> int:
        """Number of this process on its node: which GPU is its own."""
        ...

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on all of them (any object that pickle takes; never from outside)."""
        ...

    def gather(self, value: T) -> list[T] | None:
        """Everybody's values in order of rank, on rank 0; None elsewhere."""
        ...

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, taken in order of rank, so that they are the same everywhere."""
        ...

    def all_or_none(self, error: BaseException | None) -> None:
        """Wait for all; raise on every rank if any of them has an error: its own where it has one,
        else rank's with the lowest number."""
        ...


class OneRank:
    """A process by itself."""

    rank = 0
    world = 1
    local_rank = 0

    def broadcast(self, value: T | None) -> T:
        """The value itself."""
        return value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """The value alone."""
        return [value]

    def add(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def all_or_none(self, error: BaseException | None) -> None:
        """Raise the error, if there is one."""
        if error is not None:
            raise error


class RanksIO:
    """A stage's IO for all ranks: rank 0 has the real one, the others hear what it says.

    Metrics, rollouts and progress are rank 0's alone and cost the others nothing; where a decision
    hangs on the world (``latest_checkpoint``, ``should_stop``, ``new_checkpoint``,
    ``room_again``), all ranks call it together and get the same answer.
    """

    def __init__(self, io: StageIO | None, ranks: Ranks) -> None:
        if (io is None) != (ranks.rank > 0):
            raise ValueError("rank 0, and no other, has the stage's IO")
        self._io, self.ranks = io, ranks

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's numbers (rank 0's)."""
        if self._io is not None:
            self._io.log_metrics(step, metrics)

    def save_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store a step's rollouts (rank 0's)."""
        if self._io is not None:
            self._io.save_rollouts(step, rows)

    def progress(self, progress: Progress) -> None:
        """Tell how far the stage is (rank 0 does)."""
        if self._io is not None:
            self._io.progress(progress)

    def latest_checkpoint(self) -> SavedCheckpoint | None:
        """The newest complete checkpoint, the same one for all."""
        return self._decided(lambda io: io.latest_checkpoint())

    def should_stop(self) -> bool:
        """Whether to stop, the same answer for all."""
        return self._decided(lambda io: io.should_stop())

    def room_again(self, error: NoSpaceError) -> bool:
        """Wait for room; the same answer for all."""
        return self._decided(lambda io: io.room_again(error))

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """One folder that all ranks write into (it must lie where all see it); complete once all of
        them have left the block without an error."""
        context = None if self._io is None else self._io.new_checkpoint(step)
        folder = self._decided(lambda _: context.__enter__() if context is not None else Path())
        error: BaseException | None = None
        try:
            yield folder
        except BaseException as raised:
            error = raised
        try:
            self.ranks.all_or_none(error)
        except BaseException as raised:
            if context is not None:
                context.__exit__(type(raised), raised, raised.__traceback__)
            raise
        self._decided(lambda _: context.__exit__(None, None, None) if context is not None else None)

    def _decided(self, ask: Callable[[StageIO], T]) -> T:
        """What rank 0 is told, or the error that it met, on all ranks."""
        answer: tuple[T | None, BaseException | None] | None = None
        if self._io is not None:
            try:
                answer = (ask(self._io), None)
            except Exception as error:
                answer = (None, error)
        value, error_ = self.ranks.broadcast(answer)
        if error_ is not None:
            raise error_
        return value  # type: ignore[return-value]
