"""Engines: the interface of a training loop to the weights, and the saved state.

In: batches and losses of *this rank's* share. Out: gradients summed over all ranks, one update, and
a state that can be saved and restored.

Use in a loop, the same on every rank::

    for batch in my_batches:                # equally many on every rank, neutral ones included
        scores = engine.score(batch, temperature=..., entropy="metric")
        engine.backward(loss_of(scores))    # this rank's part of one sum over all ranks
    norm = engine.step(factor)              # or engine.drop() to skip the update

The loss is a *sum* over ranks (its weights are fixed before the first pack), not a mean of means:
results do not depend on the assignment of samples to ranks, except for the order of sums.

A saved state is restored exactly, by any engine and number of ranks. Its files lie in a folder
made and published by ``StageIO``:

* ``model.safetensors``: parameters and persistent buffers, tied ones once (rank 0);
* ``state-rank00000-of-00002.safetensors``: for a share of the parameters, whole and by name, the
  optimiser's tensors (``exp_avg.NAME`` etc.) and float32 masters (``master.NAME``) of weights in
  smaller types. Every parameter is in one rank's file;
* ``rng-rank00000-of-00002.pt``: this rank's random states of Python, NumPy, torch and CUDA;
* ``progress.json``: step, position in the data, running numbers, and its writer. Floats survive
  JSON exactly. Rank 0 writes it, last.

Tensors are stored whole, by name, instead of as DeepSpeed's shards, which only the same stage on
the same number of ranks can read without a conversion. Gathering costs one pass over the network
per save, one parameter at a time; a GPU holds at most one extra parameter. Host memory of a
snapshot: 12 bytes per parameter divided by the number of ranks (AdamW; 8 if weights are float32),
plus the weights on rank 0.

On the same engine and number of ranks the restored state is bitwise equal. On another one its
values are equal, but later sums are taken in another order. ``restored_from`` in the progress then
names the writer.

A full disk or quota appears as an error of the writing library (torch raises a RuntimeError
without errno, safetensors its own error): the owner of the folder recognises it.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
from abc import ABC, abstractmethod
from collections import deque
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
from refiner_core.generation.saving import (
    SHARD_BYTES,
    WEIGHTS,
    SaveWeights,
    Weights,
    model_tensors,
    save_model,
    whole_shape,
)
from refiner_core.training.batches import Batch, Pack, collate, deal, to_device
from refiner_core.training.model import loading
from refiner_core.training.model.loading import (
    check_shapes,
    read_pickled,
    reading,
    saved_tensors,
)
from refiner_core.training.model.logprobs import Entropy, TokenScores, token_scores
from refiner_core.training.model.optim import ADAM_STATE, MUON_STATE
from refiner_core.training.ranks import Ranks, on_all, on_first

FORMAT_VERSION = 2
PROGRESS = "progress.json"
#: Key of the progress file that names its writer.
WRITTEN_BY = "written_by"
#: Kinds of tensors that are saved for a parameter beside its weight.
KINDS = ("master", *ADAM_STATE, *MUON_STATE)

#: Scores of a batch: ``(batch, temperature=…)``.
Score = Callable[..., TokenScores]
#: The saved tensors of one parameter, by kind: masters and the optimiser's tensors.
ParameterState = Mapping[str, torch.Tensor]
#: Weights, states, random states and progress of a saved state.
_Opened = tuple[
    Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, Any], dict[str, Any]
]


@dataclass(frozen=True)
class StateSnapshot:
    """One rank's part of a training state in host memory, to be written later."""

    rank: int
    world: int
    tensors: Mapping[str, torch.Tensor] | None
    states: Mapping[str, torch.Tensor]
    rng: Mapping[str, Any]
    progress_text: str | None

    def write(self, folder: Path) -> None:
        """Write this rank's files into ``folder``, with fsync. Ranks do not wait for each other
        here. May be called from another thread, and again after a full disk."""
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
    """A model in training. All ranks call every method together, unless stated otherwise.

    ``model`` is the transformers model, whose weights are available only inside :meth:`whole`;
    batches must be on ``device``; ``share_prompts``, ``balance`` and ``flex_balance`` are those of
    the loaded model; ``pad_id`` is the padding token.
    """

    #: Name of the engine (`plain`, `zero3`), and whether weights are sharded.
    name, partitioned = "plain", False

    def __init__(
        self, loaded: loading.LoadedModel, device: Any, config: ModelConfig, ranks: Ranks
    ) -> None:
        self.model, self.tokenizer, self.device = loaded.model, loaded.tokenizer, device
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance
        self.flex_balance = loaded.flex_balance
        self.pad_id, self.ranks = loaded.pad_id, ranks
        if ranks.world > 1 and ranks.add([self.share_prompts]) != [ranks.world]:
            self.share_prompts = False  # FlexAttention cannot be used on another rank
        self._config = config
        self._copies: dict[str, torch.Tensor] = {}

    @abstractmethod
    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of this rank's batch, with gradients if torch records them."""

    @abstractmethod
    def backward(self, loss: Any) -> None:
        """Add the gradients of this rank's part of the loss."""

    @abstractmethod
    def step(self, factor: float) -> float:
        """Update with the gradients of all ranks at ``factor`` times the peak rates; clear them.

        Returns the global gradient norm before clipping; if it is not finite, nothing changes.
        """

    @abstractmethod
    def gradient_norm(self) -> float:
        """The global norm that the next :meth:`step` would return; gradients stay, but no more can
        be added."""

    @abstractmethod
    def drop(self) -> None:
        """Clear the gradients without an update."""

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with all its weights and in evaluation mode, to generate with it."""
        with self.gathered(list(self.model.parameters())), evaluating(self.model):
            yield self.model

    def reference(self, model_ref: str) -> Score:
        """Scores of a frozen model for the KL term; it is whole on every rank's device."""
        model = loading.load_model(model_ref, self._config, self.device).requires_grad_(False)
        return partial(token_scores, model)

    def batches(self, packs: Sequence[Pack], size: int, *, flex: bool = False) -> Iterator[Batch]:
        """Packs as batches of ``size`` on the device."""
        for first in range(0, len(packs), size):
            part = packs[first : first + size]
            batch = collate(part, pad_id=self.pad_id, balance=self.balance, flex=flex)
            yield to_device(batch, self.device)

    # ------------------------------------------------------------ state

    def gathered(
        self, tensors: Sequence[Any], *, changed: bool = False
    ) -> AbstractContextManager[Any]:
        """Context with whole parameters; with ``changed`` rank 0's values are copied to all at its
        end."""
        return nullcontext()

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole parameters and persistent buffers, one at a time; None for those that this rank
        does not want."""
        for name, tensor in model_tensors(self.model).items():
            with self.gathered([tensor]):
                yield name, tensor.detach() if wanted(name) else None

    @abstractmethod
    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Masters and optimisers' tensors that this rank wants."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy weights in; of sharded ones rank 0 reads, and the others get their share."""
        for name, tensor in model_tensors(self.model).items():
            with self.gathered([tensor], changed=True):
                if self.ranks.rank == 0 or not self.partitioned:
                    tensor.copy_(weights[name])

    @abstractmethod
    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Restore states; call it after :meth:`set_weights`."""

    def snapshot(self, progress: Mapping[str, Any]) -> StateSnapshot:
        """This rank's part of the current training state, in host memory: weights, optimiser,
        all random states, and ``progress`` (JSON-ready). The next snapshot reuses the memory."""
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
        """Restore a saved state; returns its progress. A state saved by another number of ranks or
        engine works too, and the progress then names it (``restored_from``).

        Every rank opens all files and compares them with the model before anything changes.

        Raises
        ------
        DamagedCheckpoint
            A file is missing, cut short or malformed; nothing was changed.
        WorkspaceError
            It belongs to another model or has another format.
        """
        self.drop()
        weights, saved, rng, progress = on_all(self.ranks, lambda: self._open(folder))
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
                f"{folder} is a checkpoint in another format",
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
        """A contiguous copy in host memory, complete on return."""
        kept = self._copies.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            shape = tuple(tensor.shape)
            kept = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = kept
        return kept.copy_(tensor.detach())

    # ------------------------------------------------------------ output

    def export(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write the model and tokenizer for ``from_pretrained``: rank 0 writes, and holds one shard
        beside its part of the weights."""
        self._require_equal_weights()

        def save(model: Any, weights: Weights) -> None:
            save_model(model, self.tokenizer, folder, weights, shard_bytes=shard_bytes)

        self._save(save if self.ranks.rank == 0 else None)

    def hand_over(self, prompt_of: Callable[[Any], Sequence[int]], save: SaveWeights | None) -> Any:
        """Logits of rank 0's prompt by the current weights, (T, V) on the host; then the weights
        for every rank that saves them. See :data:`refiner_core.generation.saving.HandOver`."""
        ids = on_first(self.ranks, lambda: list(prompt_of(self.model)))
        with torch.no_grad(), evaluating(self.model):
            logits_T_V = self._logits(torch.tensor([ids], device=self.device))[0].float().cpu()
        self._save(save)
        return logits_T_V

    def _logits(self, ids_BL: torch.Tensor) -> Any:
        return self.model(input_ids=ids_BL, use_cache=False).logits

    def _save(self, save: SaveWeights | None) -> None:
        """Read all weights once; an error of one rank is raised on all."""
        weights = self.weights(lambda _: save is not None)

        def read() -> None:
            try:
                if save is not None:
                    save(self.model, weights)
            finally:
                deque(weights, maxlen=0)  # the other ranks gather the rest

        on_all(self.ranks, read)

    def memory(self) -> dict[str, float]:
        """``memory/…`` metrics: the peak of any rank so far, GiB."""
        mine = loading.memory_metrics(self.device)
        gathered = self.ranks.gather(mine) or []
        return self.ranks.broadcast({n: max((v[n] for v in gathered), default=0.0) for n in mine})

    def _require_equal_weights(self) -> None:
        """Raise on every rank if two do not hold bitwise the same weights: a machine or a library
        is faulty, and a checkpoint would hold the weights of one rank only."""
        if self.ranks.world == 1 or self.partitioned:
            return
        gathered = self.ranks.gather(_fingerprint(self.model)) or []
        odd = [rank for rank, value in enumerate(gathered) if value != gathered[0]]
        if odd := self.ranks.broadcast(odd):
            raise StageFailed(
                f"The weights of rank {odd[0]} are not those of rank 0, though both made the "
                "same updates",
                expected="bitwise equal weights on all ranks",
                fix="run it again from the last checkpoint, without the node of that rank; if it "
                "happens again, please report it",
            )


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()  # type: ignore[untyped-decorator]
def _fingerprint(model: Any) -> int:
    """A hash of the bits (collisions are unlikely): sums of the bits as integers."""
    sums = [
        tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
        for tensor in model_tensors(model).values()
    ]
    return hash(tuple(torch.stack(sums).tolist()))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model in evaluation mode: in training with activation checkpointing, transformers keeps no
    cache, and its generation is wrong."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Assignment of parameters to writing ranks: the largest first, to the least loaded rank."""
    names = sorted(sizes)
    return [[names[i] for i in mine] for mine in deal([sizes[name] for name in names], world)]


def rng_state() -> dict[str, Any]:
    """Every random state of the process, in types that torch loads without full pickle."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the random states. CUDA's are left alone if the devices differ."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def write_synced(path: Path, data: bytes) -> None:
    """Write a file, with fsync."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(dict(tensors), path, metadata={"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())
