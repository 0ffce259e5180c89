"""Untrained Qwen3 models of any size, with the tokenizer of the embedded world.

In: a shape and a seed. Out: a stock ``Qwen3ForCausalLM``, in memory or as a folder that
``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read. For tests,
and as the start of :mod:`refiner_core.models.pretrain`, whose first layer looks back one, two and
three tokens from the beginning (:func:`wire_previous_token_heads`).

Finding a snippet by its title is an induction: "these tokens stood here before, what came next?"
It needs heads that copy the previous tokens into the residual stream, and a head that matches
them. The first kind emerges very late in models and budgets of this size, so we write it into the
weights: the residual stream is laid out as a constant, the token, and the tokens 1, 2 and 3
places before it, and three heads of layer 0 fill the last three. The matching head, and all else,
is left to training. All of it remains trainable; nothing outside the weights is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from refiner_core.models.tokenizer import MODEL_MAX_LENGTH, build_tokenizer


def make_random_model(
    *,
    hidden_size: int = 32,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 64,
    vocab_size: int | None = None,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int = MODEL_MAX_LENGTH,
    rope_theta: float = 1e6,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """Make a Qwen3 model with random weights (float32, tied embeddings, evaluation mode).

    Parameters
    ----------
    hidden_size, num_hidden_layers, num_attention_heads, head_dim, intermediate_size
        The shape. ``head_dim`` 32 is the least that vLLM serves on CPU.
    vocab_size
        The size of the tokenizer's vocabulary by default.
    num_key_value_heads
        As many as attention heads by default.
    max_position_embeddings
        The window; positions are rotary, so the weights do not depend on it.
    rope_theta
        Base of the rotary frequencies.
    seed
        The same seed gives the same weights; the caller's random state is left as it was.
    """
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer) if vocab_size is None else vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads or num_attention_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model.eval()


def save_model(model: Qwen3ForCausalLM, directory: str | Path) -> Path:
    """Write ``model`` with the tokenizer to ``directory`` (made if missing) and return it."""
    return write_model(model, build_tokenizer(), directory)


def write_model(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: str | Path
) -> Path:
    """Write ``model`` with a tokenizer of its own to ``directory`` (made if missing)."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    return directory


def save_random_model(directory: str | Path, **shape: Any) -> Path:
    """Write a random model of this shape (see :func:`make_random_model`) with the tokenizer."""
    return save_model(make_random_model(**shape), directory)


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
