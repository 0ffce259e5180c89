"""Whether the numbers in files of weights can be a trained model's: read, but not loaded.

In: a file or folder of safetensors whose headers are whole (:mod:`infra.foreign.weights`). Out:
what is wrong with the numbers; None where nothing is. A file that was cut off, and made as long
again by a file system or a copy, has zeros where its tensors were; one that was saved after a
training had diverged has NaN.
"""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

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


def contents_damage(path: Path) -> str | None:
    """What is wrong with the numbers in a file of weights, or in those of a folder.

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
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            if _is_empty(file, 8 + length):
                return "is empty in its second half, as where a file was cut off"
            file.seek(8 + length)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                if wrong := _tensor_damage(file, entry["dtype"], entry["shape"], end - begin):
                    return f"{name} {wrong}"
    except (ValueError, TypeError, KeyError, AttributeError, struct.error):
        return "no safetensors header"
    return None


def _is_empty(file: BinaryIO, start: int) -> bool:
    """Whether the second half of what lies behind ``start`` is all zeros."""
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
