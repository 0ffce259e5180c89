"""Training state to a folder and back, exactly; any engine and number of ranks can read it.

In: what an engine holds (:class:`ReplicatedState`) and a JSON-ready progress dictionary. Out: files
in a folder that somebody else (``StageIO``) made and will make visible:

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
wrote it. The folders of version 1 (one process, ``state.pt``) are read as well.

A full disk or quota ends in whatever the writing library makes of it (torch raises a RuntimeError
without errno, safetensors an error of its own): who gave the folder recognises it.
"""

from __future__ import annotations

import json
import os
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from refiner_core.contract.errors import WorkspaceError
from refiner_core.training.model.loading import (
    WEIGHTS,
    SavedTensors,
    check_shapes,
    copy_weights,
    model_tensors,
    read_pickled,
    reading,
    shapes_of,
)
from refiner_core.training.model.optim import ADAM_STATE, MUON_STATE, Groups, trainable
from refiner_core.training.ranks import Ranks


class HostCopies:
    """Memory for copies of one state: :meth:`begin`, :meth:`copy` each tensor, :meth:`lend`."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._used: dict[str, Any] = {}
        self._holder: weakref.ref[Any] | None = None

    def begin(self) -> None:
        """Begin a copy of a whole state. What the former one used serves again, if whoever had it
        is gone."""
        lent = self._holder is not None and self._holder() is not None
        self._kept = {} if lent else {**self._kept, **self._used}
        self._used, self._holder = {}, None

    def copy(self, name: str, tensor: Any) -> Any:
        """A copy in host memory, contiguous; finished when this returns."""
        found = self._kept.pop(name, None)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            found = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[name] = found
        return found.copy_(tensor.detach())

    def lend(self, holder: Any) -> None:
        """Leave the memory of this copy alone as long as ``holder`` lives."""
        self._kept = {}
        self._holder = weakref.ref(holder)


FORMAT_VERSION = 2
STATE, PROGRESS = "state.pt", "progress.json"
#: Key of the progress file that says who wrote it.
WRITTEN_BY = "written_by"

#: What is kept of one parameter, by kind: masters and the optimiser's tensors.
ParameterState = Mapping[str, torch.Tensor]


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
        metadata = {"format": "pt"}
        if self.tensors is not None:
            _save_tensors(dict(self.tensors), folder / WEIGHTS, metadata)
        _save_tensors(dict(self.states), folder / state_file(self.rank, self.world), metadata)
        with (folder / rng_file(self.rank, self.world)).open("wb") as file:
            torch.save(dict(self.rng), file)
            file.flush()
            os.fsync(file.fileno())
        if self.progress_text is not None:
            with (folder / PROGRESS).open("w", encoding="utf-8") as text:
                text.write(self.progress_text)
                text.flush()
                os.fsync(text.fileno())


def state_file(rank: int, world: int) -> str:
    """Name of the file with a rank's share of the optimisers' states."""
    return f"state-rank{rank:05d}-of-{world:05d}.safetensors"


def rng_file(rank: int, world: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng-rank{rank:05d}-of-{world:05d}.pt"


def take_snapshot(
    source: ReplicatedState,
    progress: Mapping[str, Any],
    ranks: Ranks | None = None,
    copies: HostCopies | None = None,
) -> StateSnapshot:
    """Copy this rank's part of the state into host memory; what comes later does not change it.

    With the same ``copies`` the next time, the memory of a snapshot that is gone serves again.
    """
    ranks, copies = ranks or Ranks(), copies or HostCopies()
    copies.begin()
    written_by = {"world": ranks.world, "engine": source.name}
    head = {"format": FORMAT_VERSION, WRITTEN_BY: written_by}
    text = json.dumps({**head, **progress}, allow_nan=False)
    first = ranks.rank == 0
    mine = set(shares(source.sizes(), ranks.world)[ranks.rank])
    weights = {
        n: copies.copy(f"weight.{n}", t)
        for n, t in source.weights(lambda _: first)
        if t is not None
    }
    states = {
        f"{kind}.{name}": copies.copy(f"{kind}.{name}", tensor)
        for name, state in source.states(mine.__contains__)
        for kind, tensor in state.items()
    }
    snapshot = StateSnapshot(
        rank=ranks.rank,
        world=ranks.world,
        tensors=weights if first else None,
        states=states,
        rng=rng_state(),
        progress_text=text if first else None,
    )
    copies.lend(snapshot)
    return snapshot


def shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Which rank writes which parameter: the largest first, to the rank with the least so far."""
    loads = [0] * world
    chosen: list[list[str]] = [[] for _ in range(world)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        chosen[rank].append(name)
    return chosen


def restore_state(
    folder: Path, source: ReplicatedState, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Put a saved state back; returns the progress dictionary.

    Everything is opened and compared with the model by every rank before anything is changed.

    Raises
    ------
    DamagedCheckpoint
        If the folder's files cannot be read, or are not complete.
    WorkspaceError
        If it is of another format, or of another model.
    """
    ranks = ranks or Ranks()
    with ExitStack() as files:
        saved: _Saved | None = None
        error: Exception | None = None
        try:
            saved = _open(folder, source, ranks, files)
        except Exception as raised:
            error = raised
        ranks.all_or_none(error)
        assert saved is not None
        source.set_weights(saved.weights)
        source.set_states(saved.state_of)
        set_rng_state(saved.rng)
    progress = saved.progress
    if saved.written_by != {"world": ranks.world, "engine": source.name}:
        progress["restored_from"] = saved.written_by
    return progress


@dataclass(frozen=True)
class _Saved:
    progress: dict[str, Any]
    written_by: Mapping[str, Any]
    weights: SavedTensors
    state_of: Callable[[str], ParameterState]
    rng: Mapping[str, Any]


def _open(folder: Path, source: ReplicatedState, ranks: Ranks, files: ExitStack) -> _Saved:
    progress = read_progress(folder)
    version = progress.pop("format", None)
    if version not in (1, FORMAT_VERSION):
        raise WorkspaceError(
            f"{folder} is a checkpoint of another format",
            expected=f"format {FORMAT_VERSION} or 1",
            fix="remove the checkpoint, or use the version of refiner that wrote it",
        )
    written_by = progress.pop(WRITTEN_BY, {"world": 1, "engine": "plain"})
    weights = SavedTensors([folder / WEIGHTS], files)
    check_shapes(source.shapes(), weights)
    if version == 1:
        old = read_pickled(folder / STATE)
        state_of = _states_of_version_1(old["updater"], source.groups).__getitem__
        return _Saved(progress, written_by, weights, state_of, old["rng"])
    world = int(written_by["world"])
    saved = SavedTensors([folder / state_file(rank, world) for rank in range(world)], files)
    rng = read_pickled(folder / rng_file(ranks.rank % world, world))
    return _Saved(progress, written_by, weights, lambda name: _state_in(saved, name), rng)


def save_state(folder: Path, model: Any, updater: Any, progress: Mapping[str, Any]) -> None:
    """Write the state of a model in this process, as of now, into ``folder``."""
    take_snapshot(ReplicatedState(model, updater), progress).write(folder)


def load_state(folder: Path, model: Any, updater: Any) -> dict[str, Any]:
    """Put a saved state back into a model in this process; see :func:`restore_state`."""
    return restore_state(folder, ReplicatedState(model, updater))


def read_progress(folder: Path) -> dict[str, Any]:
    """The progress file of a checkpoint, with ``format`` and ``written_by``.

    Raises
    ------
    DamagedCheckpoint
        If it cannot be read.
    """
    with reading(folder / PROGRESS):
        progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    return progress


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


class ReplicatedState:
    """State of a model and its updater, whole on every rank: what a snapshot is taken of and a
    checkpoint is read into. All ranks call every method alike."""

    #: Which engine it is: `plain`, `zero3`.
    name = "plain"
    #: How the parameters are trained; an older format's order follows from it.
    groups: Groups

    def __init__(self, model: Any, updater: Any) -> None:
        self.model, self.updater, self.groups = model, updater, updater.groups

    def sizes(self) -> dict[str, int]:
        """Names of the trained parameters, and how many numbers each has."""
        return {name: p.numel() for name, p in trainable(self.model).items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of all that :meth:`weights` gives."""
        return shapes_of(model_tensors(self.model))

    def weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Parameters and persistent buffers; None where this rank does not want them."""
        for name, tensor in model_tensors(self.model).items():
            yield name, tensor if wanted(name) else None

    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Masters and optimisers' tensors; nothing where this rank does not want them."""
        for name in trainable(self.model):
            if wanted(name):
                yield name, self.updater.state_of(name)

    def set_weights(self, weights: SavedTensors) -> None:
        """Take weights back: a mapping that reads them when they are asked for."""
        copy_weights(model_tensors(self.model), weights)

    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Take states back; called after :meth:`set_weights`."""
        for name in trainable(self.model):
            self.updater.set_state_of(name, state_of(name))


def _state_in(saved: SavedTensors, name: str) -> dict[str, torch.Tensor]:
    kinds = ("master", *ADAM_STATE, *MUON_STATE)
    return {kind: saved[f"{kind}.{name}"] for kind in kinds if f"{kind}.{name}" in saved}


def _states_of_version_1(
    updater: Mapping[str, Any], groups: Groups
) -> Mapping[str, ParameterState]:
    """Optimisers counted parameters in the order of their groups; masters, in the model's."""
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in groups.order}
    for names, saved in zip((groups.adam, groups.hidden), updater["optimizers"], strict=False):
        for index, name in enumerate(names):
            states[name] = dict(saved["state"].get(index, {}))
    for name, master in zip(groups.order, updater["masters"], strict=True):
        if master is not None:
            states[name]["master"] = master
    return states


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
