"""An initialisation whose first layer already looks back one, two and three tokens.

In: a Qwen3 model with random weights. Out: the same model, changed in place.

Finding a snippet by its title is an induction: "these tokens stood here before, what came next?"
It needs heads that copy the previous tokens into the residual stream, and a head that matches
them. The first kind emerges very late in models and budgets of this size, so we write it into the
weights: the residual stream is laid out as a constant, the token, and the tokens 1, 2 and 3
places before it, and three heads of layer 0 fill the last three. The matching head, and all else,
is left to training. All of it remains trainable; nothing outside the weights is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

_LOOK_BACK = (1, 2, 3)
_CONSTANT = 0.5
_TOKEN_STD = 0.25
_SHARPNESS = 3.5
_FREQUENCIES = 3
_FINAL_NORM = 0.5


def block_width(hidden_size: int) -> int:
    """Residual dimensions of each of the four blocks; the first dimension is the constant."""
    return (hidden_size - 1) // (1 + len(_LOOK_BACK))


def wire_previous_token_heads(model: Qwen3ForCausalLM, seed: int = 0) -> None:
    """Write previous-token heads into layer 0 of ``model``.

    Parameters
    ----------
    model
        At least three heads, as many key-value heads as heads, and heads at least as wide as
        :func:`block_width`.
    seed
        Draws the token signatures.
    """
    config = model.config
    width, head_dim = block_width(config.hidden_size), int(config.head_dim)
    heads = config.num_attention_heads
    if heads < len(_LOOK_BACK) or heads != config.num_key_value_heads or width > head_dim:
        raise ValueError(
            f"Cannot wire {heads} heads of {head_dim} over {config.hidden_size} dimensions. "
            f"Expected at least {len(_LOOK_BACK)} heads, each with its own keys, {width} wide."
        )
    with torch.no_grad():
        _write_signatures(model, width, torch.Generator().manual_seed(seed))
        for head, distance in enumerate(_LOOK_BACK):
            _write_head(model, head, distance, width)
        attention = model.model.layers[0].self_attn
        attention.q_norm.weight.fill_(_SHARPNESS)
        attention.k_norm.weight.fill_(_SHARPNESS)
        model.model.norm.weight.fill_(_FINAL_NORM)


def _write_head(model: Qwen3ForCausalLM, head: int, distance: int, width: int) -> None:
    """Let ``head`` of layer 0 copy the token block from ``distance`` back into its own block."""
    config, attention = model.config, model.model.layers[0].self_attn
    first = head * int(config.head_dim)
    rows = slice(first, first + int(config.head_dim))
    query, key = _aim(distance, int(config.head_dim), float(config.rope_parameters["rope_theta"]))
    for projection, column in ((attention.q_proj, query), (attention.k_proj, key)):
        projection.weight[rows] = 0.0
        projection.weight[rows, 0] = column
    attention.v_proj.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    scale = _TOKEN_STD / _normalised_std(width, config.hidden_size)
    for j in range(width):
        attention.v_proj.weight[first + j, 1 + j] = 1.0
        attention.o_proj.weight[1 + (1 + head) * width + j, first + j] = scale


def _write_signatures(model: Qwen3ForCausalLM, width: int, generator: torch.Generator) -> None:
    """A constant, a random signature in the token block, and almost nothing elsewhere."""
    embedding = model.model.embed_tokens.weight
    embedding.mul_(0.1)
    embedding[:, 0] = _CONSTANT
    signatures = torch.randn(embedding.shape[0], width, generator=generator)
    embedding[:, 1 : 1 + width] = signatures * _TOKEN_STD


def _normalised_std(width: int, hidden_size: int) -> float:
    """Standard deviation of the token block after layer 0's normalisation."""
    mean_square = (_CONSTANT**2 + width * _TOKEN_STD**2) / hidden_size
    return float(_TOKEN_STD / mean_square**0.5)


def _aim(distance: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Query and key whose rotary score peaks where the key is ``distance`` tokens back.

    With key ``a`` and query ``a·exp(−i·distance·f)`` in the plane of frequency ``f`` the score of
    a key ``m`` back is ``Σ a² cos(f·(m − distance))``; the fastest frequencies tell neighbours
    apart.
    """
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(_FREQUENCIES) / half)
    query, key = torch.zeros(head_dim), torch.zeros(head_dim)
    key[:_FREQUENCIES] = 1.0
    query[:_FREQUENCIES] = torch.cos(-distance * frequencies)
    query[half : half + _FREQUENCIES] = torch.sin(-distance * frequencies)
    return query, key
