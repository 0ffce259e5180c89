"""Rewards: from rollouts to numbers, or to no number if the judge failed.

In: rollouts, the reward configuration, a judge. Out: one
:class:`~refiner_core.contract.types.RewardResult` per rollout, in order.
"""

from refiner_core.rewards.compute import RewardInput, RewardStream, compute_rewards, require_scored

__all__ = ["RewardInput", "RewardStream", "compute_rewards", "require_scored"]
