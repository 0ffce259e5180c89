"""Checkpoints in the folder of any dead run: their layout and damage.

In: a folder. Out: one :class:`DetectedCheckpoint` per checkpoint, oldest step first. Names and
headers are read, and all numbers of the one to be taken (:func:`prove`).

Layouts are ``hf`` (safetensors and config.json), ``weights`` (safetensors alone: config and
tokenizer come from ``--companions FOLDER``) or ``other`` (torch files, shards of DeepSpeed,
Megatron or torch.distributed), which its own tools have to convert first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from infra.external.checkpoints import damage, files_below, signature, trainer_note
from refiner_core.contract.errors import ConfigurationError

_CHUNK = 4 << 20

Layout = Literal["hf", "weights", "other", "none"]
#: Why a layout cannot be used as it is, and how to convert it.
CONVERSIONS: dict[Layout, str] = {
    "other": "no safetensors: merge shards with the trainer's own tool (zero_to_fp32.py, "
    "dcp_to_torch), then load and save them with save_pretrained",
    "none": "no weights in it",
}
_SHARD = re.compile(r"\.(distcp|pt|pth|bin)$")
_DEPTH = 4
_NAME = re.compile(
    r"(?:checkpoint|ckpt|global[-_]?step|step|iter(?:ation)?|epoch|update|model|save)s?"
    r"[-_.]?(?:step|iter)?[-_=]?0*(\d+)(?:[-_.].*)?$",
    re.IGNORECASE,
)
_LEFT_OUT = (".git", "__pycache__", "wandb", "tensorboard", "logs")


def contents_damage(path: Path) -> str | None:
    """Damage of the numbers in a file of weights, or in a folder of them.

    Raises
    ------
    OSError
        It cannot be read.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    for part in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        if part.suffix != ".safetensors":
            continue
        where = "" if part == path else f"{part.name}: "
        with part.open("rb") as raw:
            raw.seek(part.stat().st_size // 2)
            if not any(data.strip(b"\0") for data in iter(partial(raw.read, _CHUNK), b"")):
                return f"{where}is empty in its second half, as after a truncation"
        try:
            with safe_open(part, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is not a mapping
                    tensor = file.get_tensor(name)
                    if tensor.is_floating_point() and bool(tensor.to(torch.float64).isnan().any()):
                        return f"{where}{name} holds NaN"
                    # Vectors (biases) may be all zeros, and so may most rows of a matrix.
                    if sum(n > 1 for n in tensor.shape) > 1 and not bool(tensor.any()):
                        return f"{where}{name} is empty, as after a truncation"
        except SafetensorError as error:
            return f"{where}not safetensors ({error})"
    return None


class DetectedCheckpoint(NamedTuple):
    """One checkpoint; ``damage`` is empty if its files are whole."""

    step: int
    path: Path
    layout: Layout
    damage: str
    bytes: int

    @property
    def note(self) -> str:
        """Complete, or why not; and the conversion of another layout."""
        if self.damage:
            return f"damaged: {self.damage}"
        hint = CONVERSIONS.get(self.layout, "")
        return f"complete; to be converted first ({hint})" if hint else "complete"

    @property
    def usable(self) -> bool:
        """True if it can be adopted as it is."""
        return not self.damage and self.layout in ("hf", "weights")


def detect(folder: Path) -> list[DetectedCheckpoint]:
    """All checkpoints in a folder, oldest step first.

    Raises
    ------
    ConfigurationError
        There is no such folder, or nothing in it looks like a checkpoint.
    """
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else ["no such folder"]
    found = [_described(*one) for one in _candidates(folder)] if folder.is_dir() else []
    if not found:
        there = ", ".join(names[:8]) or "nothing"
        raise ConfigurationError(
            f"Nothing in {folder} looks like a checkpoint (there: {there})",
            expected="folders such as checkpoint-100, ckpt_100, step_100 or global_step100, or a "
            "folder with *.safetensors",
            fix="name the folder that holds them",
        )
    return sorted(found, key=lambda s: (s.step, s.path.name))


def prove(found: list[DetectedCheckpoint], step: int | None) -> list[DetectedCheckpoint]:
    """The same sightings, after reading all of the one that :func:`choose` takes; newer ones found
    damaged on the way are marked.

    Raises
    ------
    OSError
        A file cannot be read.
    """
    proved = list(found)
    for number, sighting in reversed([*enumerate(found)]):
        if sighting.usable and step in (None, sighting.step):
            if (wrong := contents_damage(sighting.path)) is None:
                break
            proved[number] = sighting._replace(damage=wrong)
    return proved


def choose(found: list[DetectedCheckpoint], step: int | None) -> DetectedCheckpoint:
    """The sighting of ``step``, else the newest usable one.

    Raises
    ------
    ConfigurationError
        There is none; the message has the reasons.
    """
    usable = [s for s in found if s.usable and step in (None, s.step)]
    if usable:
        return usable[-1]
    newest = next((s for s in reversed(found) if step in (None, s.step)), None)
    why = f"none is of step {step}" if newest is None else f"{newest.path.name}: {newest.note}"
    raise ConfigurationError(
        f"No checkpoint can be adopted; {why}",
        expected="one with whole files, in safetensors, of "
        f"{', '.join(str(s.step) for s in found)}",
        fix="convert it, name another one with --step, or look at all of them with --dry-run",
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
                yield step, path  # its contents belong to it
            elif depth < _DEPTH:
                yield from _below(path, depth + 1)
        elif path.suffix in (".safetensors", ".pt", ".pth", ".bin"):
            if step is not None and not re.search(r"\d+-of-\d+", path.name):
                yield step, path
            else:
                own_weights = True
    if own_weights:
        yield trainer_note(folder, "global_step"), folder


def _step_of(path: Path) -> int | None:
    match = _NAME.match(path.stem if path.is_file() else path.name)
    return None if match is None else int(match.group(1))


def _described(step: int, path: Path) -> DetectedCheckpoint:
    layout = _layout_of(path)
    wrong = damage(path, need_weights=layout != "other")
    return DetectedCheckpoint(step, path, layout, wrong or "", signature(path)[1])


def _layout_of(path: Path) -> Layout:
    if path.is_file():
        return "weights" if path.suffix == ".safetensors" else "other"
    if any(path.glob("*.safetensors")):
        return "hf" if (path / "config.json").is_file() else "weights"
    return "other" if any(_SHARD.search(f.name) for f in files_below(path)) else "none"
