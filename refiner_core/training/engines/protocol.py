"""Engines: what a training loop may ask of whatever moves the weights, and its state on disk.

In: batches and losses of *this rank's* share. Out: gradients summed over all ranks, one update, and
state that can be written and read back.

How a loop uses it, on every rank alike:

    for batch in my_batches:                # equally many on every rank, neutral ones included
        scores = engine.score(batch, temperature=..., entropy="metric")
        engine.backward(loss_of(scores))    # this rank's part of one sum over all ranks
    norm = engine.step(factor)              # or engine.drop() to make no update

The loss is a *sum* over ranks (its weights are fixed before the first pack), not a mean of means:
results do not depend on how samples fell onto ranks, but for the order of sums.

A saved state is read back exactly, by any engine and number of ranks. Its files lie in a folder
that somebody else (``StageIO``) made and will make visible:

* ``model.safetensors``: parameters and persistent buffers, tied ones once (rank 0);
* ``state-rank00000-of-00002.safetensors``: of a share of the parameters, whole and under their
  names, what optimisers keep (``exp_avg.NAME`` and the like) and float32 masters (``master.NAME``)
  of weights that are kept in less. Every parameter is in one rank's file;
* ``rng-rank00000-of-00002.pt``: this rank's random states of Python, NumPy, torch and CUDA;
* ``progress.json``: step, position in the data, running numbers, and who wrote it. Floats survive
  JSON exactly. Rank 0 writes it, last.

Whole tensors under names instead of DeepSpeed's own shards: theirs can be read by the same stage on
the same number of ranks only, or after a conversion. Gathering costs one pass over the network per
save, one parameter at a time; nothing is held twice on a GPU but the largest parameter. Host memory
of a snapshot: 12 bytes a parameter over the number of ranks (AdamW; 8 where weights are float32),
and on rank 0 the weights.

On the same engine and number of ranks everything comes back bitwise. On another one the values do,
too; sums are taken in another order from there on. ``restored_from`` in the progress then names who
wrote it.

A full disk or quota ends in whatever the writing library makes of it (torch raises a RuntimeError
without errno, safetensors an error of its own): who gave the folder recognises it.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from refiner_core.contract.config import ModelConfig
from refiner_core.contract.errors import StageFailed, WorkspaceError
from refiner_core.training.batches import Batch
from refiner_core.training.model import loading
from refiner_core.training.model.loading import (
    WEIGHTS,
    check_shapes,
    model_tensors,
    read_pickled,
    reading,
    saved_tensors,
    whole_shape,
)
from refiner_core.training.model.logprobs import Entropy, TokenScores
from refiner_core.training.model.optim import ADAM_STATE, MUON_STATE
from refiner_core.training.ranks import Ranks, on_first

FORMAT_VERSION = 2
PROGRESS = "progress.json"
#: Key of the progress file that says who wrote it.
WRITTEN_BY = "written_by"
#: Kinds of tensors that are kept of a parameter beside its weight.
KINDS = ("master", *ADAM_STATE, *MUON_STATE)

#: What is kept of one parameter, by kind: masters and the optimiser's tensors.
ParameterState = Mapping[str, torch.Tensor]
#: Weights, states, random states and progress of a saved state.
_Opened = tuple[
    Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, Any], dict[str, Any]
]


@dataclass(frozen=True)
class StateSnapshot:
    """One rank's part of a training state in host memory, to be written at leisure."""

    rank: int
    world: int
    tensors: Mapping[str, torch.Tensor] | None
    states: Mapping[str, torch.Tensor]
    rng: Mapping[str, Any]
    progress_text: str | None

    def write(self, folder: Path) -> None:
        """Write this rank's files into ``folder``, and to the disk (fsync). No rank waits for
        another here; may be called from another thread, and again after a full disk."""
        if self.tensors is not None:
            _save_tensors(self.tensors, folder / WEIGHTS)
        _save_tensors(self.states, folder / state_file(self.rank, self.world))
        rng = io.BytesIO()
        torch.save(dict(self.rng), rng)
        write_synced(folder / rng_file(self.rank, self.world), rng.getvalue())
        if self.progress_text is not None:
            write_synced(folder / PROGRESS, self.progress_text.encode())


