"""`python -m tests.bench trainer`: the trainer alone, rollouts given.

Ours is :func:`train_grpo` with a generator that costs nothing (``beta`` 0): packing, forward,
backward, clipping, AdamW, metrics, stored rollouts. Against it, on the same tokens:

* the plain forward and backward: `model(input_ids, labels=…).loss.backward()` on rows without any
  padding, in the fastest of several micro-batches, with no optimiser and no bookkeeping;
* TRL's step with the same completions given to it.

Two works: prompts that samples share (ours computes them once per group, the others once per
sample; that is the point of sharing), and responses so long that sharing gains little, which shows
what our bookkeeping costs. Goal: at least 85 % of plain. CPU seconds, medians, ABAB order.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from refiner_core.contract.types import PromptRow
from tests.bench.__main__ import machine
from tests.bench.training_work import (
    FixedRollouts,
    Work,
    fixed_rollouts,
    fixed_work,
    long_responses,
    make_inputs,
    run_ours,
)

MICRO_BATCHES = (1, 4, 8, 32)
ROUNDS, STEPS = 3, 3
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
    from tests.bench.trl_side import run_trl

    ours_s: list[float] = []
    plain_s: list[float] = []
    trl_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = make_inputs(work, root)
        model = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        rollouts = fixed_rollouts(work, rows)
        ids, labels = plain_rows(rows, rollouts)
        assert ids.numel() == work.tokens
        tried = {size: plain(model, ids, labels, size) for size in MICRO_BATCHES}
        micro_batch = min(tried, key=lambda size: tried[size])
        for number in range(ROUNDS):
            ours = run_ours(work, root, root / f"ours-{number}", STEPS, generator=rollouts)
            plain_s += [plain(model, ids, labels, micro_batch) for _ in range(STEPS)]
            trl = run_trl(
                *(work, rows, root, root / f"trl-{number}", STEPS), micro_batch=8, fixed=rollouts
            )
            assert ours.response_tokens == trl.response_tokens == [work.response_tokens] * STEPS
            ours_s += ours.cpu_s
            trl_s += trl.cpu_s
    mine = work.tokens / statistics.median(ours_s)
    lines = []
    for rival, seconds in (("plain forward and backward", plain_s), ("TRL", trl_s)):
        other = work.tokens / statistics.median(seconds)
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


def plain_rows(
    rows: Sequence[PromptRow], rollouts: FixedRollouts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of all samples, [samples, length]; they are equally long."""
    ids, labels = [], []
    for row in rows:
        for completion in rollouts.completions[row.prompt_ids]:
            ids.append(row.prompt_ids + completion.token_ids)
            labels.append((-100,) * len(row.prompt_ids) + completion.token_ids)
    return torch.tensor(ids), torch.tensor(labels)


def plain(model: Any, ids: torch.Tensor, labels: torch.Tensor, micro_batch: int) -> float:
    """CPU seconds of the plain forward and backward."""
    model.train()
    model.zero_grad()
    begun = time.process_time()
    for first in range(0, len(ids), micro_batch):
        part = slice(first, first + micro_batch)
        model(input_ids=ids[part], labels=labels[part], use_cache=False).loss.backward()
    return time.process_time() - begun
