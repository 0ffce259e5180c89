"""Checkpoints in another trainer's layout: found by pattern, ordered by number, complete or not.

In: a folder that another trainer writes into, and a recipe's ``command``; or a stage with both in
its records. Out: its checkpoints, oldest step first, each with its damage, and which of them may be
deleted. Reading writes nothing, except for the one small file by which ``quiet:SECONDS`` asks the
file server for the time.

Files are judged by their headers; nothing is loaded, and torch is not needed:

============================ ==============================================================
``*.safetensors``            the header can be read, and the data it describes fills the file
``*.index.json``             every shard that it names is there
``*.pt *.pth *.bin *.ckpt``  a zip (as torch writes it) with its directory, which comes last;
                             older pickles have no such sign and only must not be empty
``*.json`` (up to 16 MiB)    is JSON
============================ ==============================================================

A trainer that dies in a save leaves whole weights but no optimizer: so a checkpoint must have the
files that most of its siblings have, by name (any number stands for any other: steps, ranks,
times).

In the folder of any dead run there is one :class:`DetectedCheckpoint` per checkpoint. Its layout is
``hf`` (safetensors and config.json), ``weights`` (safetensors alone: config and tokenizer come from
``--companions FOLDER``) or ``other`` (torch files, shards of DeepSpeed, Megatron or
torch.distributed), which its own tools have to convert first. Names and headers are read, and all
numbers of the one to be taken (:func:`prove`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infra.host.files import sync_file_system
from infra.store import atomic
from infra.store.layout import StagePaths
from infra.store.workspace import Workspace
from refiner_core.contract.config import CommandConfig
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.records import from_json

_ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".npz")
_JSON_LIMIT = 16 * 2**20
_HEADER_LIMIT = 100_000_000  # safetensors' own
_LEGACY_PICKLE = b"\x80"

log = logging.getLogger(__name__)
#: Number, size and newest change of files.
Signature = tuple[int, int, int]
#: The last file that Hugging Face's Trainer writes.
_TRAINER_STATE = "trainer_state.json"


def damage(path: Path, *, need_weights: bool = True) -> str | None:
    """Damage of a checkpoint (a file, or a folder with its contents); None if there is none.

    With ``need_weights``, a folder without any file of weights is damaged.
    """
    if not path.is_dir():
        return file_damage(path)
    found = False
    for file in files_below(path):
        if wrong := file_damage(file) or _missing_shard(file):
            return f"{file.relative_to(path)}: {wrong}"
        found |= file.suffix in (".safetensors", *_ZIPPED)
    if need_weights and not found:
        return "it has no file of weights"
    return None


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder in name order, or a file itself; links to folders are not
    followed."""
    if not folder.is_dir():
        yield folder
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(root) / name for name in sorted(names))


def file_damage(path: Path) -> str | None:
    """Damage of one file; None if it is whole, or of a kind without signs of damage."""
    try:
        size = path.stat().st_size
        if size == 0 and path.suffix in (*_ZIPPED, ".json"):
            return "empty"
        if path.suffix == ".safetensors":
            return _safetensors_damage(path, size)
        if path.suffix in _ZIPPED:
            return _zip_damage(path, size)
        if path.suffix == ".json" and size <= _JSON_LIMIT:
            json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "not complete JSON"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The offset of the data in a safetensors file, and its header by tensor: at least ``shape``
    and ``data_offsets``.

    Raises
    ------
    ValueError
        It has no header, or a truncated one.
    OSError
        It cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        if path.stat().st_size < 8 or length > _HEADER_LIMIT:
            raise ValueError("no safetensors header")
        header = file.read(length)
    if len(header) < length:
        raise ValueError("truncated in its header")
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        for entry in entries.values():
            entry["shape"], entry["data_offsets"][1]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError("no safetensors header") from error
    return begin, entries


def _safetensors_damage(path: Path, size: int) -> str | None:
    if size < 8:
        return f"truncated: {size} bytes"
    try:
        begin, entries = safetensors_header(path)
    except ValueError as error:
        return str(error)
    expected = begin + max((e["data_offsets"][1] for e in entries.values()), default=0)
    if size != expected:
        return f"truncated: {size} of {expected} bytes" if size < expected else "bytes at its end"
    return None


