"""Model folders for ``from_pretrained``, written from weights that come one at a time.

In: a model's structure, its tokenizer, and its weights by name; only the one that is being read
must be whole. Out: the layout of the Hub: ``model.safetensors``, or with more than ``shard_bytes``
``model-00001-of-0000N.safetensors`` and an index. Host memory holds one shard at a time.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

#: Largest file of weights, except for a single larger tensor.
SHARD_BYTES = 5 * 10**9
WEIGHTS = "model.safetensors"

#: Names and weights of a model, each of which may be gone once the next one is read.
Weights = Iterable[tuple[str, torch.Tensor]]
#: Saves the weights of a model, given both.
SaveWeights = Callable[[Any, Weights], None]
#: Makes a prompt for the model and saves its weights; returns the prompt's logits by these weights,
#: (T, V) on the host.
HandOver = Callable[[Callable[[Any], Sequence[int]], SaveWeights], torch.Tensor]


def model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters (a tied one under its first name) and persistent buffers, as stored here."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    return named | {name: b for name, b in model.named_buffers() if name in persistent}


def whole_shape(tensor: Any) -> tuple[int, ...]:
    """The full shape of a tensor, also if DeepSpeed keeps only a part of it here."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def hand_over_of(load: Callable[[], Any]) -> HandOver:
    """The hand-over of a model that this process can load whole."""

    def hand_over(prompt_of: Callable[[Any], Sequence[int]], save: SaveWeights) -> torch.Tensor:
        model = load().eval()
        ids = torch.tensor([prompt_of(model)], device=model.device)
        save(model, model_tensors(model).items())
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits[0].float().cpu()

    return hand_over


def save_model(
    model: Any, tokenizer: Any, folder: Path, weights: Weights, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write model and tokenizer; a folder of an earlier attempt is replaced."""
    part = folder.with_name(f".{folder.name}.part")
    for leftover in (part, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    part.mkdir(parents=True)
    try:
        _save_weights(model, part, weights, shard_bytes)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _save_weights(model: Any, folder: Path, weights: Weights, shard_bytes: int) -> None:
    # Else transformers writes on rank 0 alone, once there is a process group.
    model.should_save_on_this_rank = lambda is_main_process: True
    files: list[Path] = []
    totals = {"total_parameters": 0, "total_size": 0}
    for shard in _shards(weights, shard_bytes):
        totals["total_parameters"] += sum(tensor.numel() for tensor in shard.values())
        totals["total_size"] += sum(tensor.nbytes for tensor in shard.values())
        model.save_pretrained(folder, state_dict=shard, max_shard_size=sys.maxsize)
        files.append((folder / WEIGHTS).rename(folder / f"shard-{len(files)}"))
    if len(files) == 1:
        files[0].rename(folder / WEIGHTS)
        return
    index: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        named = file.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        with safe_open(named, "pt") as opened:
            index |= dict.fromkeys(opened.keys(), named.name)
    text = json.dumps({"metadata": totals, "weight_map": index}, indent=2, sort_keys=True)
    (folder / f"{WEIGHTS}.index.json").write_text(f"{text}\n", encoding="utf-8")


def _shards(weights: Weights, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the weights of one file after the other; each is emptied before the next."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard.clear()
            size = 0
        shard[name] = tensor.detach().to("cpu", copy=True)
        size += tensor.nbytes
    yield shard
