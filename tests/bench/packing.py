"""`python -m tests.bench packing`: how much of packs and tensors is padding, on real lengths.

Lengths are those of the real rows under a byte-level BPE that is trained on them on the spot
(16,384 tokens; a large tokenizer cuts text about as fine). Two kinds of step: demonstrations, and
rollouts (the real prompts, 8 answers each whose lengths are drawn from the experts' answers, cut at
1,024), which share their prompts where attention is dense.

Two kinds of waste, each a share: ``room`` of packs that is not filled (the last pack of a set left
aside: nothing is left to fill it with), and ``padding``: positions of the tensors that hold no
token, in one row (FlashAttention) and in the rows that :func:`collate` makes for dense attention
(balance of a 4B model and of the embedded one). The rival is one sample per row, padded to the
longest of 8, as trainers without packing do. Goal: padding at most 2 %.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from refiner_core.training.batches import Pack, Sample, collate, pack_samples
from tests.bench.training_work import REAL_ROWS, machine, texts

VOCABULARY = 16_384
PACK_LENGTHS = (4096, 8192, 16_384)
RESPONSE_LENGTH = 1024
SAMPLES = 8
GOAL = 0.02
#: Where attention costs as much as all the rest (tokens): Qwen3-4B's shape, and the embedded model.
BALANCES = {"4B": 12_320.0, "embedded": 448.8}
ROWS_OF_RIVAL = 8


def main(arguments: list[str]) -> int:
    """One line per kind of step and pack length; 0 also without the rows, which it then says."""
    del arguments
    if not REAL_ROWS.is_dir():
        print(json.dumps({"name": "packing", "skipped": "no real rows here"}))
        return 0
    for kind, samples, share in (
        ("demonstrations", demonstrations(), False),
        ("rollouts", rollouts(), True),
    ):
        for pack_length in PACK_LENGTHS:
            print(json.dumps(measure(kind, samples, pack_length, share)), flush=True)
    return 0


def measure(
    kind: str, samples: Sequence[Sample], pack_length: int, share_prompts: bool
) -> dict[str, Any]:
    """Pack, lay out, and count."""
    fitting = [sample for sample in samples if sample.length <= pack_length]
    begun = time.process_time()
    packs = pack_samples(fitting, pack_length)
    seconds = time.process_time() - begun
    full = sorted(map(len, packs))[1:] if len(packs) > 1 else [len(packs[0])]
    line: dict[str, Any] = {
        "name": f"packing of {kind}, packs of {pack_length}",
        "ours": round(padding([[pack] for pack in packs], None), 4),
        "rival": round(padding_of_rows([sample.length for sample in fitting]), 4),
        "unit": "share of tensor positions that is padding: one row against 8 samples a batch",
        "room": round(1 - sum(full) / (len(full) * pack_length), 4),
    }
    for name, balance in BALANCES.items():
        told = {"share_prompts": share_prompts, "balance": balance}
        dense = pack_samples(fitting, pack_length, **told)
        line[f"dense_rows_{name}"] = round(padding([[pack] for pack in dense], balance), 4)
    return line | {
        "goal": GOAL,
        "met": max(v for k, v in line.items() if k == "ours" or k.startswith("dense")) <= GOAL,
        "samples": len(fitting),
        "too_long": len(samples) - len(fitting),
        "packs": len(packs),
        "tokens": sum(sample.length for sample in fitting),
        "seconds": round(seconds, 3),
        "machine": machine(),
    }


def padding(batches: Sequence[Sequence[Pack]], balance: float | None) -> float:
    """Share of tensor positions without a token."""
    laid = [collate(batch, balance=balance) for batch in batches]
    positions = sum(batch.input_ids_BL.numel() for batch in laid)
    return 1 - sum(batch.tokens for batch in laid) / positions


def padding_of_rows(lengths: Sequence[int]) -> float:
    """The same where each sample is a row, padded to the longest of 8 (in the given order)."""
    groups = [lengths[i : i + ROWS_OF_RIVAL] for i in range(0, len(lengths), ROWS_OF_RIVAL)]
    return 1 - sum(lengths) / sum(max(group) * len(group) for group in groups)


def demonstrations() -> list[Sample]:
    """The experts' answers after their prompts."""
    tokenizer = trained_tokenizer()
    prompts = tokenizer.encode_batch(texts("scholarqa_sft.jsonl", "user"))
    answers = tokenizer.encode_batch(texts("scholarqa_sft.jsonl", "assistant"))
    return [
        _sample(tuple(prompt.ids), answer.ids)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def rollouts() -> list[Sample]:
    """Groups on the real prompts."""
    tokenizer = trained_tokenizer()
    prompts = tokenizer.encode_batch(texts("scholarqa_rl.jsonl", "user"))
    answers = tokenizer.encode_batch(texts("scholarqa_sft.jsonl", "assistant"))
    drawn = np.random.default_rng(0).integers(0, len(answers), (len(prompts), SAMPLES))
    return [
        _sample(tuple(prompt.ids), answers[i].ids[:RESPONSE_LENGTH])
        for prompt, row in zip(prompts, drawn.tolist(), strict=True)
        for i in row
    ]


def _sample(prompt: tuple[int, ...], answer: Sequence[int]) -> Sample:
    return Sample(prompt, tuple(answer), (True,) * len(answer))


@cache
def trained_tokenizer() -> Tokenizer:
    """Byte-level BPE on the rows' own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        text
        for file in ("scholarqa_sft.jsonl", "scholarqa_rl.jsonl")
        for role in ("user", "assistant")
        for text in texts(file, role)
    ]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer
