"""Untrained Qwen3 models of any size, with the tokenizer of the embedded world.

In: a shape and a seed. Out: a stock ``Qwen3ForCausalLM``, in memory or as a folder that
``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read. For tests and
benches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from refiner_core.models import tiny_tokenizer


def make_random_model(
    *,
    hidden_size: int = 32,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 64,
    vocab_size: int | None = None,
    num_key_value_heads: int | None = None,
    max_position_embeddings: int = 1 << 15,
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
    tokenizer = tiny_tokenizer()
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


def save_random_model(directory: str | Path, **shape: Any) -> Path:
    """Write a random model of this shape (see :func:`make_random_model`) with the tokenizer."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    make_random_model(**shape).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory, save_jinja_files=False)
    return directory
