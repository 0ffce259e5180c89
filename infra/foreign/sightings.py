"""Checkpoints in the folder of a dead run of anybody's: of which layout, and how whole.

In: a folder. Out: one :class:`Sighting` per checkpoint, oldest step first. Names and headers are
read, and of the one to be taken all its numbers (:func:`prove`).

================ =========================================== ====================================
layout           recognised by                               can be published and evaluated
================ =========================================== ====================================
``hf``           safetensors and config.json                 yes
``weights``      safetensors alone                           with ``--companions FOLDER``
``bin``          ``*.bin``, ``*.pt``, ``*.pth``              after ``save_pretrained``
``deepspeed``    ``*_model_states.pt``, ``*_optim_states``   after ``zero_to_fp32.py``
``megatron``     ``mp_rank_*`` folders                       after its own converter
``distributed``  ``*.distcp``                                after ``dcp_to_torch``
================ =========================================== ====================================
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from infra.foreign.checkpoints import damage, files_below, safetensors_header, size_of
from refiner_core.contract.errors import ConfigurationError

#: safetensors' name of a type -> unsigned integers of its width, and the largest of them, without
#: the sign, that is a number.
_LARGEST: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7E),
}
_PAGE = 4096
_CHUNK = 1024 * _PAGE

Layout = Literal["hf", "weights", "bin", "deepspeed", "megatron", "distributed", "none"]
#: Why a layout cannot be used as it is, and what makes it usable.
CONVERSIONS: dict[Layout, str] = {
    "bin": "torch files: load and save them with save_pretrained(…, safe_serialization=True)",
    "deepspeed": "ZeRO shards: `python zero_to_fp32.py FOLDER OUT`, then save_pretrained",
    "megatron": "Megatron shards: convert them with its tools to the Hugging Face layout",
    "distributed": "torch.distributed.checkpoint: `python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT`, then save_pretrained",
    "none": "no weights in it",
}
_DEPTH = 4
_NAME = re.compile(
    r"(?:checkpoint|ckpt|global[-_]?step|step|iter(?:ation)?|epoch|update|model|save)s?"
    r"[-_.]?(?:step|iter)?[-_=]?0*(\d+)(?:[-_.].*)?$",
    re.IGNORECASE,
)
_LEFT_OUT = (".git", "__pycache__", "wandb", "tensorboard", "logs")


def contents_damage(path: Path) -> str | None:
    """Damage of the numbers in a file of weights, or in those of a folder.

    Raises
    ------
    OSError
        It cannot be read.
    """
    if path.is_dir():
        for part in sorted(path.glob("*.safetensors")):
            if wrong := contents_damage(part):
                return f"{part.name}: {wrong}"
        return None
    if path.suffix != ".safetensors":
        return None
    try:
        with path.open("rb") as file:
            start, header = safetensors_header(path)
            if _is_empty(file, start):
                return "is empty in its second half, as where a file was cut off"
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(start + begin)
                if wrong := _tensor_damage(file, entry["dtype"], entry["shape"], end - begin):
                    return f"{name} {wrong}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return "no safetensors header"
    return None


def _is_empty(file: BinaryIO, start: int) -> bool:
    """True if the second half of what lies behind ``start`` is all zeros."""
    end = file.seek(0, os.SEEK_END)
    at = file.seek((start + end) // 2)
    while at < end and not file.read(_CHUNK).strip(b"\0"):
        at = file.tell()
    return start < end <= at


def _tensor_damage(file: BinaryIO, dtype: str, shape: list[int], size: int) -> str | None:
    if dtype not in _LARGEST:
        return None
    kind, largest = np.dtype(_LARGEST[dtype][0]), _LARGEST[dtype][1]
    if size != math.prod(shape) * kind.itemsize:
        return "has another size than its shape"
    without_sign = (1 << (8 * kind.itemsize - 1)) - 1
    empty = 0
    for begin in range(0, size, _CHUNK):
        data = file.read(min(size - begin, _CHUNK))
        if bool((np.frombuffer(data, kind) & without_sign > largest).any()):
            return "holds NaN"
        whole = data.ljust(-(-len(data) // _PAGE) * _PAGE, b"\0")
        words = np.frombuffer(whole, np.uint64).reshape(-1, _PAGE // 8)
        empty += int((~words.any(axis=1)).sum())
    # Vectors may well be all zeros (biases), and so may most rows of a matrix.
    is_matrix = sum(n > 1 for n in shape) > 1
    if is_matrix and empty == -(-size // _PAGE):
        return "is empty, as where a file was cut off and filled up with zeros"
    return None


class Sighting(NamedTuple):
    """One checkpoint; ``damage`` is empty where its files are whole."""

    step: int
    path: Path
    layout: Layout
    damage: str
    bytes: int

    @property
    def note(self) -> str:
        """Complete, or why not; and what a layout that is not read needs first."""
        if self.damage:
            return f"damaged: {self.damage}"
        hint = CONVERSIONS.get(self.layout, "")
        return f"complete; to be converted first ({hint})" if hint else "complete"

    @property
    def usable(self) -> bool:
        """True if it can be adopted as it is."""
        return not self.damage and self.layout in ("hf", "weights")


def sight(folder: Path) -> list[Sighting]:
    """All checkpoints in a folder, oldest step first.

    Raises
    ------
    ConfigurationError
        There is no such folder, or nothing in it looks like a checkpoint.
    """
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder",
            expected="the folder of a run that has ended",
            fix="check the path",
        )
    found = [_described(step, path) for step, path in _candidates(folder)]
    if not found:
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ConfigurationError(
            f"Nothing in {folder} looks like a checkpoint (there: {names})",
            expected="folders such as checkpoint-100, ckpt_100, step_100 or global_step100, or a "
            "folder with *.safetensors",
            fix="name the folder that holds them",
        )
    return sorted(found, key=lambda s: (s.step, s.path.name))


def prove(found: list[Sighting], step: int | None) -> list[Sighting]:
    """The same sightings; the one that :func:`choose` takes has been read from end to end, and
    newer ones in which that has shown damage say so.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    proved = list(found)
    for number, sighting in reversed([*enumerate(found)]):
        if not sighting.usable or step not in (None, sighting.step):
            continue
        damage = contents_damage(sighting.path)
        if damage is None:
            break
        proved[number] = sighting._replace(damage=damage)
    return proved


