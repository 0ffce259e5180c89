"""How many parameters a model has, without loading it: from a header, a configuration or a name.

In: a model reference. Out: a :class:`ModelSize` that says where the number is from.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

#: What a checkpoint takes per parameter: weights, two float32 moments, float32 masters if need be.
STATE_BYTES = {"float32": 12, "bfloat16": 14}
_NAMED = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)\s*([bm])(?![a-z])", re.IGNORECASE)
_LONGEST_HEADER = 100 << 20


class ModelSize(NamedTuple):
    """``parameters`` is None where nothing says; ``source`` is for people."""

    parameters: int | None
    source: str


def model_size(folder: Path | None, name: str) -> ModelSize:
    """The size of a model: its local files first, then ``4B`` or ``600m`` in its name."""
    if folder is not None and folder.is_dir():
        if counted := _by_headers(folder):
            return ModelSize(counted, f"counted in {folder.name}")
        if computed := _by_config(folder / "config.json"):
            return ModelSize(computed, f"from {folder.name}/config.json")
    found = _NAMED.findall(name.rpartition("/")[2])
    if found:
        # `30B-A3B`: all of a mixture's weights are stored, not only those that are active.
        sizes = (float(n) * (1e9 if unit.lower() == "b" else 1e6) for n, unit in found)
        return ModelSize(int(max(sizes)), f"from the name {name}")
    return ModelSize(None, f"nothing says how large {name} is")


def _by_headers(folder: Path) -> int:
    """Numbers in all safetensors files, by their headers (8 bytes of length, then JSON)."""
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _LONGEST_HEADER:
                    return 0
                header = json.loads(file.read(length))
            shapes = [v["shape"] for k, v in header.items() if k != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            return 0
        total += sum(math.prod(shape) for shape in shapes)
    return total


def _by_config(path: Path) -> int:
    """A decoder's weights from its shape: embeddings, attention and a gated feed-forward part."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        inner, words = int(config["intermediate_size"]), int(config["vocab_size"])
        heads = int(config["num_attention_heads"])
        pairs = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or hidden // heads)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return 0
    attention = 2 * hidden * width * (heads + pairs)
    embeddings = words * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + 3 * hidden * inner)
