"""Advantages of a group: rewards of samples of one prompt, relative to each other.

In: the rewards of one group, None where the judge failed. Out: one advantage per sample, None where
the sample takes no part, and why a whole group was dropped.

An unscored sample is not a zero: it leaves the mean and the deviation, and the loss. A group with
fewer than two scored samples has no comparison in it, and a group whose rewards are all equal has
no direction; both are dropped before packing and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Normalization = Literal["standard", "centered", "sample_std"]
DropReason = Literal["zero_std", "too_few_scored"]

EPSILON = 1e-8
#: Rewards that differ by no more than this (relative to their size) are equal: dividing rounding
#: noise by its own deviation would make full-size advantages of nothing.
EQUAL_REWARDS = 1e-9


@dataclass(frozen=True)
class GroupAdvantages:
    """``values`` has one entry per sample; ``dropped`` says why the group is not trained on."""

    values: tuple[float | None, ...]
    dropped: DropReason | None = None


def group_advantages(
    rewards: Sequence[float | None], normalization: Normalization = "standard"
) -> GroupAdvantages:
    """Advantages of one group.

    ``standard``: (r - mean) / (population std + 1e-8), the GRPO paper's (Shao et al. 2024, eq. 2);
    ``centered``: r - mean (Liu et al. 2025, "Dr. GRPO"); ``sample_std``: with the n - 1 deviation.
    """
    scored = np.array([r for r in rewards if r is not None], dtype=np.float64)
    if len(scored) < 2:
        return GroupAdvantages((None,) * len(rewards), "too_few_scored")
    if equal_rewards(scored):
        return GroupAdvantages(tuple(None if r is None else 0.0 for r in rewards), "zero_std")
    values = iter(normalized(scored, normalization).tolist())
    return GroupAdvantages(tuple(None if r is None else float(next(values)) for r in rewards))


def equal_rewards(rewards_N: np.ndarray) -> bool:
    """Whether there is no direction in them."""
    return bool(np.ptp(rewards_N) <= EQUAL_REWARDS * max(1.0, float(np.abs(rewards_N).max())))


def normalized(rewards_N: np.ndarray, normalization: Normalization) -> np.ndarray:
    """(N,) rewards without their mean, by their deviation."""
    centred: np.ndarray = rewards_N - rewards_N.mean()
    if normalization == "standard":
        centred = centred / (rewards_N.std() + EPSILON)
    elif normalization == "sample_std":
        centred = centred / (rewards_N.std(ddof=1) + EPSILON)
    return centred
