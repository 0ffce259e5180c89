"""What a batch of rollouts says of itself: rows that are stored, and numbers of the step.

In: a :class:`~refiner_core.training.rollouts.rollout.RolloutBatch`. Out: JSON-ready rows, one
for each sample, and metrics.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.types import (
    RewardResult,
)
from refiner_core.training.rollouts.rollout import COUNT_COMPONENTS, RolloutBatch


def rollout_rows(step: int, batch: RolloutBatch) -> list[dict[str, Any]]:
    """One row per rollout, with all that a reward can be recomputed from."""
    rows: list[dict[str, Any]] = []
    columns = sorted({name for result in batch.results for name in result.components})
    for sample, result, advantage in zip(
        batch.samples, batch.results, batch.advantages, strict=True
    ):
        rows.append(
            {
                "step": step,
                "prompt_index": sample.prompt_index,
                "sample_index": sample.sample_index,
                "sample_id": sample.prompt.sample_id,
                "response_ids": list(sample.completion.token_ids),
                "response_text": sample.text,
                "finish_reason": sample.completion.finish_reason,
                "logprobs": list(sample.completion.logprobs),
                "status": result.status,
                "reward": result.total,
                "advantage": advantage,
                **{f"reward/{name}": result.components.get(name) for name in columns},
                "judgements": json.dumps(
                    [dict(judgement) for judgement in result.judgements], ensure_ascii=False
                ),
            }
        )
    return rows


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards, lengths and counts of a step. Means are over what was scored."""
    return {**batch_metrics(batch), **_component_means(batch.results)}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """The same without the parts of rewards."""
    dropped = [group.dropped for group in batch.groups]
    lengths = [len(sample.completion.token_ids) for sample in batch.samples]
    metrics: dict[str, float] = {
        "val/sequence_lengths": _mean(lengths),
        "val/stop_rate": _mean([float(sample.stopped) for sample in batch.samples]),
        "groups/kept": dropped.count(None),
        "groups/dropped_zero_std": dropped.count("zero_std"),
        "groups/dropped_too_few_scored": dropped.count("too_few_scored"),
        "samples/unscored": sum(1 for r in batch.results if r.status == "unscored"),
        "samples/malformed": sum(1 for r in batch.results if r.status == "malformed"),
    }
    scores = [result.total for result in batch.results if result.total is not None]
    if scores:
        metrics["scores"] = _mean(scores)
    return metrics


def _component_means(results: Sequence[RewardResult]) -> dict[str, float]:
    values: Mapping[str, list[float]] = defaultdict(list)
    for result in results:
        if result.total is not None:
            for name, value in result.components.items():
                values[name].append(float(value))
    return {metric_name(name): _mean(values[name]) for name in sorted(values)}


def metric_name(component: str) -> str:
    """``objective/<component>_reward``, the name of the reference; counts go under ``val/``."""
    if component in COUNT_COMPONENTS:
        return f"val/{component}_per_answer"
    return f"objective/{component.removesuffix('_reward')}_reward"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
