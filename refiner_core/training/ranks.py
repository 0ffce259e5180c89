"""The processes that train one model together, and what they tell each other.

In: how many there are and which one this is. Out: values that all agree on. What is decided once
(where to resume, whether to stop, what was sampled) is decided by rank 0 and broadcast, so that no
two ranks can take different turns: under ZeRO-3 they would wait for each other for ever.

Gradients do not travel here; that is the engine's business. What does travel goes over gloo, in a
group of its own that waits for days: rank 0 may be waiting for a judge. torch is imported where
there is more than one process. Objects are sealed: gloo takes a connection of anybody who is fast
enough, and torch's own object collectives unpickle whatever comes over it; here a message without
the seal of the key that all ranks have in their environment is an error.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from refiner_core.contract.errors import (
    ConfigurationError,
    StageFailed,
)
from refiner_core.contract.types import StageIO

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: How long a rank waits for another one to say something: as long as a job may wait for a judge.
#: A rank that died closes its connections, and is noticed at once.
PATIENCE = timedelta(days=7)
#: What their agent sets for each of them, as torchrun does.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: What refiner sets: the key of what ranks say to each other, and where those of one node find each
#: other (``file://…``); without that they ask rank 0's store.
TALK, STORE = "REFINER_RANKS_TALK_TOKEN", "REFINER_RANKS_STORE"
_SEAL_BYTES = hashlib.sha256().digest_size


class Ranks:
    """The processes that train together, of which this is one; every method is called by all of
    them, in the same order. By itself, a process is alone."""

    #: Number of this process, from 0, and how many there are.
    rank, world = 0, 1
    #: Number of this process on its node: which GPU is its own.
    local_rank = 0

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on all of them (any object that pickle takes; never from outside)."""
        return value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """Everybody's values in order of rank, on rank 0; None elsewhere."""
        return [value]

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, taken in order of rank, so that they are the same everywhere."""
        return list(values)

    def all_or_none(self, error: BaseException | None) -> None:
        """Wait for all; raise on every rank if any of them has an error: its own where it has one,
        else rank's with the lowest number."""
        if error is not None:
            raise error

    def line(self) -> Ranks:
        """The same processes on a line of their own, for one other thread to talk on: what it says
        there and what is said here meanwhile do not get mixed up."""
        return self


def on_first(ranks: Ranks, do: Callable[[], T]) -> T:
    """Result of rank 0, or the error that it met, on all ranks."""
    outcome: tuple[T | None, BaseException | None] | None = None
    if ranks.rank == 0:
        try:
            outcome = (do(), None)
        except Exception as error:
            outcome = (None, error if ranks.world == 1 else portable(error))
    value, met = ranks.broadcast(outcome)
    if met is not None:
        raise met
    return value  # type: ignore[return-value]


