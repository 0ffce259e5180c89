"""Rewards: from rollouts to numbers, or to no number where the judge failed.

In: rollouts, the reward configuration, a judge. Out: one
:class:`~refiner_core.contract.types.RewardResult` per rollout, in order.
"""

from refiner_core.rewards.compute import RewardInput, compute_rewards

__all__ = ["RewardInput", "compute_rewards"]
