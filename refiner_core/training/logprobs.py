"""Log-probabilities of a batch's targets under a model.

In: a causal language model of transformers and a :class:`~refiner_core.training.packing.Batch`.
Out: for each of T targets its log-probability in float32 and, where asked, the entropy there.

Only positions that predict a loss token go through the output head, in chunks that are recomputed
in the backward pass, so that vocabulary x length logits are never alive in float32 at once.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from refiner_core.training.packing import Batch

#: Whether entropies are computed, and whether a gradient flows through them.
Entropy = Literal["off", "metric", "loss"]

#: Logits alive at once (float32 elements): 256 MiB.
CHUNK_ELEMENTS = 1 << 26


class TokenScores(NamedTuple):
    """Over T targets, float32. ``entropy_T`` is empty where it was not asked for."""

    logprob_T: torch.Tensor
    entropy_T: torch.Tensor


def token_scores(
    model: Any, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
) -> TokenScores:
    """Scores of the targets; logits are divided by ``temperature`` first, as the sampler does."""
    hidden_TD = hidden_states(model, batch)
    head = model.get_output_embeddings()
    vocabulary = int(head.weight.shape[0])
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    if hidden_TD.shape[0] <= rows:
        return _score(head, hidden_TD, batch.target_T, temperature, entropy)
    parts = [
        checkpoint(_score, head, hidden, target, temperature, entropy, use_reentrant=False)
        for hidden, target in zip(hidden_TD.split(rows), batch.target_T.split(rows), strict=True)
    ]
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """(T, D): the last hidden state at each position that predicts a target."""
    output = model.base_model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_BL,
        attention_mask=_mask_for(model, batch.attention_mask),
        use_cache=False,  # with a cache the blocks of a pack leak into each other
    )
    hidden: torch.Tensor = output.last_hidden_state.flatten(0, 1)[batch.source_T]
    return hidden


def _mask_for(model: Any, mask: torch.Tensor | None) -> torch.Tensor | None:
    """sdpa takes booleans; eager attention adds the mask to the scores."""
    if mask is None or model.config._attn_implementation == "sdpa":
        return mask
    lowest = torch.finfo(model.dtype).min
    return torch.where(mask, 0.0, lowest).to(model.dtype)


def _score(
    head: Any, hidden_TD: torch.Tensor, target_T: torch.Tensor, temperature: float, entropy: Entropy
) -> TokenScores:
    logits_TV = head(hidden_TD).float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    logp_TV = torch.log_softmax(logits_TV, dim=-1)
    logp_T = logp_TV.gather(-1, target_T[:, None]).squeeze(-1)
    if entropy == "off":
        return TokenScores(logp_T, logp_T.new_zeros(0))
    source = logp_TV if entropy == "loss" else logp_TV.detach()
    return TokenScores(logp_T, -(source.exp() * source).sum(-1))