class TorchRanks(Ranks):
    """One of several processes, over torch.distributed.

    The default group carries gradients (NCCL between GPUs, else gloo), a second one what is said
    here. Call it from the main thread only: collectives pair up by their order; another thread
    takes a :meth:`line` of its own. Use it as a context manager.

    Parameters
    ----------
    cuda
        Whether this rank trains on a GPU; which one, see :meth:`device`.

    Raises
    ------
    ConfigurationError
        The process was not started as a rank, or this rank's GPU is not there.
    """

    def __init__(self, *, cuda: bool) -> None:
        missing = [name for name in (*ENVIRONMENT, TALK) if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"This process is to train with others, and {missing[0]} is not set",
                expected=f"what refiner sets for ranks: {', '.join((*ENVIRONMENT, TALK))}",
                fix="start it with `refiner run`, or train in one process",
            )
        import torch
        import torch.distributed as dist

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self._cuda, self._torch, self._dist = cuda, torch, dist
        self._key = bytes.fromhex(os.environ.pop(TALK))  # what a rank starts has no part in it
        if cuda:
            torch.cuda.set_device(gpu_of(self.local_rank))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=os.environ.get(STORE),
            rank=self.rank,
            world_size=self.world,
        )
        self._take_a_line()

    def __enter__(self) -> TorchRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Leave the groups: together where all is well, else at once."""
        if kind is None:
            self._dist.barrier(group=self._said)
        if kind is None or not self._cuda:  # NCCL would wait for kernels that never end
            self._dist.destroy_process_group()

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on all of them."""
        first = self.rank == 0
        sent = self._sealed(value if first else None)
        size = self._torch.tensor([len(sent)])
        self._dist.broadcast(size, src=0, group=self._said)
        if not first:
            sent = self._torch.empty(int(size), dtype=self._torch.uint8)
        self._dist.broadcast(sent, src=0, group=self._said)
        said: T = value if first else self._opened(sent)  # type: ignore[assignment]
        return said

    def gather(self, value: T) -> list[T] | None:
        """Everybody's values in order of rank, on rank 0; None elsewhere."""
        mine, sizes, parts = self._padded(value)
        first = self.rank == 0
        self._dist.gather(mine, parts if first else None, dst=0, group=self._said)
        return self._all_opened(parts, sizes) if first else None

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in double precision, taken in order of rank."""
        mine = self._torch.tensor([float(v) for v in values], dtype=self._torch.float64)
        if not len(mine):
            return []
        parts = [self._torch.empty_like(mine) for _ in range(self.world)]
        self._dist.all_gather(parts, mine, group=self._said)
        sums = parts[0]
        for part in parts[1:]:
            sums = sums + part
        return [float(value) for value in sums]

    def all_or_none(self, error: BaseException | None) -> None:
        """Wait for all; raise on every rank if any of them has an error."""
        mine, sizes, parts = self._padded(None if error is None else portable(error))
        self._dist.all_gather(parts, mine, group=self._said)
        errors = self._all_opened(parts, sizes)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                other.add_note(f"(rank {rank} of {self.world} ran into this)")
                raise other

    def line(self) -> TorchRanks:
        """A third group, which ends with the others."""
        other = copy.copy(self)
        other._take_a_line()
        return other

    def _take_a_line(self) -> None:
        self._said = self._dist.new_group(backend="gloo", timeout=PATIENCE)

    # ------------------------------------------------------------ objects, sealed

    def _padded(self, value: Any) -> tuple[Tensor, list[int], list[Tensor]]:
        """This rank's message, as long as the longest; all lengths; room for all messages."""
        torch, mine = self._torch, self._sealed(value)
        told = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        self._dist.all_gather(told, torch.tensor([len(mine)]), group=self._said)
        sizes = [int(size) for size in told]
        mine = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
        return mine, sizes, [torch.empty_like(mine) for _ in range(self.world)]

    def _all_opened(self, parts: list[Tensor], sizes: list[int]) -> list[Any]:
        return [self._opened(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _sealed(self, value: Any) -> Tensor:
        data = pickle.dumps(value)
        seal = hmac.digest(self._key, data, "sha256")
        return self._torch.frombuffer(bytearray(seal + data), dtype=self._torch.uint8)

    def _opened(self, message: Tensor) -> Any:
        raw = message.numpy().tobytes()
        seal, data = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, hmac.digest(self._key, data, "sha256")):
            raise StageFailed(
                "A message between training processes was not from a rank of this stage",
                expected="the seal of the key that all ranks of a stage have",
                fix="see who else is on this machine or network; then run the same command again",
            )
        return pickle.loads(data)


@contextmanager
def open_ranks(*, cuda: bool) -> Iterator[Ranks]:
    """All ranks where there is more than one, else this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    with TorchRanks(cuda=cuda) as ranks:
        yield ranks


def gpu_of(local_rank: int) -> int:
    """The number of this rank's GPU among those that it sees: its own number, or the only one.

    Raises
    ------
    ConfigurationError
        There are more ranks on this node than GPUs.
    """
    import torch

    count = int(torch.cuda.device_count())
    if count == 1 or local_rank < count:
        return local_rank if local_rank < count else 0
    raise ConfigurationError(
        f"Training process {local_rank} of this node has no GPU: torch sees {count}",
        expected="a GPU for every training process of a node",
        fix="lower nproc_per_node, or raise resources.gpus",
    )


def portable(error: BaseException) -> BaseException:
    """The error itself where another process can rebuild it, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StageFailed(
            f"{type(error).__name__}: {error}",
            expected="all ranks to get through the step",
            fix="see `refiner logs STAGE` for its traceback, and mend what it names",
        )
    return error


#: Calls of a StageIO that rank 0 makes alone, and those that all make together.
_TOLD = ("log_metrics", "save_rollouts", "progress")
_DECIDED = ("latest_checkpoint", "pass_over", "should_stop", "room_again")


class RanksIO:
    """A stage's IO for all ranks: rank 0 has the real one, the others hear what it says.

    Metrics, rollouts and progress are rank 0's alone and cost the others nothing; where a decision
    hangs on the world (``latest_checkpoint``, ``pass_over``, ``should_stop``, ``new_checkpoint``,
    ``room_again``), all ranks call it together and get the same answer.
    """

    def __init__(self, io: StageIO | None, ranks: Ranks) -> None:
        if (io is None) != (ranks.rank > 0):
            raise ValueError("rank 0, and no other, has the stage's IO")
        self._io, self.ranks = io, ranks

    def __getattr__(self, name: str) -> Any:
        """Calls of a StageIO: rank 0's alone, or the same answer for all."""
        if name in _TOLD:
            return (lambda *_: None) if self._io is None else getattr(self._io, name)
        if name in _DECIDED:
            return lambda *args: self._decided(lambda io: getattr(io, name)(*args))
        raise AttributeError(name)

    def line(self) -> RanksIO:
        """The same IO for one other thread, which all ranks have; made by all of them together."""
        return RanksIO(self._io, self.ranks.line())

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
            # What the store makes of it (a full disk) is what all ranks hear.
            met = raised
            self._decided(lambda _: context and context.__exit__(type(met), met, met.__traceback__))
            raise
        self._decided(lambda _: context.__exit__(None, None, None) if context is not None else None)

    def _decided(self, ask: Callable[[StageIO], T]) -> T:
        """Answer to rank 0, or the error that it met, on all ranks."""
        return on_first(self.ranks, lambda: ask(self._io))  # type: ignore[arg-type]
