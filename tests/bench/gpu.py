"""`python -m tests.bench gpu [--shape 0.6B|1.7B|4B] [--out DIR]`: the pairs on a GPU.

bf16, a model of Qwen3's shape with random weights (made from its configuration, nothing is
fetched), packs of 8,192 tokens. Where torch sees no CUDA device it says that nothing was run, and
exits with 0. Lines, also written to `gpu-NAME-OF-THE-MACHINE.jsonl` in the folder ``--out``:

* the trainer alone, rollouts given: ours (:func:`train_grpo`, flash where installed, else sdpa with
  shared prompts) against the plain forward and backward, and against TRL, tokens per second, with
  MFU of both;
* a whole GRPO step against TRL's, generation by transformers on both sides;
* the most GPU memory of both.

MFU: model floating-point operations of the tokens that are trained on (6 x parameters per token and
12 x layers x width x mean context for attention; a prompt once per sample, recomputation not
counted) over seconds x :data:`PEAK_FLOPS` of the card. Sharing prompts saves work that this still
counts, so ours also says its MFU over the positions that it computes (``mfu_computed``).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flows.certify.device import PEAK_FLOPS
from flows.certify.work import SHAPES
from infra.store.provenance import host
from refiner_core.contract.config import ModelConfig, RecipeConfig
from refiner_core.contract.sections.steering import Resources
from refiner_core.contract.types import PromptRow
from refiner_core.training.batches import Sample, pack_samples
from tests.bench.training_work import (
    FixedRollouts,
    Steps,
    Work,
    fixed_rollouts,
    make_inputs,
    median_of,
    parts_of,
    run_ours,
)

PACK_LENGTH, ROUNDS, STEPS = 8192, 3, 3
GPU_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "tiny"}
#: A step: 4 prompts of 1,536 tokens, 8 responses of 512 to each.
WORK = Work("8,192-token packs", "", (1536,) * 4, ((512,) * 8,) * 4)
MICRO_BATCHES = (1, 2, 4, 8)


def main(arguments: list[str]) -> int:
    """Measure, or say that there is no GPU."""
    parser = argparse.ArgumentParser(prog="tests.bench gpu")
    parser.add_argument("--shape", choices=tuple(GPU_SHAPES), default="0.6B")
    parser.add_argument("--out", type=Path, default=Path())
    told = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(json.dumps({"name": "gpu", "skipped": "not run: torch sees no CUDA device"}))
        return 0
    card = torch.cuda.get_device_name(0)
    machine = f"{host()['name']}, {card}"
    lines = measure(told.shape, card)
    path = told.out / f"gpu-{re.sub(r'[^A-Za-z0-9.-]+', '-', machine)}.jsonl"
    with path.open("a") as file:
        for line in lines:
            text = json.dumps(line | {"model": told.shape, "machine": machine})
            print(text, flush=True)
            file.write(text + "\n")
    return 0


def measure(shape: str, card: str) -> list[dict[str, Any]]:
    """All pairs."""
    from transformers import AutoModelForCausalLM

    from tests.bench.trl_side import run_trl

    attention = "flash_attention_2" if _has_flash() else "sdpa"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(WORK, root, **GPU_SHAPES[shape])
        rollouts = fixed_rollouts(WORK, rows)
        config = _gpu_recipe(attention)

        def ours(name: str, given: FixedRollouts | None) -> tuple[Steps, float]:
            settings = {"generator": given, "base": config, "pack_length": PACK_LENGTH}
            return _with_memory(lambda: run_ours(WORK, root, root / name, STEPS, **settings))

        def trl(name: str, given: FixedRollouts | None, micro_batch: int) -> tuple[Steps, float]:
            settings = {"micro_batch": micro_batch, "fixed": given, "cuda": True}
            return _with_memory(lambda: run_trl(WORK, rows, root, root / name, STEPS, **settings))

        model = AutoModelForCausalLM.from_pretrained(
            root / "model", dtype=torch.bfloat16, attn_implementation=attention
        ).to("cuda")
        config_of_model = model.config
        weights = sum(p.numel() for p in model.parameters())
        sizes = {size: _plain(model, rows, rollouts, size) for size in MICRO_BATCHES}
        micro_batch = min(sizes, key=lambda size: sizes[size])
        plain_s = [_plain(model, rows, rollouts, micro_batch) for _ in range(ROUNDS * STEPS)]
        del model
        torch.cuda.empty_cache()
        sides: dict[str, list[tuple[Steps, float]]] = {
            key: [] for key in ("trainer", "trainer of TRL", "step", "step of TRL")
        }
        for number in range(ROUNDS):
            sides["trainer"].append(ours(f"a{number}", rollouts))
            sides["trainer of TRL"].append(trl(f"b{number}", rollouts, micro_batch))
            sides["step"].append(ours(f"c{number}", None))
            sides["step of TRL"].append(trl(f"d{number}", None, micro_batch))
        for runs in sides.values():
            for done, _ in runs:
                assert done.response_tokens == [WORK.response_tokens] * STEPS
    flops = model_flops(config_of_model, weights, WORK)
    peak = next((value for name, value in PEAK_FLOPS.items() if name in card), None)
    seconds = {key: median_of([done for done, _ in runs], "wall_s") for key, runs in sides.items()}
    memory = {key: max(gib for _, gib in runs) for key, runs in sides.items()}
    seconds["plain"] = statistics.median(plain_s)

    def line(name: str, mine: str, other: str, **more: Any) -> dict[str, Any]:
        mfu = {
            f"mfu_{side}": round(flops / seconds[key] / peak, 3)
            for side, key in (("ours", mine), ("rival", other))
            if peak and key in ("trainer", "trainer of TRL", "plain")
        }
        return {
            "name": name,
            "ours": round(WORK.tokens / seconds[mine]),
            "rival": round(WORK.tokens / seconds[other]),
            "ratio": round(seconds[other] / seconds[mine], 2),
            "unit": "tokens per second, prompts counted once per sample",
            "attention": attention,
            "micro_batch_of_rival": micro_batch,
            "rounds": ROUNDS,
            **mfu,
            **more,
        }

    computed = _computed_share(rows, rollouts, attention)
    more = {"mfu_computed": round(computed * flops / seconds["trainer"] / peak, 3)} if peak else {}
    return [
        line("trainer alone, against plain forward and backward", "trainer", "plain", **more),
        line("trainer alone, against TRL", "trainer", "trainer of TRL"),
        line(
            "GRPO step, against TRL",
            "step",
            "step of TRL",
            ours_parts_s=parts_of([done for done, _ in sides["step"]]),
            rival_parts_s=parts_of([done for done, _ in sides["step of TRL"]]),
        ),
        {
            "name": "most GPU memory of a GRPO step",
            "ours": round(memory["step"], 2),
            "rival": round(memory["step of TRL"], 2),
            "ratio": round(memory["step of TRL"] / memory["step"], 2),
            "unit": "GiB (less is better; ratio = rival / ours)",
        },
    ]


def model_flops(config: Any, weights: int, work: Work) -> float:
    """Floating-point operations of forward and backward over a step's samples, each alone.

    The embedding's rows are looked up, not multiplied; it is tied, so the head's product stands for
    it, and counts at response tokens only.
    """
    embedding = config.vocab_size * config.hidden_size
    total = 0.0
    for prompt, lengths in zip(work.prompt_lengths, work.response_lengths, strict=True):
        for response in lengths:
            tokens = prompt + response
            width = config.num_attention_heads * config.head_dim
            total += 6 * (weights - embedding) * tokens + 6 * embedding * response
            total += 12 * config.num_hidden_layers * width * tokens * (tokens / 2)
    return total


def _computed_share(rows: Sequence[PromptRow], rollouts: FixedRollouts, attention: str) -> float:
    """Positions that we compute, over tokens with prompts counted once per sample."""
    samples = [
        Sample(row.prompt_ids, c.token_ids, (True,) * len(c.token_ids))
        for row in rows
        for c in rollouts.completions[row.prompt_ids]
    ]
    packs = pack_samples(samples, PACK_LENGTH, share_prompts=attention == "sdpa")
    return sum(map(len, packs)) / WORK.tokens


def _plain(
    model: Any, rows: Sequence[PromptRow], rollouts: FixedRollouts, micro_batch: int
) -> float:
    """Seconds of the plain forward and backward; infinite where it does not fit."""
    from tests.bench.trainer import plain_rows

    ids, labels = (t.to("cuda") for t in plain_rows(rows, rollouts))
    model.train()
    model.zero_grad()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    try:
        for first in range(0, len(ids), micro_batch):
            part = slice(first, first + micro_batch)
            model(input_ids=ids[part], labels=labels[part], use_cache=False).loss.backward()
    except torch.cuda.OutOfMemoryError:
        model.zero_grad()
        torch.cuda.empty_cache()
        return float("inf")
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _gpu_recipe(attention: str) -> RecipeConfig:
    from dataclasses import replace

    base = RecipeConfig(
        seed=0,
        model=ModelConfig(dtype="bfloat16", attn_implementation=attention),  # type: ignore[arg-type]
    )
    return replace(base, grpo=replace(base.grpo, resources=Resources(gpus=1)))


def _has_flash() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def _with_memory(call: Any) -> tuple[Steps, float]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    done = call()
    torch.cuda.synchronize()
    return done, torch.cuda.max_memory_allocated() / 2**30
