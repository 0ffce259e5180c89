"""The update of one GRPO step: rollouts with advantages to new weights.

In: :class:`TrainSample` values of one step. Out: changed weights, and metrics.

The step's tokens live in flat buffers (F = all response tokens, sample after sample); every pack
says where its targets stand in them. So advantages, weights, and old and reference
log-probabilities are looked up, however the samples fell into packs, and the loss is one weighted
sum over all packs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from refiner_core.contract.config import GrpoConfig
from refiner_core.training.boundary import require_finite
from refiner_core.training.engines.protocol import Engine, Scorer
from refiner_core.training.losses import (
    KL_NAMES,
    importance_weights,
    kl_estimates,
    policy_terms,
    token_weights,
)
from refiner_core.training.order import permutation
from refiner_core.training.packing import Batch, Sample, collate, pack_samples, to_device
from refiner_core.training.rollout import TrainSample


@dataclass(frozen=True)
class _Buffers:
    """Flat (F,) values of a step. ``old_F`` is None where the policy has not moved since."""

    samples: tuple[Sample, ...]
    advantage_F: torch.Tensor
    sampler_F: torch.Tensor
    old_F: torch.Tensor | None = None
    reference_F: torch.Tensor | None = None


class GrpoUpdate:
    """Turns the rollouts of a step into optimiser steps.

    ``reference`` is the frozen initial model, or None where ``beta`` is 0.
    """

    def __init__(
        self, engine: Engine, reference: Scorer | None, grpo: GrpoConfig, seed: int
    ) -> None:
        self.engine, self.reference = engine, reference
        self.grpo, self.seed = grpo, seed

    def run(
        self, train_samples: Sequence[TrainSample], *, step: int, factor: float
    ) -> dict[str, float]:
        """All mini-batches and epochs over one batch of rollouts.

        ``factor`` scales the peak learning rate. Returns metrics averaged over loss tokens
        (estimators, ratios) or over optimiser steps (losses).

        Raises
        ------
        StageFailed
            If a loss or gradient norm is not finite.
        """
        grpo = self.grpo
        buffers = self._buffers(train_samples)
        totals = _Totals()
        for epoch in range(grpo.num_epochs):
            for samples in self._mini_batches(buffers.samples, step, epoch):
                self._optimizer_step(samples, buffers, step, factor, totals)
        return totals.metrics(len(train_samples))

    def _buffers(self, train_samples: Sequence[TrainSample]) -> _Buffers:
        samples, start = [], 0
        for sample in train_samples:
            tokens = sample.response_ids
            samples.append(Sample(sample.prompt_ids, tokens, (True,) * len(tokens), start))
            start += len(tokens)
        advantages = [s.advantage for s in train_samples for _ in s.response_ids]
        sampler = [value for s in train_samples for value in s.sampler_logprobs]
        device = self.engine.device
        moves = self.grpo.num_mini_batches * self.grpo.num_epochs > 1
        return _Buffers(
            samples=tuple(samples),
            advantage_F=torch.tensor(advantages, dtype=torch.float32, device=device),
            sampler_F=torch.tensor(sampler, dtype=torch.float32, device=device),
            # With a single optimiser step the policy is its own old policy: ratio exactly 1.
            old_F=self._score(self.engine, samples, start) if moves else None,
            reference_F=(
                None if self.reference is None else self._score(self.reference, samples, start)
            ),
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _score(
        self, scorer: Engine | Scorer, samples: Sequence[Sample], tokens: int
    ) -> torch.Tensor:
        """(F,) log-probabilities under ``scorer``."""
        flat_F = torch.zeros(tokens, device=self.engine.device)
        for batch in self._batches(samples):
            scores = scorer.score(batch, temperature=self.grpo.temperature)
            flat_F[batch.flat_T] = scores.logprob_T
        return flat_F

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        packs = pack_samples(
            *(samples, self.grpo.pack_length),
            share_prompts=self.engine.share_prompts,
            balance=self.engine.balance,
        )
        size = self.grpo.per_device_train_batch_size
        for i in range(0, len(packs), size):
            batch = collate(
                packs[i : i + size], pad_id=self.engine.pad_id, balance=self.engine.balance
            )
            yield to_device(batch, self.engine.device)

    def _mini_batches(
        self, samples: Sequence[Sample], step: int, epoch: int
    ) -> Iterator[list[Sample]]:
        """Whole groups, shuffled where there is more than one mini-batch; never an empty one."""
        parts = self.grpo.num_mini_batches
        if parts == 1:
            yield list(samples)
            return
        groups = [list(group) for _, group in groupby(samples, key=lambda s: s.prompt_ids)]
        order = permutation(len(groups), self.seed, "mini_batches", step, epoch)
        for part in range(parts):
            chosen = [sample for i in order[part::parts] for sample in groups[i]]
            if chosen:
                yield chosen

    def _optimizer_step(
        self,
        samples: Sequence[Sample],
        buffers: _Buffers,
        step: int,
        factor: float,
        totals: _Totals,
    ) -> None:
        weight_F = self._weights(samples, buffers)
        losses: dict[str, float] = defaultdict(float)
        for batch in self._batches(samples):
            totals.packs += batch.packs
            for name, value in self._backward(batch, buffers, weight_F, totals).items():
                losses[name] += value
        require_finite("grpo", step, loss=losses["total"])
        norm = self.engine.step(factor)
        require_finite("grpo", step, gradient_norm=norm)
        totals.add_update(losses, norm)

    def _weights(self, samples: Sequence[Sample], buffers: _Buffers) -> torch.Tensor:
        grpo = self.grpo
        rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
        weights = token_weights(
            [len(sample.response_ids) for sample in samples],
            grpo.loss_aggregation,
            constant=rollouts * grpo.response_length / grpo.num_mini_batches,
        )
        weight_F = torch.zeros_like(buffers.advantage_F)
        for sample, weight in zip(samples, weights, strict=True):
            weight_F[sample.start : sample.start + len(sample.response_ids)] = weight
        return weight_F

    def _backward(
        self, batch: Batch, buffers: _Buffers, weight_F: torch.Tensor, totals: _Totals
    ) -> dict[str, float]:
        """Gradients of one batch's share of the loss; returns its parts."""
        grpo, at = self.grpo, batch.flat_T
        mode: Literal["loss", "metric"] = "loss" if grpo.entropy_coefficient else "metric"
        scores = self.engine.score(batch, temperature=grpo.temperature, entropy=mode)
        logprob_T = scores.logprob_T
        old_T = logprob_T.detach() if buffers.old_F is None else buffers.old_F[at]
        terms = policy_terms(
            logprob_T,
            old_T,
            buffers.advantage_F[at],
            clip_lower=grpo.clip_lower,
            clip_higher=grpo.clip_higher,
        )
        cap = grpo.truncated_importance_sampling_ratio_cap
        sampler_T = buffers.sampler_F[at]
        # What was appended instead of sampled has nothing to be corrected for.
        sampler_T = torch.where(sampler_T.isnan(), old_T, sampler_T)
        importance_T = importance_weights(old_T, sampler_T, cap)
        weight_T = weight_F[at]
        policy = (weight_T * importance_T * terms.loss_T).sum()
        entropy = (weight_T * scores.entropy_T).sum()
        total = policy - grpo.entropy_coefficient * entropy
        parts = {"policy": float(policy.detach())}
        if buffers.reference_F is not None:
            estimates = kl_estimates(logprob_T, buffers.reference_F[at], terms.ratio_T)
            kl = grpo.beta * (weight_T * estimates[grpo.kl_estimator]).sum()
            total = total + kl
            parts["kl"] = float(kl.detach())
            for name in KL_NAMES:
                totals.add_tokens(f"objective/{name}_avg", estimates[name])
        self.engine.backward(total)
        totals.tokens += len(at)
        totals.add_tokens("policy/entropy_avg", scores.entropy_T)
        totals.add_tokens("policy/clipfrac_avg", terms.clipped_T)
        totals.add_tokens("val/ratio", terms.ratio_T)
        totals.add_tokens("val/importance_weight", importance_T)
        totals.add_tokens("val/sampler_logprob_gap", (old_T - sampler_T).abs())
        return {**parts, "total": float(total.detach())}


class _Totals:
    """Running sums over the tokens and optimiser steps of one step."""

    def __init__(self) -> None:
        self.packs = self.tokens = self.updates = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._updates: dict[str, float] = defaultdict(float)

    def add_tokens(self, name: str, values_T: torch.Tensor) -> None:
        self._sums[name] += float(values_T.detach().double().sum())

    def add_update(self, losses: dict[str, float], norm: float) -> None:
        self.updates += 1
        for name, value in losses.items():
            self._updates[f"loss/{name}_avg"] += value
        self._updates["grad_norm"] += norm

    def metrics(self, samples: int) -> dict[str, float]:
        out = {name: value / self.updates for name, value in self._updates.items()}
        out.update((name, value / self.tokens) for name, value in self._sums.items())
        out["optimizer_steps"] = self.updates
        out["packed_ratio"] = self.packs / samples if samples else 0.0
        return out
