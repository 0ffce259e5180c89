"""Whether files of weights are whole, told from their headers: nothing is loaded, torch not needed.

In: a checkpoint's folder or file. Out: what is damaged, in words; None where nothing is.

============================ ==============================================================
``*.safetensors``            the header can be read, and the data it describes fills the file
``*.index.json``             every shard that it names is there
``*.pt *.pth *.bin *.ckpt``  a zip (as torch writes it) with its directory, which comes last;
                             older pickles have no such sign and only must not be empty
``*.json`` (up to 16 MiB)    is JSON
============================ ==============================================================
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

_ZIPPED = (".pt", ".pth", ".bin", ".ckpt", ".npz")
_JSON_LIMIT = 16 * 2**20
_HEADER_LIMIT = 100_000_000  # safetensors' own
_LEGACY_PICKLE = b"\x80"


def damage(path: Path, *, need_weights: bool = True) -> str | None:
    """What is wrong with a checkpoint (a file, or a folder with all below it); None if nothing is.

    ``need_weights`` makes a folder without any file of weights a damaged one.
    """
    if not path.is_dir():
        return file_damage(path)
    found = False
    for file in files_below(path):
        if wrong := file_damage(file) or _missing_shard(file):
            return f"{file.relative_to(path)}: {wrong}"
        found |= is_weights(file)
    if need_weights and not found:
        return "there is no file of weights in it"
    return None


def is_weights(path: Path) -> bool:
    """Whether a file is of a kind that holds tensors."""
    return path.suffix == ".safetensors" or path.suffix in _ZIPPED


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below ``folder`` in name order; links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(root) / name for name in sorted(names))


def file_damage(path: Path) -> str | None:
    """What is wrong with one file; None for what is whole, or of a kind that says nothing."""
    try:
        size = path.stat().st_size
        if path.suffix == ".safetensors":
            return _safetensors_damage(path, size)
        if path.suffix in _ZIPPED:
            return _zip_damage(path, size)
        if path.suffix == ".json" and size <= _JSON_LIMIT:
            return _json_damage(path, size)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


def _safetensors_damage(path: Path, size: int) -> str | None:
    if size < 8:
        return f"cut short: {size} bytes"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_LIMIT:
            return "no safetensors header"
        header = file.read(length)
    if len(header) < length:
        return f"cut short in its header: {size} bytes"
    try:
        entries = json.loads(header)
        ends = [e["data_offsets"][1] for k, e in entries.items() if k != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "no safetensors header"
    if size != expected:
        return f"cut short: {size} of {expected} bytes" if size < expected else "bytes at its end"
    return None


def _zip_damage(path: Path, size: int) -> str | None:
    if size == 0:
        return "empty"
    with path.open("rb") as file:
        first = file.read(2)
    if first != b"PK":
        legacy_or_tar = first[:1] == _LEGACY_PICKLE or path.suffix in (".ckpt", ".bin")
        return None if legacy_or_tar else "neither a zip nor a pickle"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"cut short: {size} bytes without the directory of a zip"
    return None if members else "an empty zip"


def _json_damage(path: Path, size: int) -> str | None:
    if size == 0:
        return "empty"
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "no whole JSON"
    return None


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
