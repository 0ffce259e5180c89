"""Training state to a folder and back, exactly.

In: model, updater and a JSON-ready progress dictionary. Out: three files in a folder that somebody
else (``StageIO``) made and will make visible:

* ``model.safetensors``: parameters and persistent buffers, tied ones once;
* ``state.pt``: optimisers, master weights, and the random states of Python, NumPy, torch and CUDA;
* ``progress.json``: step, position in the data, running numbers. Floats survive JSON exactly.

A full disk or quota ends in whatever the writing library makes of it (torch raises a RuntimeError
without errno, safetensors an error of its own): who gave the folder recognises it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from refiner_core.contract.errors import WorkspaceError

FORMAT_VERSION = 1
WEIGHTS, STATE, PROGRESS = "model.safetensors", "state.pt", "progress.json"


@dataclass(frozen=True)
class StateSnapshot:
    """A training state in host memory, to be written at leisure."""

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, Any]
    progress_text: str

    def write(self, folder: Path) -> None:
        """Write a complete state into ``folder``, and to the disk (fsync)."""
        safetensors.torch.save_file(dict(self.tensors), folder / WEIGHTS, metadata={"format": "pt"})
        with (folder / STATE).open("wb") as file:
            torch.save(dict(self.state), file)
        (folder / PROGRESS).write_text(self.progress_text, encoding="utf-8")
        for name in (WEIGHTS, STATE, PROGRESS):
            with (folder / name).open("rb+") as file:
                os.fsync(file.fileno())


def take_snapshot(model: Any, updater: Any, progress: dict[str, Any]) -> StateSnapshot:
    """Copy the whole state into host memory; what comes later does not change it."""
    return StateSnapshot(
        tensors={name: _copied(tensor) for name, tensor in _tensors(model).items()},
        state={"updater": _copied(updater.state_dict()), "rng": rng_state()},
        progress_text=json.dumps({"format": FORMAT_VERSION, **progress}, allow_nan=False),
    )


def save_state(folder: Path, model: Any, updater: Any, progress: dict[str, Any]) -> None:
    """Write the state as of now into ``folder``."""
    take_snapshot(model, updater, progress).write(folder)


def _copied(value: Any) -> Any:
    """The same structure with copies of its tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value


def load_state(folder: Path, model: Any, updater: Any) -> dict[str, Any]:
    """Put a saved state back into ``model`` and ``updater``; returns the progress dictionary.

    Raises
    ------
    WorkspaceError
        If the folder is of another format or another model.
    """
    progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    if progress.pop("format", None) != FORMAT_VERSION:
        raise WorkspaceError(
            f"{folder} is a checkpoint of another format",
            expected=f"format {FORMAT_VERSION}",
            fix="remove the checkpoint, or use the version of refiner that wrote it",
        )
    load_weights(folder, model)
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    updater.load_state_dict(state["updater"])
    set_rng_state(state["rng"])
    return progress


def load_weights(folder: Path, model: Any) -> None:
    """Put the saved parameters and buffers into ``model``.

    Raises
    ------
    WorkspaceError
        If they are those of another model, or cannot be read.
    """
    tensors = _tensors(model)
    try:
        saved = safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise WorkspaceError(
            f"{folder / WEIGHTS} cannot be read ({error})",
            expected="a complete checkpoint of this stage",
            fix="remove the checkpoint to go on from the one before it",
        ) from error
    different = tensors.keys() ^ saved.keys()
    different |= {n for n in tensors.keys() & saved.keys() if tensors[n].shape != saved[n].shape}
    if different:
        raise WorkspaceError(
            f"{folder} holds the weights of another model ({sorted(different)[0]} differs)",
            expected="a checkpoint of this stage",
            fix="remove the checkpoint to start the stage again",
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


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


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the random states back. CUDA's are left alone where the devices are others."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters (a tied one under its first name) and persistent buffers."""
    named = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    named.update((name, b) for name, b in model.named_buffers() if name in persistent)
    return {name: tensor.detach() for name, tensor in named.items()}
