"""The processes that train one model together, and their communication.

In: their number and the number of this one. Out: values that all agree on. Single decisions (where
to resume, whether to stop, the samples) are made by rank 0 and broadcast, so that ranks never
diverge: under ZeRO-3 they would wait for each other forever.

Gradients are the engine's business. Everything else goes over gloo, in a separate group with a
timeout of days: rank 0 may be waiting for a judge. torch is imported only if there are several
processes. Messages are signed: gloo accepts any connection that is fast enough, and torch's object
collectives unpickle whatever they receive; here a message without a signature by the key in the
ranks' environment is an error.
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from refiner_core.contract.errors import ConfigurationError, RanksDisagree, StageFailed, in_rank
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.pulse import PULSE, is_usual

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

#: How long a rank waits for a message of another one: as long as a job may wait for a judge. A dead
#: rank closes its connections, and is noticed at once.
PATIENCE = timedelta(days=7)
#: Set by the launcher of the ranks, as by torchrun.
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Set by refiner: the key that signs the ranks' messages, and the rendezvous of one node's ranks
#: (``file://…``); without it they use rank 0's store.
TALK, STORE = "REFINER_RANKS_TALK_TOKEN", "REFINER_RANKS_STORE"
_SEAL_BYTES = hashlib.sha256().digest_size


class Ranks:
    """The processes that train together, of which this is one; all of them call every method, in
    the same order. The base class is a single process."""

    #: Number of this process, from 0, and number of processes.
    rank, world = 0, 1
    #: Number of this process on its node, which selects its GPU.
    local_rank = 0

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on all ranks (any object that can be pickled; never from outside)."""
        return value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """All values in order of rank, on rank 0; None elsewhere."""
        return [value]

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, added in order of rank, so that they are equal everywhere."""
        return list(values)

    def all_or_none(self, error: BaseException | None) -> None:
        """Wait for all; raise on every rank if any has an error: its own if it has one, else that
        of the lowest rank."""
        if error is not None:
            raise error

    def line(self) -> Ranks:
        """A separate channel between the same processes, for one other thread: its messages and
        those of the main thread do not mix."""
        return self


def on_first(ranks: Ranks, do: Callable[[], T]) -> T:
    """Rank 0's result, or its error, on all ranks."""
    outcome: tuple[T | None, BaseException | None] | None = None
    if ranks.rank == 0:
        try:
            outcome = (do(), None)
        except Exception as error:
            outcome = (None, error if ranks.world == 1 else portable(error))
    value, met = ranks.broadcast(outcome)
    if met is not None:
        raise in_rank(met, 0)
    return value  # type: ignore[return-value]


def on_all(ranks: Ranks, do: Callable[[], T]) -> T:
    """This rank's result, once all have theirs; an error of one rank is raised on all."""
    made: T | None = None
    error: Exception | None = None
    try:
        made = do()
    except Exception as raised:
        error = raised
    ranks.all_or_none(error)
    return made  # type: ignore[return-value]