def _zip_damage(path: Path, size: int) -> str | None:
    with path.open("rb") as file:
        first = file.read(2)
    if first == b"PK":  # its directory comes last
        whole = zipfile.is_zipfile(path)
        return None if whole else f"truncated: {size} bytes without the directory of a zip"
    legacy_or_tar = first[:1] == _LEGACY_PICKLE or path.suffix in (".ckpt", ".bin")
    return None if legacy_or_tar else "neither a zip nor a pickle"


def _missing_shard(path: Path) -> str | None:
    if not path.name.endswith(".index.json"):
        return None
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return "an index without a `weight_map`"
    for name in sorted(map(str, names)):
        if not (path.parent / name).is_file():
            return f"shard {name} is missing"
    return None


class ExternalCheckpoint(NamedTuple):
    """One checkpoint; ``damage`` is empty if it is complete.

    ``certain`` distinguishes broken files from a merely missing sign of completeness.
    """

    step: int
    path: Path
    damage: str = ""
    certain: bool = False


def find_checkpoints(
    folder: Path, command: CommandConfig, whole: dict[Path, Signature] | None = None
) -> list[ExternalCheckpoint]:
    """All checkpoints below ``folder``, oldest step first (by number, not by name).

    Parameters
    ----------
    command
        Defines them by ``checkpoints``, ``step_pattern`` and ``complete``.
    whole
        Cache of complete checkpoints with their signatures, kept by repeated callers so that
        unchanged ones are not read again.
    """
    found, whole = [], {} if whole is None else whole
    for path in folder.glob(command.checkpoints) if folder.is_dir() else ():
        match = re.search(command.step_pattern, path.name)
        if match is None or path.name.startswith(atomic.TEMPORARY):
            continue
        number = next((g for g in match.groups() if g), "")
        if number.isdigit():
            found.append(_checked(int(number), path, command.complete, whole))
    found.sort(key=lambda c: (c.step, c.path.name))
    return _next_to_siblings(found) if command.complete == "weights" else found


def newest_complete(found: list[ExternalCheckpoint]) -> ExternalCheckpoint | None:
    """The newest complete one; newer damaged ones are logged."""
    for checkpoint in reversed(found):
        if not checkpoint.damage:
            return checkpoint
        log.warning("checkpoint %s is skipped: %s", checkpoint.path, checkpoint.damage)
    return None


def unfinished(found: list[ExternalCheckpoint]) -> list[ExternalCheckpoint]:
    """Checkpoints that no trainer can resume from; only valid while none writes.

    These are the ones with broken files, and the newest one if it lacks its sign of completeness: a
    trainer dies in the middle of one save. Older ones without a sign stay, in case the rule is
    wrong.
    """
    return [c for c in found if c.damage and (c.certain or c is found[-1])]


def older(found: list[ExternalCheckpoint], keep: int) -> list[ExternalCheckpoint]:
    """All before the newest ``keep`` (at least 1) complete ones, complete or not. Leave out a
    checkpoint that may still be written: it would count."""
    complete = [c for c in found if not c.damage][-max(1, keep) :]
    return [c for c in found if complete and c.step < complete[0].step]


def remove(gone: Sequence[ExternalCheckpoint]) -> int:
    """Delete checkpoints (unfinished ones only while none writes), and return their number."""
    for checkpoint in gone:
        why = f"unfinished: {checkpoint.damage}" if checkpoint.damage else "to free space"
        log.warning("deleting checkpoint %s, %s", checkpoint.path, why)
        atomic.remove_tree(checkpoint.path)
    if gone:  # some file systems return space only with the next commit
        sync_file_system(gone[0].path.parent)
    return len(gone)


def largest_of(found: Sequence[ExternalCheckpoint]) -> int:
    """Bytes of the largest complete one; 0 if there is none."""
    return max((signature(c.path)[1] for c in found if not c.damage), default=0)


