"""Rollouts of one step: rewards to advantages, training samples, and stored rows.

In: completions and their rewards. Out: a :class:`RolloutBatch`, its training samples, metrics, and
rows for Parquet. A sample that the judge could not score is left out; it does not count as zero.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from refiner_core.contract.types import Completion, PromptRow, RewardResult
from refiner_core.rewards.course import course_of_quality

Normalization = Literal["standard", "centered", "sample_std"]
DropReason = Literal["zero_std", "too_few_scored"]

EPSILON = 1e-8
#: Rewards that differ by no more than this (relative to their size) are equal: dividing rounding
#: noise by its own deviation would give it full-size advantages.
EQUAL_REWARDS = 1e-9


@dataclass(frozen=True)
class GroupAdvantages:
    """``values`` has one entry per sample; ``dropped`` is the reason for leaving the group out."""

    values: tuple[float | None, ...]
    dropped: DropReason | None = None


def group_advantages(
    rewards: Sequence[float | None], normalization: Normalization = "standard"
) -> GroupAdvantages:
    """Advantages of one group.

    ``standard``: (r - mean) / (population std + 1e-8), the GRPO paper's (Shao et al. 2024, eq. 2);
    ``centered``: r - mean (Liu et al. 2025, "Dr. GRPO"); ``sample_std``: with the n - 1 deviation.
    """
    scored = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if len(scored) < 2:
        return GroupAdvantages((None,) * len(rewards), "too_few_scored")
    if equal_rewards(scored):
        return GroupAdvantages(tuple(None if r is None else 0.0 for r in rewards), "zero_std")
    left = iter(normalized(scored, normalization).tolist())
    return GroupAdvantages(tuple(None if reward is None else next(left) for reward in rewards))


def equal_rewards(rewards_N: np.ndarray) -> bool:
    """True if the rewards have no spread."""
    return bool(np.ptp(rewards_N) <= EQUAL_REWARDS * max(1.0, float(np.abs(rewards_N).max())))


def normalized(rewards_N: np.ndarray, normalization: Normalization) -> np.ndarray:
    """(N,) rewards minus their mean, divided by their deviation."""
    centred: np.ndarray = rewards_N - rewards_N.mean()
    if normalization == "standard":
        centred = centred / (rewards_N.std() + EPSILON)
    elif normalization == "sample_std":
        centred = centred / (rewards_N.std(ddof=1) + EPSILON)
    return centred


#: Components that count items of an answer. Watch claims: rewards can rise while answers say less.
COUNT_COMPONENTS = ("claims", "uncited")


@dataclass(frozen=True)
class RolloutSample:
    """One completion: its prompt, its number among the samples, and its text.

    ``closing_ids`` is the end-of-text token if the sampler stopped at a stop string, without it.
    """

    prompt_index: int
    sample_index: int
    prompt: PromptRow
    completion: Completion
    text: str
    closing_ids: tuple[int, ...] = ()

    @property
    def stopped(self) -> bool:
        """True if it ended by itself, not at the length limit."""
        return self.completion.finish_reason == "stop"


def own_tokens(completion: Completion) -> tuple[bool, ...]:
    """Mask of the tokens sampled by the model."""
    return (True,) * len(completion.token_ids) if completion.own is None else completion.own


@dataclass(frozen=True)
class TrainSample:
    """A rollout that carries loss: tokens, the sampler's log-probabilities, the advantage.

    A log-probability is NaN if the token was not sampled but appended (``closing_ids``).
    For an episode, ``loss_mask`` is True on the model's own tokens only (None: everywhere), and
    ``group`` numbers its group, since groups of one domain share a prompt.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantage: float
    loss_mask: tuple[bool, ...] | None = None
    group: int | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """A step's rollouts in order of (prompt, sample); ``groups`` has one entry per prompt."""

    samples: tuple[RolloutSample, ...]
    results: tuple[RewardResult, ...]
    groups: tuple[GroupAdvantages, ...]

    @property
    def advantages(self) -> list[float | None]:
        """One per sample; 0 in a group without spread, None for a sample that is left out."""
        return [value for group in self.groups for value in group.values]

    def train_samples(self, *, mask_truncated: bool) -> list[TrainSample]:
        """Samples that carry loss: kept groups, scored samples, truncated ones only if not masked.

        Masking comes after the group statistics, so a truncated sample still counts in its group's
        mean and deviation.
        """
        kept = []
        for _, sample, advantage in self.trained(mask_truncated=mask_truncated):
            completion, closing = sample.completion, sample.closing_ids
            if completion.token_ids:
                kept.append(
                    TrainSample(
                        sample.prompt.prompt_ids,
                        completion.token_ids + closing,
                        completion.logprobs + (math.nan,) * len(closing),
                        advantage,
                    )
                )
        return kept

    def trained(self, *, mask_truncated: bool) -> Iterator[tuple[int, RolloutSample, float]]:
        """Place, sample and advantage of each training sample."""
        size = len(self.samples) // len(self.groups)
        for i, (sample, advantage) in enumerate(zip(self.samples, self.advantages, strict=True)):
            if self.groups[i // size].dropped or advantage is None:
                continue
            if sample.stopped or not mask_truncated:
                yield i, sample, advantage


def form_groups(
    samples: Sequence[RolloutSample],
    results: Sequence[RewardResult],
    *,
    size: int,
    normalization: Normalization,
) -> RolloutBatch:
    """Advantages within each prompt's ``size`` samples."""
    totals = [result.total for result in results]
    groups = [
        group_advantages(totals[i : i + size], normalization) for i in range(0, len(totals), size)
    ]
    return RolloutBatch(tuple(samples), tuple(results), tuple(groups))


def rollout_rows(step: int, batch: RolloutBatch) -> list[dict[str, Any]]:
    """One row per rollout, with everything needed to recompute its reward."""
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
    """Rewards, lengths and counts of a step. Means are over scored samples."""
    quality = course_of_quality(
        [sample.prompt.prompt_text for sample in batch.samples],
        [sample.text for sample in batch.samples],
        [result.judgements for result in batch.results],
    )
    return {**batch_metrics(batch), **_component_means(batch.results), **quality}


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Metrics of a step without the components of rewards."""
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
    scored = (result for result in results if result.total is not None)
    found = means(pair for result in scored for pair in result.components.items())
    return {metric_name(name): mean for name, mean in found.items()}


def means(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean of each name's values, in order of name."""
    values: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        values[name].append(float(value))
    return {name: _mean(values[name]) for name in sorted(values)}


def metric_name(component: str) -> str:
    """``objective/<component>_reward``, the reference trainer's name; counts go under ``val/``."""
    if component in COUNT_COMPONENTS:
        return f"val/{component}_per_answer"
    return f"objective/{component.removesuffix('_reward')}_reward"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
