"""`python -m tests.bench trainer`: the trainer alone, rollouts given.

Ours is :func:`train_grpo` with a generator that costs nothing (``beta`` 0): packing, forward,
backward, clipping, AdamW, metrics, stored rollouts. Against it, on the same tokens:

* the plain forward and backward: `model(input_ids, labels=…).loss.backward()` on rows without any
  padding, in the fastest of several micro-batches, with no optimiser and no bookkeeping;
* TRL's step with the same completions given to it.

Two works: prompts that samples share (ours computes them once per group, the others once per
sample; that is the point of sharing), and responses so long that sharing gains little, which shows
what our bookkeeping costs. Goal: at least 85 % of plain. CPU seconds, medians.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from refiner_core.contract.types import PromptRow
from tests.bench.__main__ import machine
from tests.bench.training_work import (
    ROUNDS,
    STEPS,
    FixedRollouts,
    Work,
    both_sides,
    fixed_rollouts,
    fixed_work,
    long_responses,
    make_inputs,
    median_of,
)

MICRO_BATCHES = (1, 2, 4, 8, 32)
GOAL_OF_PLAIN = 0.85


def main(arguments: list[str]) -> int:
    """All works against both rivals; 0 even where a goal is missed: the lines say so."""
    torch.set_num_threads(1)
    for work in (fixed_work("small"), long_responses("small")):
        for line in compare(work):
            print(json.dumps(line), flush=True)
    return 0


def compare(work: Work) -> list[dict[str, Any]]:
    """One line per rival."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(work, root)
        rollouts = fixed_rollouts(work, rows)
        done = both_sides(work, rows, root, 8, given=rollouts)
        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        plain_s, _ = plain_seconds(model, rows, rollouts, time.process_time)
    seconds = {"plain forward and backward": plain_s, "TRL": median_of(done["rival"], "cpu_s")}
    mine = work.tokens / median_of(done["ours"], "cpu_s")
    lines = []
    for rival, taken in seconds.items():
        other = work.tokens / taken
        line: dict[str, Any] = {
            "name": f"trainer alone, {work.name}, against {rival}",
            "ours": round(mine),
            "rival": round(other),
            "ratio": round(mine / other, 2),
            "unit": "tokens per CPU-second, prompts counted once per sample",
        }
        if rival != "TRL":
            line |= {"goal": GOAL_OF_PLAIN, "met": mine / other >= GOAL_OF_PLAIN}
        lines.append(line | {"tokens": work.tokens, "rounds": ROUNDS, "machine": machine()})
    return lines


def plain_seconds(
    model: Any, rows: Sequence[PromptRow], rollouts: FixedRollouts, clock: Callable[[], float]
) -> tuple[float, int]:
    """Seconds of the plain forward and backward over equally long samples, in the fastest of
    several micro-batches; and that one."""
    ids, labels = [], []
    for row in rows:
        for completion in rollouts.completions[row.prompt_ids]:
            ids.append(row.prompt_ids + completion.token_ids)
            labels.append((-100,) * len(row.prompt_ids) + completion.token_ids)
    tensors = torch.tensor(ids).to(model.device), torch.tensor(labels).to(model.device)
    model.train()

    def once(micro_batch: int) -> float:
        model.zero_grad()
        settle()
        begun = clock()
        try:
            for first in range(0, len(ids), micro_batch):
                part, wanted = (t[first : first + micro_batch] for t in tensors)
                model(input_ids=part, labels=wanted, use_cache=False).loss.backward()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            return float("inf")
        settle()
        return clock() - begun

    tried = {size: once(size) for size in MICRO_BATCHES}
    fastest = min(tried, key=lambda size: tried[size])
    return statistics.median(once(fastest) for _ in range(ROUNDS * STEPS)), fastest


def settle() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
