"""Averages over results; runs that the infrastructure ended are left out."""

from __future__ import annotations

from dataclasses import dataclass

from tau2.data_model.simulation import Results, TerminationReason


@dataclass
class AgentMetrics:
    avg_reward: float
    infra_error_count: int


def compute_metrics(results: Results) -> AgentMetrics:
    broken = TerminationReason.INFRASTRUCTURE_ERROR
    counted = [s for s in results.simulations if s.termination_reason != broken]
    rewards = [s.reward_info.reward for s in counted if s.reward_info is not None]
    return AgentMetrics(sum(rewards) / len(rewards), len(results.simulations) - len(counted))
