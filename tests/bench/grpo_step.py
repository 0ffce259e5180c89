"""`python -m tests.bench grpo_step`: a GRPO step.

Ours is the public :func:`train_grpo` (transformers generation, defaults), the rival TRL's
`GRPOTrainer` (:mod:`tests.bench.trl_side`): same random model, prompts, lengths of samples, reward,
fp32, one thread. Two works: fixed lengths, and the lengths of real prompts and answers scaled down.

One JSON line each: CPU seconds per step (medians over all steps of all rounds, in ABAB order) of
both, their ratio by CPU and by wall time, and the wall seconds of generate, score and update. The
rival's micro-batch is the fastest of :data:`MICRO_BATCHES`, which is tried first.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.bench.__main__ import machine
from tests.bench.training_work import (
    ROUNDS,
    Work,
    both_sides,
    fixed_work,
    make_inputs,
    median_of,
    parts_of,
    real_mix,
)

MICRO_BATCHES = (8, 32)
GOALS = {"fixed lengths": 1.3, "real length mix": 2.0}


def main(arguments: list[str]) -> int:
    """Both works; 0 even where a goal is missed: the lines say so."""
    torch.set_num_threads(1)
    for work in (fixed_work("small"), real_mix("small")):
        print(json.dumps(compare(work)), flush=True)
    return 0


def compare(work: Work) -> dict[str, Any]:
    """ABAB rounds of both sides."""
    from tests.bench.trl_side import run_trl

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(work, root)
        tried = {
            size: run_trl(work, rows, root, root / f"try-{size}", 1, micro_batch=size)
            for size in MICRO_BATCHES
        }
        micro_batch = min(tried, key=lambda size: tried[size].cpu_s[0])
        done = both_sides(work, rows, root, micro_batch)
    ours, rival = done["ours"], done["rival"]
    mine, other = median_of(ours, "cpu_s"), median_of(rival, "cpu_s")
    ratio = other / mine
    return {
        "name": f"GRPO step, {work.name}",
        "ours": round(mine, 3),
        "rival": round(other, 3),
        "ratio": round(ratio, 2),
        "unit": "CPU seconds per step (less is better; ratio = rival / ours)",
        "ratio_wall": round(median_of(rival, "wall_s") / median_of(ours, "wall_s"), 2),
        "ours_parts_s": parts_of(ours),
        "rival_parts_s": parts_of(rival),
        "goal": GOALS[work.name],
        "met": ratio >= GOALS[work.name],
        "model": work.shape,
        "prompts": len(work.prompt_lengths),
        "samples": len(work.prompt_lengths) * work.samples,
        "prompt_tokens": sum(work.prompt_lengths),
        "response_tokens": work.response_tokens,
        "rival_micro_batch": micro_batch,
        "rounds": ROUNDS,
        "machine": machine(),
    }
