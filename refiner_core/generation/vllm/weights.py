"""A model folder in memory, from which servers load new weights.

In: a live model and its tokenizer. Out: a complete folder in Hugging Face layout, checked before
anybody is told of it: a server takes a partial one without a word.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from refiner_core.contract.errors import NoSpaceError, StageFailed

#: Largest file of weights; host memory holds about one beside what is written.
PART_SIZE = "2GB"
_INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
#: What configuration and tokenizer may need beside the weights, bytes.
_SMALL_FILES = 64 << 20


def named_weights(model: Any) -> list[tuple[str, Tensor]]:
    """Every weight under its name in the model; tied ones once."""
    found: list[tuple[str, Tensor]] = []
    seen: set[tuple[int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        key = (value.data_ptr(), value.shape)
        if value.numel() and key in seen:
            continue
        seen.add(key)
        found.append((name, value.detach()))
    return found


def write_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model, configuration and tokenizer, complete and checked, or nothing under that name.

    Raises
    ------
    NoSpaceError
        It does not fit; says how much it is.
    StageFailed
        What was written is not what the model has.
    """
    weights = named_weights(model)
    part = folder.with_name(f".{folder.name}.part")
    for leftover in (part, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    _check_room(weights, folder.parent)
    try:
        part.mkdir(mode=0o700)
        model.save_pretrained(part, max_shard_size=PART_SIZE)
        tokenizer.save_pretrained(part)
        check_folder(part, weights)
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        raise _no_room(weights, folder.parent, str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_folder(folder: Path, weights: list[tuple[str, Tensor]]) -> None:
    """See that a folder has as many numbers as the model, and those of known names in their shape.

    A file that was cut short is refused when it is opened.

    Raises
    ------
    StageFailed
        It has not.
    """
    known = {name: tuple(value.shape) for name, value in weights}
    problem, count = "", 0
    for name, shape in _stored_shapes(folder).items():
        count += math.prod(shape)
        if known.get(name, shape) != shape:
            problem = f"{name} has shape {shape}, not {known[name]}"
    wanted = sum(math.prod(shape) for shape in known.values())
    if not problem and count != wanted:
        problem = f"{count} numbers, not {wanted}"
    if problem:
        raise StageFailed(
            f"The weights written to {folder} are not those of the model: {problem}",
            expected="every weight of the model",
            fix="nothing that a recipe can do; please report it",
        )


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files: dict[str, list[str]] = {}
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        for name, file in index.items():
            files.setdefault(file, []).append(name)
    else:
        with safe_open(folder / _ONE_FILE, framework="pt") as stored:
            files[_ONE_FILE] = list(stored.keys())
    shapes: dict[str, tuple[int, ...]] = {}
    for file, names in files.items():
        with safe_open(folder / file, framework="pt") as stored:
            for name in names:
                shapes[name] = tuple(stored.get_slice(name).get_shape())
    return shapes


def _check_room(weights: list[tuple[str, Tensor]], folder: Path) -> None:
    needed = sum(value.nbytes for _, value in weights) + _SMALL_FILES
    info = os.statvfs(folder)
    if info.f_bavail * info.f_frsize < needed:
        raise _no_room(weights, folder, f"{info.f_bavail * info.f_frsize / 2**30:.1f} GiB are free")


def _no_room(weights: list[tuple[str, Tensor]], folder: Path, why: str) -> NoSpaceError:
    size = sum(value.nbytes for _, value in weights) / 2**30
    return NoSpaceError(
        f"New weights for the rollout servers ({size:.2f} GiB) cannot be written to {folder}: "
        f"{why}",
        expected="room in memory for two versions of the weights",
        fix="set grpo.rollout_server.weights_dir to a folder with more room, or give the job more "
        "memory (grpo.resources.memory_gb): what lies in /dev/shm counts as memory",
    )
