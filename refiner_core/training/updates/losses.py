"""Formulas of the GRPO loss, per token, and how tokens become one number.

In: tensors over T tokens (log-probabilities, advantages). Out: tensors over T tokens, and weights
whose weighted sum over *all* packs of an optimiser step is the aggregated loss. Because the weights
are fixed before the first pack, the result does not depend on how samples fell into packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token", "sequence", "constant"]
KlEstimator = Literal["kl1", "kl2", "kl3", "kl4"]
KL_NAMES: tuple[KlEstimator, ...] = ("kl1", "kl2", "kl3", "kl4")

#: Log-ratios beyond this are cut: exp(40) is as good as infinite, and exp(89) overflows float32.
MAX_LOG_RATIO = 40.0


def kl_estimates(
    logprob_T: torch.Tensor, reference_T: torch.Tensor, ratio_T: torch.Tensor
) -> dict[KlEstimator, torch.Tensor]:
    """Per-token estimates of KL(policy || reference), d = clamp(logprob - reference, +-40).

    kl1 = d; kl2 = d^2 / 2; kl3 = expm1(-d) + d (Schulman, "Approximating KL divergence", 2020);
    kl4 = ratio * d, with the policy's importance ratio.
    """
    d = (logprob_T - reference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {"kl1": d, "kl2": d.square() / 2, "kl3": torch.expm1(-d) + d, "kl4": ratio_T * d}


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token parts of the clipped objective: loss, ratio, and whether the clip decided."""

    loss_T: torch.Tensor
    ratio_T: torch.Tensor
    clipped_T: torch.Tensor


def policy_terms(
    logprob_T: torch.Tensor,
    old_T: torch.Tensor,
    advantage_T: torch.Tensor,
    *,
    clip_lower: float,
    clip_higher: float,
) -> PolicyTerms:
    """max(-A r, -A clamp(r, 1 - lower, 1 + higher)), r = exp(logprob - old).

    Schulman et al. 2017 (PPO), eq. 7, with the asymmetric clip of DAPO (Yu et al. 2025).
    """
    log_ratio = (logprob_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantage_T * ratio
    clipped = -advantage_T * ratio.clamp(1.0 - clip_lower, 1.0 + clip_higher)
    return PolicyTerms(torch.maximum(plain, clipped), ratio, (clipped > plain).detach())


def importance_weights(old_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(old - sampler), cap): how much likelier the trainer holds a token than its sampler.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). A ``cap`` of 0 turns it off (all ones). Carries no gradient.
    """
    if cap <= 0:
        return torch.ones_like(old_T)
    log_ratio = (old_T - sampler_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)


def token_weights(
    loss_tokens: Sequence[int], aggregation: Aggregation, *, constant: float = 0.0
) -> list[float]:
    """Weight of each loss token of each sample of one optimiser step.

    ``token``: mean over all tokens of the step; ``sequence``: mean per sample, then over samples
    that have loss tokens; ``constant``: sum over a fixed denominator (``constant``).
    """
    if aggregation == "token":
        total = sum(loss_tokens)
        return [1.0 / total if total else 0.0] * len(loss_tokens)
    if aggregation == "sequence":
        samples = sum(1 for n in loss_tokens if n)
        return [1.0 / (n * samples) if n else 0.0 for n in loss_tokens]
    if constant <= 0:
        raise ValueError("constant aggregation needs a positive denominator")
    return [1.0 / constant] * len(loss_tokens)