def signature(path: Path) -> Signature:
    """Number, size and newest change of a file, or of all files in a folder: changes with every
    write."""
    count = total = newest = 0
    for file in files_below(path):
        with contextlib.suppress(OSError):
            found = file.stat()
            count, total = count + 1, total + found.st_size
            newest = max(newest, found.st_mtime_ns)
    return count, total, newest


def _checked(
    step: int, path: Path, complete: str, whole: dict[Path, Signature]
) -> ExternalCheckpoint:
    rule, _, value = complete.partition(":")
    now = signature(path)
    if whole.get(path) != now:
        if wrong := damage(path, need_weights=rule == "weights"):
            return ExternalCheckpoint(step, path, wrong, certain=wrong[:8] != "there is")
        whole[path] = now
    is_trainers = rule != "file" and (path / "training_args.bin").exists()
    if is_trainers and not (path / _TRAINER_STATE).exists():
        return ExternalCheckpoint(step, path, f"{_TRAINER_STATE} is missing, which is saved last")
    if rule == "file" and not signature(path / value)[1]:
        return ExternalCheckpoint(step, path, f"{value} is missing")
    if rule == "quiet" and (age := _age_s(path)) < float(value):
        return ExternalCheckpoint(step, path, f"changed {age:.0f} s ago, less than {value} s")
    return ExternalCheckpoint(step, path)


def trainer_note(folder: Path, key: str) -> int:
    """A number from the state file of Hugging Face's Trainer; 0 if there is none."""
    try:
        return int(json.loads((folder / _TRAINER_STATE).read_bytes())[key])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _next_to_siblings(found: list[ExternalCheckpoint]) -> list[ExternalCheckpoint]:
    """The same, marked as damaged if they lack a file that more than half of the others have. Names
    may differ in numbers; the name of a checkpoint that is a single file does not count."""
    names: dict[Path, dict[str, str]] = {}
    for checkpoint in (c for c in found if not c.damage and c.path.is_dir()):
        below = (file.relative_to(checkpoint.path) for file in files_below(checkpoint.path))
        names[checkpoint.path] = {re.sub(r"\d+", "#", f.as_posix()): f.as_posix() for f in below}

    def lacking(path: Path) -> str:
        others = [files for place, files in names.items() if place != path]
        for shape in sorted({shape for files in others for shape in files} - names[path].keys()):
            having = [files[shape] for files in others if shape in files]
            if 2 * len(having) > len(others):
                return f"{having[0]} is missing, which others have"
        return ""

    return [c._replace(damage=lacking(c.path)) if c.path in names else c for c in found]


def _age_s(path: Path) -> float:
    """Seconds since the last change, by the file server's clock: a node's own clock may differ from
    it."""
    files = [path, *files_below(path)]
    newest = max((f.stat().st_mtime for f in files if f.exists()), default=0.0)
    probe = atomic.temporary_name(path.parent / "clock")
    try:
        probe.touch()
        return probe.stat().st_mtime - newest
    except OSError as error:
        log.warning("the age of %s is unknown: %s", path, error)
        return 0.0
    finally:
        atomic.remove_quietly(probe)


def work_folder(stage: StagePaths) -> Path:
    """The trainer's ``{output}``: one folder for all attempts, since it resumes from its contents.
    Once the stage has a result, it holds nothing that the result needs."""
    return stage.data / "work"


def recorded_checkpoints(
    workspace: Workspace, stage_id: str
) -> tuple[list[ExternalCheckpoint], int]:
    """The stage's checkpoints, oldest step first, and ``command.keep``; none for another kind, or
    for unreadable records."""
    stage = workspace.layout.stage(stage_id)
    numbers = stage.attempt_numbers() if stage_id.startswith("command-") else []
    if not numbers:
        return [], 1
    try:
        recorded = workspace.part(stage.attempt(numbers[-1]), "config")
        command = from_json(CommandConfig, recorded["command"])
        return find_checkpoints(work_folder(stage), command), command.keep
    except (RefinerError, OSError, KeyError, TypeError, ValueError) as error:
        log.warning("the checkpoints of %s are unknown: %s", stage_id, error)
        return [], 1


# ---------------------------------------------------------------- those of any dead run

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
