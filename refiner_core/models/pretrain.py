"""Pre-train the base model of the recipe `tiny`.

In: nothing but a seed. Out: a folder with a stock Qwen3 of about a million parameters and its
tokenizer, which plain ``AutoModelForCausalLM.from_pretrained`` loads::

    python -m refiner_core.models.pretrain --out DIR --seed 0

The task asks for evidence selection, which a model of this size did not learn from the task's
demonstrations alone in the minutes that a recipe may take. Three things together bring it within
that time on one CPU core; the ways that were tried without one of them did not:

1. a title that stands before a snippet's tag and is restated before a claim's tag
   (:mod:`refiner_core.data.synthetic`);
2. documents that cite with replacement (:mod:`refiner_core.models.pretrain_text`);
3. previous-token heads written into layer 0 before the first step
   (:mod:`refiner_core.models.random_model`).

So the result is a test fixture that learns the way a real model does from here on. It is no
evidence about what small models learn by themselves. Documents share no name, value, id or layout
with the task's rows.

Matrices are trained with Muon, embeddings and norms with AdamW; constant rate after a warm-up, then
linearly to zero: six to eleven minutes on one core. The same seed, steps and versions give the same
weights on one thread; the shipped ones were made again byte for byte.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from refiner_core.models.pretrain_text import Segment, draw_document
from refiner_core.models.random_model import (
    make_random_model,
    save_model,
    wire_previous_token_heads,
)
from refiner_core.models.tokenizer import build_tokenizer


@dataclass(frozen=True)
class PretrainOptions:
    """How the base model is trained; rates are peaks."""

    seed: int = 0
    steps: int = 700
    table_steps: int = 120
    budget_s: float | None = None
    documents_per_step: int = 16
    muon_lr: float = 0.01
    adamw_lr: float = 3e-3
    warmup_steps: int = 50
    decay_share: float = 0.4


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, documents: list[list[Segment]]
) -> tuple[Tensor, Tensor]:
    """Token ids and loss weights, both of shape (documents, longest), padded on the right."""
    rows, weights = [], []
    for document in documents:
        ids: list[int] = []
        loss: list[float] = []
        for text, weight in document:
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            loss += [weight] * len(piece)
        rows.append([*ids, tokenizer.eos_token_id])
        weights.append([*loss, 0.0])
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([row + [pad] * (longest - len(row)) for row in rows]),
        torch.tensor([loss + [0.0] * (longest - len(loss)) for loss in weights]),
    )


def weighted_loss(model: Qwen3ForCausalLM, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy, and the share of fully weighted tokens that are predicted."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    targets, weights = ids[:, 1:], weights[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    full = weights == 1.0
    accuracy = (logits.argmax(-1) == targets)[full].float().mean()
    return (losses * weights.flatten()).sum() / weights.sum(), accuracy.detach()


def make_optimizers(
    model: Qwen3ForCausalLM, options: PretrainOptions
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon on the matrices of the layers and AdamW on the rest, each with its peak rate."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else rest).append(parameter)
    muon = torch.optim.Muon(matrices, lr=options.muon_lr, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=options.adamw_lr, weight_decay=0.0, betas=(0.9, 0.95))
    return [(muon, options.muon_lr), (adamw, options.adamw_lr)]


def rate_factor(progress: float, step: int, options: PretrainOptions) -> float:
    """Factor on the peak rates: warm-up by steps, then constant, then linearly to zero."""
    decay = (1.0 - progress) / options.decay_share
    return max(0.0, min(1.0, (step + 1) / options.warmup_steps, decay))


def pretrain(options: PretrainOptions | None = None) -> Qwen3ForCausalLM:
    """Train a base model; progress goes to stderr."""
    options = options or PretrainOptions()
    tokenizer = build_tokenizer()
    model = make_random_model(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        intermediate_size=256,
        seed=options.seed,
    )
    wire_previous_token_heads(model, options.seed)

    def draw(rng: random.Random, step: int) -> list[Segment]:
        return draw_document(rng, 0.9 if step < options.table_steps else 0.1)

    rng = random.Random(f"refiner-pretrain-1/{options.seed}")
    return train_on_documents(model, tokenizer, lambda step: draw(rng, step), options)


def train_on_documents(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[int], list[Segment]],
    options: PretrainOptions,
) -> Qwen3ForCausalLM:
    """Train ``model`` in place on documents that ``draw`` makes for a step; progress to stderr."""
    model.train()
    optimizers = make_optimizers(model, options)
    begin = time.monotonic()
    for step in range(options.steps):
        elapsed = time.monotonic() - begin
        progress = max(
            step / options.steps, elapsed / options.budget_s if options.budget_s else 0.0
        )
        if progress >= 1.0:
            break
        factor = rate_factor(progress, step, options)
        documents = [draw(step) for _ in range(options.documents_per_step)]
        ids, weights = encode_documents(tokenizer, documents)
        loss, accuracy = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(
                f"step {step:4d} of {options.steps}: loss {loss.item():.3f}, "
                f"predicted {accuracy.item():.3f}, {elapsed:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    """Command line: ``python -m refiner_core.models.pretrain --out DIR``."""
    defaults = PretrainOptions()
    parser = argparse.ArgumentParser(description="Pre-train the base model of the recipe tiny.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--budget-s", type=float, help="stop after so many seconds of wall clock")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = pretrain(
        PretrainOptions(seed=chosen.seed, steps=chosen.steps, budget_s=chosen.budget_s)
    )
    print(save_model(model, chosen.out))


if __name__ == "__main__":
    main()
