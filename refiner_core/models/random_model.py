"""Untrained Qwen3 models of any size, with the tokenizer of the synthetic data.

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

#: The default shape. ``head_dim`` 32 is the smallest that vLLM serves on CPU.
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 1 << 15,
}


def make_random_model(
    *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **shape: Any
) -> Qwen3ForCausalLM:
    """Make a Qwen3 model with random weights (tied embeddings, evaluation mode).

    Parameters
    ----------
    seed
        The same seed gives the same weights; the caller's random state (of the CPU) is restored.
    device
        Where they are drawn: on a CPU four billion random numbers take minutes.
    shape
        Fields of the configuration beside :data:`SHAPE`. The vocabulary is at least the
        tokenizer's; by default there are as many key heads as attention heads.
    """
    tokenizer = tiny_tokenizer()
    fields = {**SHAPE, **shape, "vocab_size": max(len(tokenizer), shape.get("vocab_size", 0))}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    config = Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(config)
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