def choose(found: list[Sighting], step: int | None) -> Sighting:
    """The sighting of ``step``, else the newest that can be used.

    Raises
    ------
    ConfigurationError
        There is none; the message says what is wrong with those there are.
    """
    wanted = [s for s in found if step is None or s.step == step]
    usable = [s for s in wanted if s.usable]
    if usable:
        return usable[-1]
    if not wanted:
        raise ConfigurationError(
            f"There is no checkpoint of step {step}",
            expected=f"one of {', '.join(str(s.step) for s in found)}",
            fix="name one of these with --step",
        )
    newest = wanted[-1]
    raise ConfigurationError(
        f"No checkpoint can be adopted; {newest.path.name}: {newest.note}",
        expected="one whose files are whole, in safetensors",
        fix="convert it, or look at all of them with --dry-run",
    )


def _candidates(folder: Path) -> Iterator[tuple[int, Path]]:
    step = _step_of(folder)
    if step is not None and _layout_of(folder) != "none":
        yield step, folder
    else:
        yield from _below(folder, 1)


def _below(folder: Path, depth: int) -> Iterator[tuple[int, Path]]:
    own_weights = False
    for path in sorted(folder.iterdir()):
        if path.name in _LEFT_OUT or path.name.startswith(".") or path.is_symlink():
            continue
        step = _step_of(path)
        if path.is_dir():
            if step is not None:
                yield step, path  # what is inside belongs to it
            elif depth < _DEPTH:
                yield from _below(path, depth + 1)
        elif path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            if step is not None and not re.search(r"\d+-of-\d+", path.name):
                yield step, path
            else:
                own_weights = True
    if own_weights:
        yield _step_inside(folder), folder


def _step_of(path: Path) -> int | None:
    match = _NAME.match(path.stem if path.is_file() else path.name)
    return None if match is None else int(match.group(1))


def _step_inside(folder: Path) -> int:
    """Step by a trainer's own note; 0 where there is none."""
    for name in ("trainer_state.json", "trainer.json", "state.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8"))
            for key in ("global_step", "step", "steps"):
                if isinstance(value.get(key), int):
                    return int(value[key])
        except (OSError, ValueError, AttributeError):
            continue
    return 0


def _described(step: int, path: Path) -> Sighting:
    layout = _layout_of(path)
    wrong = damage(path, need_weights=layout not in ("distributed", "megatron"))
    return Sighting(step, path, layout, wrong or "", size_of(path))


def _layout_of(path: Path) -> Layout:
    if path.is_file():
        return "weights" if path.suffix == ".safetensors" else "bin"
    top = [name for name in os.listdir(path) if (path / name).is_file()]  # noqa: PTH208
    every = [f.name for f in files_below(path)]
    folders = [f.parent.name for f in files_below(path)]
    if any(n.endswith(".safetensors") for n in top):
        return "hf" if "config.json" in top else "weights"
    if any(n.endswith(".distcp") for n in every):
        return "distributed"
    if any("_model_states.pt" in n or "_optim_states.pt" in n for n in every):
        return "deepspeed"
    if any(n.startswith("mp_rank_") for n in folders):
        return "megatron"
    if any(n.endswith((".bin", ".pt", ".pth")) and "optim" not in n for n in top):
        return "bin"
    return "none"
