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
counted) over seconds x the peak of the card (:data:`flows.durations.GPUS`). Sharing prompts saves
work that this still counts, so ours also says its MFU over the positions that it computes
(``mfu_computed``).
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flows.certify.work import SHAPES
from flows.durations import GPUS, known_gpu
from infra.store.provenance import host
from refiner_core.contract.config import ModelConfig, RecipeConfig
from refiner_core.contract.sections.steering import Resources
from refiner_core.contract.types import PromptRow
from refiner_core.training.batches import Sample, pack_samples
from tests.bench.trainer import plain_seconds
from tests.bench.training_work import (
    ROUNDS,
    FixedRollouts,
    Work,
    both_sides,
    fixed_rollouts,
    make_inputs,
    median_of,
    parts_of,
)

PACK_LENGTH = 8192
GPU_SHAPES = {name: shape for name, shape in SHAPES.items() if name != "tiny"}
#: A step: 4 prompts of 1,536 tokens, 8 responses of 512 to each.
WORK = Work("8,192-token packs", "", (1536,) * 4, ((512,) * 8,) * 4)


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
    from transformers.utils import is_flash_attn_2_available

    attention = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(WORK, root, **GPU_SHAPES[shape])
        rollouts = fixed_rollouts(WORK, rows)
        model = AutoModelForCausalLM.from_pretrained(
            root / "model", dtype=torch.bfloat16, attn_implementation=attention
        ).to("cuda")
        config_of_model = model.config
        weights = sum(p.numel() for p in model.parameters())
        plain_s, micro_batch = plain_seconds(model, rows, rollouts, time.perf_counter)
        del model
        base = RecipeConfig(
            seed=0, model=ModelConfig(dtype="bfloat16", attn_implementation=attention)
        )
        settings: dict[str, Any] = {"base": base, "pack_length": PACK_LENGTH}
        settings["resources"] = Resources(gpus=1)
        alone = both_sides(WORK, rows, root, micro_batch, given=rollouts, **settings)
        whole = both_sides(WORK, rows, root, micro_batch, **settings)
    sides = {
        "trainer": alone["ours"],
        "trainer of TRL": alone["rival"],
        "step": whole["ours"],
        "step of TRL": whole["rival"],
    }
    flops = model_flops(config_of_model, weights, WORK)
    known = known_gpu(card)
    peak = GPUS[known].flops if known else None
    seconds = {key: median_of(runs, "wall_s") for key, runs in sides.items()}
    memory = {key: max(steps.gib for steps in runs) for key, runs in sides.items()}
    seconds["plain"] = plain_s

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
            ours_parts_s=parts_of(sides["step"]),
            rival_parts_s=parts_of(sides["step of TRL"]),
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
