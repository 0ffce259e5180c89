"""Make the base model of the recipe `tiny-tools` from that of `tiny`.

In: the packaged base, the environment `desk`, a seed. Out: a folder with the same Qwen3, body and
known tokens bit for bit, and rows for the tokens of :mod:`refiner_core.models.tokenizer`::

    python -m refiner_core.models.tools --out DIR --seed 0

New rows of the (tied) embedding are drawn around the mean of the old ones, with their spread. A
word without the space before it begins as the word with it, plus one vector that all such words
share: so a value that a user says in a sentence and a call repeats in JSON is one value from the
start. The model is then trained on the documents of :mod:`refiner_core.models.pretrain_text`, which
show records and say parts of them again. That takes about ten minutes on one core; the same seed
and versions give the same weights on one thread.

What it brings to tool use is that it finds and copies what stood in its context. It has seen no
tool call, no dialogue and no rule.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import DeskEnvironment
from refiner_core.environments.desk.words import WORDS
from refiner_core.models import tiny_model_dir
from refiner_core.models.pretrain import PretrainOptions, train_on_documents
from refiner_core.models.pretrain_text import draw_records_document
from refiner_core.models.random_model import write_model
from refiner_core.models.tokenizer import bare_and_spaced, tools_tokenizer

#: Rates are lower than from random weights: the base keeps what it has learned.
OPTIONS = PretrainOptions(
    steps=160, documents_per_step=16, muon_lr=5e-3, adamw_lr=3e-3, warmup_steps=15, decay_share=0.6
)


def desk_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer for all domains of the desk."""
    desk = DeskEnvironment(EnvironmentConfig(name="desk"), UserConfig())
    tools = [tool for domain in desk.domains() for tool in desk.tools(domain)]
    return tools_tokenizer(WORDS, tools)


def make_tools_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """The packaged base with rows for all tokens of ``tokenizer`` (which extends its own)."""
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(tiny_model_dir())
    old = model.get_input_embeddings().weight.detach().clone()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        rows = new_rows(old, tokenizer, torch.Generator().manual_seed(seed))
        model.get_input_embeddings().weight.copy_(rows)
    return model.eval()


def new_rows(old: Tensor, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> Tensor:
    """Embeddings of shape (tokens, width) whose first rows are ``old``."""
    mean, std = old.mean(0), old.std(0)
    drawn = torch.randn(len(tokenizer) - len(old), old.shape[1], generator=generator)
    no_space = std * torch.randn(old.shape[1], generator=generator)
    rows = torch.cat([old, mean + std * drawn])
    for bare, spaced in bare_and_spaced(tokenizer):
        if bare >= len(old):
            rows[bare] = rows[spaced] + no_space
    return rows


def pretrain_tools(
    tokenizer: PreTrainedTokenizerFast, options: PretrainOptions = OPTIONS
) -> Qwen3ForCausalLM:
    """The model with new rows, trained on documents about records; progress goes to stderr."""
    rng = random.Random(f"refiner-pretrain-tools-1/{options.seed}")
    model = make_tools_model(tokenizer, options.seed)
    return train_on_documents(model, tokenizer, lambda _: draw_records_document(rng), options)


def main(arguments: list[str] | None = None) -> None:
    """Command line: ``python -m refiner_core.models.tools --out DIR``."""
    parser = argparse.ArgumentParser(description="Make the base model of the recipe tiny-tools.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=OPTIONS.seed)
    parser.add_argument("--steps", type=int, default=OPTIONS.steps)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = desk_tokenizer()
    options = replace(OPTIONS, seed=chosen.seed, steps=chosen.steps)
    print(write_model(pretrain_tools(tokenizer, options), tokenizer, chosen.out))


if __name__ == "__main__":
    main()