def state_file(rank: int, world: int) -> str:
    """Name of the file with a rank's share of the optimisers' states."""
    return f"state-rank{rank:05d}-of-{world:05d}.safetensors"


def rng_file(rank: int, world: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng-rank{rank:05d}-of-{world:05d}.pt"


class Engine(ABC):
    """A model in training. Every method is called by all ranks together, but where it says not.

    ``model`` is the transformers model, whose weights are there inside :meth:`whole` only;
    ``device`` is where batches must lie; ``share_prompts`` and ``balance`` are what
    :mod:`refiner_core.training.batches` calls so; padding is made of ``pad_id``.
    """

    #: Which engine it is: `plain`, `zero3`.
    name = "plain"

    def __init__(
        self, loaded: loading.Loaded, device: Any, config: ModelConfig, ranks: Ranks
    ) -> None:
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, device
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance
        self.pad_id, self.ranks = loaded.pad_id, ranks
        self._config = config
        self._copies: dict[str, torch.Tensor] = {}

    @abstractmethod
    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of this rank's batch, with gradients where torch records them."""

    @abstractmethod
    def backward(self, loss: Any) -> None:
        """Add the gradients of this rank's part of the loss."""

    @abstractmethod
    def step(self, factor: float) -> float:
        """Update with the gradients of all ranks at ``factor`` times the peak rates; clear them.

        Returns the global gradient norm before clipping; one that is not finite changes nothing.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """The global norm that the next :meth:`step` would report; gradients stay, and none can be
        added any more."""

    @abstractmethod
    def drop(self) -> None:
        """Clear the gradients without an update."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[Any]:
        """The model with all its weights and in evaluation mode, to read (generate, export, send to
        servers)."""

    def reference(self, model_ref: str) -> Any:
        """A frozen model beside it, for the KL term, whole on every rank's device."""
        return loading.load_model(model_ref, self._config, self.device).requires_grad_(False)

    # ------------------------------------------------------------ state

    def gathered(
        self, tensors: Sequence[Any], *, changed: bool = False
    ) -> AbstractContextManager[Any]:
        """Context in which parameters are whole; with ``changed`` rank 0's values go to all at its
        end."""
        return nullcontext()

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole parameters and persistent buffers, one at a time; None where this rank does not
        want them."""
        for name, tensor in model_tensors(self.model).items():
            with self.gathered([tensor]):
                yield name, tensor.detach() if wanted(name) else None

    @abstractmethod
    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Masters and optimisers' tensors; nothing where this rank does not want them."""

    @abstractmethod
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take weights back."""

    @abstractmethod
    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Take states back; called after :meth:`set_weights`."""

    def snapshot(self, progress: Mapping[str, Any]) -> StateSnapshot:
        """This rank's part of the training state as of now, in host memory: weights, optimiser,
        every random state, and ``progress`` (JSON-ready). Its memory serves the next one again."""
        self._require_equal_weights()
        ranks = self.ranks
        first = ranks.rank == 0
        head = {"format": FORMAT_VERSION, WRITTEN_BY: self._writer()}
        text = json.dumps({**head, **progress}, allow_nan=False)
        tensors = model_tensors(self.model)
        sizes = {name: math.prod(whole_shape(tensor)) for name, tensor in tensors.items()}
        mine = set(shares(sizes, ranks.world)[ranks.rank])
        weights = {
            name: self._copied(f"weight.{name}", tensor)
            for name, tensor in self.weights(lambda _: first)
            if tensor is not None
        }
        states = {
            f"{kind}.{name}": self._copied(f"{kind}.{name}", tensor)
            for name, state in self.states(mine.__contains__)
            for kind, tensor in state.items()
        }
        return StateSnapshot(
            *(ranks.rank, ranks.world, weights if first else None, states, rng_state()),
            text if first else None,
        )

    def restore(self, folder: Path) -> dict[str, Any]:
        """Put a saved state back; returns its progress. Saved by another number of ranks, or by
        another engine, it is read all the same, and progress says so (``restored_from``).

        Everything is opened and compared with the model by every rank before anything is changed.

        Raises
        ------
        DamagedCheckpoint
            A file of it is missing, cut short or not what it should be; nothing was changed.
        WorkspaceError
            It is of another model or format.
        """
        self.drop()
        opened: _Opened | None = None
        error: Exception | None = None
        try:
            opened = self._open(folder)
        except Exception as raised:
            error = raised
        self.ranks.all_or_none(error)
        assert opened is not None
        weights, saved, rng, progress = opened
        self.set_weights(weights)
        self.set_states(
            lambda name: {k: saved[f"{k}.{name}"] for k in KINDS if f"{k}.{name}" in saved}
        )
        set_rng_state(rng)
        written_by = progress.pop(WRITTEN_BY)
        if written_by != self._writer():
            progress["restored_from"] = written_by
        return progress

    def _open(self, folder: Path) -> _Opened:
        """Weights, states, random states and progress of a saved state."""
        with reading(folder / PROGRESS):
            progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if progress.pop("format", None) != FORMAT_VERSION:
            raise WorkspaceError(
                f"{folder} is a checkpoint of another format",
                expected=f"format {FORMAT_VERSION}",
                fix="remove the checkpoint, or use the version of refiner that wrote it",
            )
        weights = saved_tensors(folder / WEIGHTS)
        check_shapes(self.model, weights, folder)
        with reading(folder / PROGRESS):
            world = int(progress[WRITTEN_BY]["world"])
        saved = saved_tensors(*(folder / state_file(rank, world) for rank in range(world)))
        rng = read_pickled(folder / rng_file(self.ranks.rank % world, world))
        return weights, saved, rng, progress

    def _writer(self) -> dict[str, Any]:
        return {"world": self.ranks.world, "engine": self.name}

    def _copied(self, name: str, tensor: Any) -> torch.Tensor:
        """A copy in host memory, contiguous; finished when this returns."""
        kept = self._copies.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            shape = tuple(tensor.shape)
            kept = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = kept
        return kept.copy_(tensor.detach())

    # ------------------------------------------------------------ what comes out

    def export(self, folder: Path) -> None:
        """Write the model and tokenizer as ``from_pretrained`` takes them (rank 0 writes)."""
        self._require_equal_weights()
        weights = self._exported()
        export = partial(loading.export, self.model, self.tokenizer, folder, weights)
        on_first(self.ranks, export)

    def memory(self) -> dict[str, float]:
        """``memory/…`` metrics: the most of any rank so far, GiB."""
        mine = loading.memory_metrics(self.device)
        gathered = self.ranks.gather(mine) or []
        return self.ranks.broadcast({n: max((v[n] for v in gathered), default=0.0) for n in mine})

    def _exported(self) -> dict[str, Any] | None:
        """Whole weights on rank 0; None: those of the model itself."""
        return None

    def _require_equal_weights(self) -> None:
        require_equal_weights(self.model, self.ranks)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_equal_weights(model: Any, ranks: Ranks) -> None:
    """Fail where two ranks do not hold bitwise the same weights.

    Raises
    ------
    StageFailed
        On every rank: something is wrong with a machine or a library, and a checkpoint of it would
        hold the weights of one rank only.
    """
    if ranks.world == 1:
        return
    gathered = ranks.gather(_fingerprint(model)) or []
    odd = [rank for rank, value in enumerate(gathered) if value != gathered[0]]
    if odd := ranks.broadcast(odd):
        raise StageFailed(
            f"The weights of rank {odd[0]} are not those of rank 0, though both made the "
            "same updates",
            expected="bitwise equal weights on all ranks",
            fix="run it again from the last checkpoint, without the node of that rank; if it "
            "happens again, please report it",
        )


@torch.no_grad()  # type: ignore[untyped-decorator]
def _fingerprint(model: Any) -> int:
    """The same for the same bits (and hardly ever for others): sums of the bits as integers."""
    sums = [
        tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
        for tensor in model_tensors(model).values()
    ]
    return hash(tuple(torch.stack(sums).tolist()))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model in evaluation mode: while it trains with activation checkpointing, transformers keeps
    no cache, and what it generates is wrong."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Which rank writes which parameter: the largest first, to the rank with the least so far."""
    loads = [0] * world
    chosen: list[list[str]] = [[] for _ in range(world)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        chosen[rank].append(name)
    return chosen


def rng_state() -> dict[str, Any]:
    """Every random state of the process, in types that torch loads without pickle's dangers."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the random states back. CUDA's are left alone where the devices are others."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())