class TorchRanks(Ranks):
    """One of several processes, over torch.distributed.

    The default group carries gradients (NCCL between GPUs, else gloo), a second one these
    messages. Call it from the main thread only: collectives pair up by their order; another thread
    needs a :meth:`line` of its own. Use it as a context manager.

    Parameters
    ----------
    cuda
        Whether this rank trains on a GPU; for its number, see :meth:`device`.

    Raises
    ------
    ConfigurationError
        The process was not started as a rank, or this rank's GPU does not exist.
    """

    def __init__(self, *, cuda: bool) -> None:
        missing = [name for name in (*ENVIRONMENT, TALK) if name not in os.environ]
        if missing:
            raise ConfigurationError(
                f"This process should train with others, but {missing[0]} is not set",
                expected=f"what refiner sets for ranks: {', '.join((*ENVIRONMENT, TALK))}",
                fix="start it with `refiner run`, or train in one process",
            )
        import torch
        import torch.distributed as dist

        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self._cuda, self._torch, self._dist = cuda, torch, dist
        self._key = bytes.fromhex(os.environ.pop(TALK))  # not for child processes of a rank
        self._is_line = False
        #: Set once the ranks' calls no longer fit: no further one can.
        self._torn: RanksDisagree | None = None
        if cuda:
            torch.cuda.set_device(gpu_of(self.local_rank))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=os.environ.get(STORE),
            rank=self.rank,
            world_size=self.world,
        )
        PULSE.nccl = cuda
        self._take_a_line()

    def __enter__(self) -> TorchRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Leave the groups: together after success, immediately after an error."""
        if kind is None:
            self._dist.barrier(group=self._said)
        if kind is None or not self._cuda:  # NCCL would wait for kernels that never end
            self._dist.destroy_process_group()

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on all ranks."""
        with self._noted("broadcast"):
            return self._broadcast(value)

    def _broadcast(self, value: T | None) -> T:
        first = self.rank == 0
        sent = self._sealed(value if first else None)
        head = self._torch.tensor([len(sent), _code("broadcast")])
        self._dist.broadcast(head, src=0, group=self._said)
        if int(head[1]) != _code("broadcast"):
            odd = 0 if is_usual(self._recent) else self.rank
            self._torn = _disagreement(odd, f"rank {self.rank}: broadcast")
            raise self._torn
        if not first:
            sent = self._torch.empty(int(head[0]), dtype=self._torch.uint8)
        self._dist.broadcast(sent, src=0, group=self._said)
        said: T = value if first else self._opened(sent)  # type: ignore[assignment]
        return said

    def gather(self, value: T) -> list[T] | None:
        """All values in order of rank, on rank 0; None elsewhere."""
        with self._noted("gather"):
            mine, sizes, parts = self._padded(value, "gather")
            first = self.rank == 0
            self._dist.gather(mine, parts if first else None, dst=0, group=self._said)
            return self._all_opened(parts, sizes) if first else None

    def add(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in double precision, added in order of rank."""
        mine = self._torch.tensor([float(v) for v in values], dtype=self._torch.float64)
        if not len(mine):
            return []
        parts = [self._torch.empty_like(mine) for _ in range(self.world)]
        name = f"add of {len(mine)}"
        with self._noted(name):
            self._agreed(len(mine), name)
            self._dist.all_gather(parts, mine, group=self._said)
        sums = parts[0]
        for part in parts[1:]:
            sums = sums + part
        return [float(value) for value in sums]

    def all_or_none(self, error: BaseException | None) -> None:
        """Wait for all; raise on every rank if any of them has an error."""
        if error is not None and self._torn:
            raise error
        with self._noted("all_or_none"):
            try:
                mine, sizes, parts = self._padded(error and portable(error), "all_or_none")
            except RanksDisagree as odd:  # others are elsewhere because of this rank's error
                raise (error or odd) from None
            self._dist.all_gather(parts, mine, group=self._said)
            errors = self._all_opened(parts, sizes)
        if error is not None:
            raise error
        for rank, other in enumerate(errors):
            if other is not None:
                other.add_note(f"(rank {rank} of {self.world} ran into this)")
                raise in_rank(other, rank)

    def line(self) -> TorchRanks:
        """A third group, which closes together with the others."""
        other = copy.copy(self)
        other._take_a_line()
        other._is_line = True
        return other

    def _noted(self, name: str) -> AbstractContextManager[None]:
        """Around a collective, for whoever observes this rank; lines pair up by themselves."""
        if self._torn:
            raise self._torn
        return nullcontext() if self._is_line else PULSE.collective(name)

    def _take_a_line(self) -> None:
        self._said = self._dist.new_group(backend="gloo", timeout=PATIENCE)

    # ------------------------------------------------------------ signed objects

    def _agreed(self, size: int, name: str) -> list[int]:
        """All sizes, once all ranks are known to make the same call.

        Raises
        ------
        RanksDisagree
            They make different ones; on every rank.
        """
        calls = self._exchanged([size, _code(name)])
        if len({code for _, code in calls}) > 1:
            usual = self._exchanged([int(is_usual(self._recent)), _code(name)])
            known = Counter(code for _, code in usual)
            odd = min(range(self.world), key=lambda r: (known[usual[r][1]], usual[r][0], -r))
            self._torn = _disagreement(odd, f"rank {self.rank}: {name}")
            raise self._torn
        return [size for size, _ in calls]

    def _exchanged(self, values: Sequence[int]) -> list[list[int]]:
        """A few numbers of every rank."""
        torch = self._torch
        parts = [torch.empty(len(values), dtype=torch.int64) for _ in range(self.world)]
        self._dist.all_gather(parts, torch.tensor(values), group=self._said)
        return [part.tolist() for part in parts]

    @property
    def _recent(self) -> Sequence[str]:
        """This channel's last collectives, as far as they are known."""
        return () if self._is_line else list(PULSE.recent)

    def _padded(self, value: Any, name: str) -> tuple[Tensor, list[int], list[Tensor]]:
        """This rank's message, padded to the longest; all lengths; buffers for all messages."""
        torch, mine = self._torch, self._sealed(value)
        sizes = self._agreed(len(mine), name)
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
                expected="a signature by the key that all ranks of a stage share",
                fix="check what else runs on this machine or network; then run the command again",
            )
        return pickle.loads(data)


