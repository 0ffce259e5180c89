"""From logits to one token per sample, with randomness that belongs to the sample alone.

In: logits of the live samples and one uniform number per sample. Out: a token per sample and its
log-probability under the distribution that was sampled from.

Uniform numbers come from a counter-based generator keyed by the request's seed (Philox; Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), one number per token. So a sample
draws the same numbers alone or among others, and a longer limit continues the same stream. A token
is drawn by inverting the cumulative distribution, which needs one number where Gumbel noise would
need one per vocabulary entry.

Shape suffixes: N samples, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import SamplingParams


class Draw(NamedTuple):
    """``tokens_N`` (int64) and ``logprobs_N`` (float32), on the device of the logits."""

    tokens_N: Tensor
    logprobs_N: Tensor


def uniform_streams(seeds: Sequence[int], length: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), shape [len(seeds), length]; row i depends on ``seeds[i]`` only."""
    streams = np.empty((len(seeds), length))
    for row, seed in enumerate(seeds):
        np.random.Generator(np.random.Philox(key=seed)).random(out=streams[row])
    return streams


def processed_logprobs(logits_N_V: Tensor, params: SamplingParams) -> Tensor:
    """Log-probabilities after temperature, then top-k, then top-p; excluded tokens are -inf.

    Greedy decoding (temperature 0) leaves logits as they are, so that its log-probabilities are the
    model's own. Computed in float32 whatever the model's type. Shape [N, V] to [N, V].
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
    """Keep the fewest likeliest tokens whose mass reaches ``top_p``; the likeliest always stays.

    Source: Holtzman et al., "The curious case of neural text degeneration", ICLR 2020.
    """
    ordered, order = logits_N_V.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1).double()
    before = mass.cumsum(dim=-1) - mass
    before[:, 0] = -1.0
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(ordered).scatter_(-1, order, ordered)


def draw(logits_N_V: Tensor, uniforms_N: Tensor, params: SamplingParams) -> Draw:
    """One token per row of ``logits_N_V``.

    Parameters
    ----------
    logits_N_V
        Raw logits, any float type.
    uniforms_N
        Numbers in [0, 1), float64; unused when greedy.
    params
        Temperature 0 takes the likeliest token (the first of equals).
    """
    logprobs = processed_logprobs(logits_N_V, params)
    if params.temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    else:
        # float64, because float32 sums over 150k entries drift by more than a rare token's mass.
        cumulative = logprobs.exp().double().cumsum(dim=-1)
        total = cumulative[:, -1]
        # The first entry that exceeds u * total has mass of its own. A product that rounds up to
        # `total` would fall off the end, so it is held one step below.
        target = torch.minimum(uniforms_N * total, torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)
    return Draw(tokens, logprobs.gather(-1, tokens[:, None])[:, 0])


def refuse_not_finite(
    logprobs_N: npt.NDArray[np.floating], before_N: npt.NDArray[np.integer] | int
) -> None:
    """Refuse log-probabilities of tokens drawn from logits that are not finite; ``before_N`` is the
    number of tokens before each.

    Raises
    ------
    StageFailed
        With where, and how many they are.
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
