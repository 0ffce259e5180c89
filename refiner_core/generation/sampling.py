"""From logits to one token per sample, with random numbers that depend on the sample alone.

In: logits of the live samples and one uniform number per sample. Out: a token per sample and its
log-probability under the sampled distribution.

Uniform numbers come from a counter-based generator keyed by the request's seed (Philox; Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one number per token. So a sample
draws the same numbers in any batch, and a longer limit continues the same stream. A token is drawn
by inverting the cumulative distribution, which needs one number, while Gumbel noise needs one per
vocabulary entry.

Shape suffixes: N samples, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import GenerationRequest, SamplingParams


def uniform_streams(seeds: Sequence[int], length: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), shape [len(seeds), length]; row i depends on ``seeds[i]`` only."""
    streams = np.empty((len(seeds), length))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=streams[row])
    return streams


def processed_logprobs(logits_N_V: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities after temperature, then top-k, then top-p; excluded tokens are -inf.

    Greedy decoding (temperature 0) leaves logits unchanged, so that its log-probabilities are the
    model's own. Computed in float32 for any model type. Shape [N, V] to [N, V].
    """
    logits = logits_N_V.float()
    if params.temperature > 0:
        logits = logits / params.temperature
        if 0 < params.top_k < logits.shape[-1]:
            kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if params.top_p < 1:
            logits = _nucleus(logits, params.top_p)
    return logits.log_softmax(dim=-1)


def _nucleus(logits_N_V: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most likely tokens whose mass reaches ``top_p``, at least one.

    Source: Holtzman et al., "The curious case of neural text degeneration", ICLR 2020.
    """
    ordered, order = logits_N_V.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1).double()
    before = mass.cumsum(dim=-1) - mass
    before[:, 0] = -1.0
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def draw(logits_N_V: Tensor, uniforms_N: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits_N_V`` (int64), and its log-probability (float32).

    Parameters
    ----------
    logits_N_V
        Raw logits, any float type.
    uniforms_N
        Numbers in [0, 1), float64; unused when greedy.
    params
        Temperature 0 takes the most likely token (the first of equals).
    """
    logprobs = processed_logprobs(logits_N_V, params)
    if params.temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    else:
        # float64, because float32 sums over 150k entries drift by more than a rare token's mass.
        cumulative = logprobs.exp().double().cumsum(dim=-1)
        total = cumulative[:, -1]
        # The first entry above u * total has nonzero mass. A product rounded up to `total` would
        # run past the end, so it is clamped one step below.
        target = torch.minimum(uniforms_N * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def refuse_not_finite(
    logprobs_N: npt.NDArray[np.floating], before_N: npt.NDArray[np.integer] | int
) -> None:
    """Refuse log-probabilities of tokens drawn from non-finite logits; ``before_N`` is the number
    of tokens before each.

    Raises
    ------
    StageFailed
        The message says where, and for how many samples.
    """
    bad = np.flatnonzero(~np.isfinite(logprobs_N))
    if len(bad):
        first = int(np.broadcast_to(before_N, logprobs_N.shape)[bad[0]]) + 1
        raise StageFailed(
            f"The model's logits are not finite at token {first} of {len(bad)} of "
            f"{len(logprobs_N)} samples",
            expected="finite weights and activations",
            fix="resume from an earlier checkpoint with a lower learning rate, or use float32",
        )


#: Prompt tokens in one forward pass, padding included; bounds the memory of the prefill.
PREFILL_TOKENS = 8192
#: Samples side by side in one row. Longer rows would share the prompt more widely, but every sample
#: also passes over the (masked) tokens of its neighbours.
MAX_SAMPLES_PER_ROW = 16
#: Memory of one batch's cache if every sample runs to its limit.
CPU_CACHE_BYTES = 2 * 2**30
GPU_CACHE_SHARE = 0.25


class SamplingRow(NamedTuple):
    """One prompt and the requests (by index) that sample from it in parallel."""

    prompt_ids: tuple[int, ...]
    requests: tuple[int, ...]


def plan_batches(
    requests: Sequence[GenerationRequest],
    batch_size: int,
    *,
    max_new_tokens: int = 0,
    max_entries: int | None = None,
    samples_per_row: int = MAX_SAMPLES_PER_ROW,
) -> list[list[SamplingRow]]:
    """Group requests by prompt into rows, and rows into batches of at most ``batch_size`` samples.

    Rows with equally many samples and prompts of similar length are grouped, since a batch is
    padded to its widest row and longest prompt. A batch whose cache could exceed ``max_entries``
    keys is cut shorter; a single row is never cut.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        by_prompt.setdefault(tuple(request.prompt_ids), []).append(index)
    rows = []
    for prompt_ids, members in by_prompt.items():
        parts = -(-len(members) // min(samples_per_row, batch_size))
        rows += [SamplingRow(prompt_ids, tuple(members[part::parts])) for part in range(parts)]
    rows.sort(key=lambda row: (len(row.requests), len(row.prompt_ids)))

    def fits(batch: Sequence[SamplingRow]) -> bool:
        width = len(batch[-1].requests)  # rows are sorted by width
        entries = max(len(row.prompt_ids) for row in batch) + width * max_new_tokens
        return len(batch) * width <= batch_size and (
            max_entries is None or len(batch) * entries <= max_entries
        )

    batches: list[list[SamplingRow]] = []
    for row in rows:
        if batches and fits([*batches[-1], row]):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def max_cache_entries(model: Any) -> int:
    """Keys in a batch's cache, at most. Equal on all machines of a kind: the free memory of the
    moment would make batches, and so the last digits, depend on other processes."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entry_bytes = 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
    budget_bytes = CPU_CACHE_BYTES
    if model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(model.device).total_memory
        budget_bytes = int(GPU_CACHE_SHARE * memory)
    return max(1, budget_bytes // int(entry_bytes))


def place_samples(batch: Sequence[SamplingRow]) -> np.ndarray[Any, Any]:
    """Samples of the batch by row and place, [P, G] int64; -1 in rows with fewer than G."""
    widths = [len(row.requests) for row in batch]
    places = np.arange(max(widths))[None]
    first = np.cumsum([0, *widths[:-1]])[:, None]
    return np.where(places < np.array(widths)[:, None], first + places, -1)