@contextmanager
def open_ranks(*, cuda: bool) -> Iterator[Ranks]:
    """All ranks if there are several, else this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    with TorchRanks(cuda=cuda) as ranks:
        yield ranks


def gpu_of(local_rank: int) -> int:
    """The number of this rank's GPU among its visible ones: its own number, or the only one.

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


def _code(name: str) -> int:
    """A number of a call's name, equal in all processes."""
    return zlib.crc32(name.encode())


def _disagreement(odd: int, here: str) -> RanksDisagree:
    error = RanksDisagree(
        f"The ranks make different calls: rank {odd} has left one out, or made another ({here})",
        expected="all ranks to take the same branches",
        fix="see the tracebacks of all ranks in `refiner logs STAGE`; a branch on something that "
        "differs between ranks (its data, a random number, a file) is the usual cause",
    )
    return in_rank(error, odd)


def portable(error: BaseException) -> BaseException:
    """The error itself if another process can unpickle it, else a copy of its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return StageFailed(
            f"{type(error).__name__}: {error}",
            expected="all ranks to get through the step",
            fix="see `refiner logs STAGE` for its traceback, and fix the cause",
        )
    return error


#: Calls of a StageIO that rank 0 makes alone, and those that all make together.
_TOLD = ("log_metrics", "save_rollouts")
_DECIDED = ("latest_checkpoint", "pass_over", "keep_checkpoints", "should_stop", "room_again")


class RanksIO:
    """A stage's IO for all ranks: rank 0 has the real one; the others receive its answers.

    Metrics, rollouts and progress are written by rank 0 alone and cost the others nothing. Calls
    whose answer decides something (``latest_checkpoint``, ``pass_over``, ``should_stop``,
    ``keep_checkpoints``, ``new_checkpoint``, ``room_again``) are made by all ranks together and
    return the same answer.
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

    def progress(self, progress: Progress) -> None:
        """Note the position on every rank; rank 0 reports it."""
        PULSE.at(progress.done, progress.phase)
        if self._io is not None:
            self._io.progress(progress)

    def line(self) -> RanksIO:
        """The same IO for one other thread on each rank; all ranks create it together."""
        return RanksIO(self._io, self.ranks.line())

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """One folder for the files of all ranks (on storage that all see); complete once all
        have left the block without an error."""
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
            # All ranks receive the store's error (e.g. a full disk).
            met = raised
            with suppress(RanksDisagree):  # their calls no longer fit
                self._decided(
                    lambda _: context and context.__exit__(type(met), met, met.__traceback__)
                )
            raise
        self._decided(lambda _: context.__exit__(None, None, None) if context is not None else None)

    def _decided(self, ask: Callable[[StageIO], T]) -> T:
        """Rank 0's answer, or its error, on all ranks."""
        return on_first(self.ranks, lambda: ask(self._io))  # type: ignore[arg-type]
