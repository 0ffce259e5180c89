"""Which requests are decoded together.

In: requests and limits. Out: batches of rows, a row being one prompt and the requests that sample
from it side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from refiner_core.contract.types import GenerationRequest

#: Prompt tokens in one forward pass, padding included; bounds the memory of the prefill.
PREFILL_TOKENS = 8192
#: Samples beside each other in one row. More would share the prompt wider, but every sample also
#: passes over the (masked) tokens of its neighbours.
MAX_SAMPLES_PER_ROW = 16
#: Memory that the cache of one batch may take, when every sample runs to its limit.
CPU_CACHE_BYTES = 2 * 2**30
GPU_CACHE_SHARE = 0.25


class Row(NamedTuple):
    """One prompt and the requests (by index) that sample from it side by side."""

    prompt_ids: tuple[int, ...]
    requests: tuple[int, ...]


def plan_batches(
    requests: Sequence[GenerationRequest],
    batch_size: int,
    *,
    max_new_tokens: int = 0,
    max_entries: int | None = None,
) -> list[list[Row]]:
    """Group requests by prompt into rows, and rows into batches of at most ``batch_size`` samples.

    Rows with equally many samples and prompts of similar length come together, since a batch is
    padded to its widest row and longest prompt. A batch whose cache could outgrow ``max_entries``
    keys is cut shorter; a single row is never cut.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
    rows = []
    for prompt_ids, members in by_prompt.items():
        parts = -(-len(members) // min(MAX_SAMPLES_PER_ROW, batch_size))
        rows += [Row(prompt_ids, tuple(members[part::parts])) for part in range(parts)]
    rows.sort(key=lambda row: (len(row.requests), len(row.prompt_ids)))

    def fits(batch: Sequence[Row]) -> bool:
        width = len(batch[-1].requests)  # rows come in growing width
        entries = max(len(row.prompt_ids) for row in batch) + width * max_new_tokens
        return len(batch) * width <= batch_size and (
            max_entries is None or len(batch) * entries <= max_entries
        )

    batches: list[list[Row]] = []
    for row in rows:
        if batches and fits([*batches[-1], row]):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def max_cache_entries(model: Any) -> int:
    """Keys that a batch's cache may hold. The same on every machine of a kind: what is free at the
    moment would make batches, and with them the last digits, depend on the neighbours."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entry_bytes = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    budget_bytes = CPU_CACHE_BYTES
    if model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        budget_bytes = int(GPU_CACHE_SHARE * memory)
    return max(1, budget_bytes // int(entry_bytes))


def place_samples(batch: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Samples of the batch by row and place, [P, G] int64; -1 where a row has fewer than G."""
    widths = [len(row.requests) for row in batch]
    places = np.arange(max(widths))[None]
    first = np.cumsum([0, *widths[:-1]])[:, None]
    return np.where(places < np.array(widths)[:, None], first + places, -1)
