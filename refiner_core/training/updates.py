"""Rollouts with advantages to new weights.

In order of reading: ``losses`` (the formulas, per token), ``step_batches`` (the batches of one
optimiser step on this rank), ``grpo_update`` (one step of GRPO).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import torch

from refiner_core.contract.config import GrpoConfig
from refiner_core.training.batches import (
    Batch,
    Sample,
    packs_of_ranks,
    permutation,
    sharing_pays,
)
from refiner_core.training.engines.protocol import Engine, Score
from refiner_core.training.rollouts.rollout import TrainSample
from refiner_core.training.steps.health import HealthMonitor

Aggregation = Literal["token", "sequence", "pack", "constant"]
KlEstimator = Literal["kl1", "kl2", "kl3", "kl4"]
KL_NAMES: tuple[KlEstimator, ...] = ("kl1", "kl2", "kl3", "kl4")

#: Log-ratios are clamped here: exp(40) is practically infinite, and exp(89) overflows float32.
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


def policy_terms(
    logprob_T: torch.Tensor,
    old_T: torch.Tensor,
    advantage_T: torch.Tensor,
    *,
    clip_lower: float,
    clip_higher: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """max(-A r, -A clamp(r, 1 - lower, 1 + higher)) with r = exp(logprob - old); also r, and
    whether the clip decided.

    Schulman et al. 2017 (PPO), eq. 7, with the asymmetric clip of DAPO (Yu et al. 2025).
    """
    log_ratio = (logprob_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantage_T * ratio
    clipped = -advantage_T * ratio.clamp(1.0 - clip_lower, 1.0 + clip_higher)
    return torch.maximum(plain, clipped), ratio, (clipped > plain).detach()


def importance_weights(old_T: torch.Tensor, sampler_T: torch.Tensor, cap: float) -> torch.Tensor:
    """min(exp(old - sampler), cap): the trainer's probability of a token over the sampler's.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training"). A ``cap`` of 0 turns it off (all ones). Carries no gradient.
    """
    if cap <= 0:
        return torch.ones_like(old_T)
    log_ratio = (old_T - sampler_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=cap)


def token_weights(
    loss_tokens: Sequence[int],
    aggregation: Aggregation,
    *,
    constant: float = 0.0,
    packs: Sequence[int] = (),
) -> list[float]:
    """Weight of each loss token of each sample of one optimiser step.

    ``token``: mean over all tokens of the step; ``sequence``: mean per sample, then over samples
    that have loss tokens; ``pack``: mean per pack, then over packs that have loss tokens (``packs``
    has the number of each sample's pack); ``constant``: sum over a fixed denominator.
    """
    if aggregation == "token":
        total = sum(loss_tokens)
        return [1.0 / total if total else 0.0] * len(loss_tokens)
    if aggregation == "sequence":
        samples = sum(1 for n in loss_tokens if n)
        return [1.0 / (n * samples) if n else 0.0 for n in loss_tokens]
    if aggregation == "pack":
        totals = Counter[int]()
        for pack, n in zip(packs, loss_tokens, strict=True):
            totals[pack] += n
        filled = sum(1 for total in totals.values() if total)
        return [1.0 / (totals[pack] * filled) if totals[pack] else 0.0 for pack in packs]
    if constant <= 0:
        raise ValueError("constant aggregation needs a positive denominator")
    return [1.0 / constant] * len(loss_tokens)


def packs_in_order(lengths: Sequence[int], pack_length: int) -> list[int]:
    """The number of each sample's pack, if samples fill packs in order and are never split.

    These are the packs of the reference trainer, with the prompt in every sample. The packs that
    run may differ (shared prompts, several ranks) without effect on the loss.
    """
    numbers: list[int] = []
    pack, used = 0, 0
    for length in lengths:
        if used and used + length > pack_length:
            pack, used = pack + 1, 0
        used += length
        numbers.append(pack)
    return numbers


class _StepBatches:
    """This rank's batches of ``per_pass`` packs; ``packs`` counts all ranks'. ``shares``: samples
    share their prompt, always or by the estimate of :func:`sharing_pays`."""

    def __init__(
        self, engine: Engine, samples: Sequence[Sample], pack_length: int, per_pass: int
    ) -> None:
        self.engine = engine
        self.shares = engine.share_prompts and (
            engine.flex_balance is None or sharing_pays(samples, pack_length, engine.flex_balance)
        )
        every = packs_of_ranks(
            *(samples, engine.ranks.world),
            pack_length=pack_length,
            share_prompts=self.shares,
            balance=engine.balance,
            multiple_of=per_pass,
        )
        self.packs = sum(1 for packs in every for pack in packs if pack.source_T)
        self._mine, self._per_pass = every[engine.ranks.rank], per_pass

    def __iter__(self) -> Iterator[Batch]:
        return self.engine.batches(
            self._mine, self._per_pass, flex=self.engine.flex_balance is not None
        )

    def merged(self, flat_F: torch.Tensor) -> torch.Tensor:
        """Flat values that each rank has for its own targets, merged on all ranks."""
        at = torch.cat([batch.flat_T for batch in self]).cpu().numpy()
        parts = self.engine.ranks.gather((at, flat_F.cpu().numpy()[at]))
        whole = None
        if parts is not None:
            whole = np.zeros(len(flat_F), dtype=np.float32)
            for places, values in parts:
                whole[places] = values
        return torch.from_numpy(self.engine.ranks.broadcast(whole)).to(flat_F.device)


@dataclass(frozen=True)
class _Buffers:
    """Flat (F,) values of a step. ``old_F`` is None if the policy has not moved since."""

    advantage_F: torch.Tensor
    sampler_F: torch.Tensor
    old_F: torch.Tensor | None = None
    reference_F: torch.Tensor | None = None


class GrpoUpdate:
    """Turns the rollouts of a step into optimiser steps.

    ``reference`` scores by the frozen initial model, None if ``beta`` is 0. ``health`` is consulted
    before each optimiser step; ``moved`` counts the optimiser steps of the last :meth:`run`.
    ``longest``: the most tokens that a rollout can sample, used by the constant denominator;
    ``response_length`` if None.
    """

    def __init__(
        self,
        engine: Engine,
        reference: Score | None,
        grpo: GrpoConfig,
        seed: int,
        longest: int | None = None,
    ) -> None:
        self.engine, self.reference = engine, reference
        self.grpo, self.seed = grpo, seed
        self.longest = longest or grpo.response_length
        first = engine.ranks.rank == 0
        self.health = HealthMonitor(grpo.health, "grpo", says=first)
        self.moved = 0

    def run(
        self, train_samples: Sequence[TrainSample], *, step: int, factor: float
    ) -> dict[str, float]:
        """All mini-batches and epochs over one batch of rollouts.

        ``factor`` scales the peak learning rate. Returns metrics averaged over loss tokens
        (estimators, ratios) or over optimiser steps (losses).

        Raises
        ------
        NotFiniteError
            A loss or gradient norm is not finite.
        HealthStop
            Another health check with policy `stop` fired.
        """
        grpo = self.grpo
        self.moved = 0
        samples, tokens = _placed(train_samples)
        whole = self._batches(samples)
        buffers = self._buffers(train_samples, whole, tokens)
        found: list[dict[str, float]] = []
        for epoch in range(grpo.num_epochs):
            if grpo.num_mini_batches == 1:
                found.append(self._optimizer_step(samples, whole, buffers, factor))
                continue
            for chosen in self._mini_batches(train_samples, samples, step, epoch):
                batches = self._batches(chosen)
                found.append(self._optimizer_step(chosen, batches, buffers, factor))
        return self._metrics([one for one in found if one], len(train_samples))

    def _buffers(
        self, train_samples: Sequence[TrainSample], whole: _StepBatches, tokens: int
    ) -> _Buffers:
        lengths = [len(sample.response_ids) for sample in train_samples]
        advantages = np.repeat([sample.advantage for sample in train_samples], lengths)
        sampler = np.concatenate([np.array(s.sampler_logprobs) for s in train_samples])
        device = self.engine.device
        sampler_F = torch.tensor(sampler, dtype=torch.float32, device=device)
        moves = self.grpo.num_mini_batches * self.grpo.num_epochs > 1
        old_F, reference_F = None, None
        if self.grpo.old_logprobs == "sampler":
            old_F = sampler_F
        elif moves:  # with a single optimiser step the policy equals the old one: ratio exactly 1
            old_F = self._score(self.engine.score, whole, tokens)
        if self.reference is not None:
            reference_F = self._score(self.reference, whole, tokens)
        if self.engine.ranks.world > 1 and moves:  # packs move between ranks: all need all values
            if self.grpo.old_logprobs == "recomputed" and old_F is not None:
                old_F = whole.merged(old_F)
            if reference_F is not None:
                reference_F = whole.merged(reference_F)
        return _Buffers(
            advantage_F=torch.tensor(advantages, dtype=torch.float32, device=device),
            sampler_F=sampler_F,
            old_F=old_F,
            reference_F=reference_F,
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _score(self, score: Score, batches: _StepBatches, tokens: int) -> torch.Tensor:
        """(F,) log-probabilities by ``score``; 0 for tokens of other ranks."""
        flat_F = torch.zeros(tokens, device=self.engine.device)
        for batch in batches:
            scores = score(batch, temperature=self.grpo.temperature)
            flat_F[batch.flat_T] = scores.logprob_T
        return flat_F

    def _batches(self, samples: Sequence[Sample]) -> _StepBatches:
        grpo = self.grpo
        return _StepBatches(
            self.engine, samples, grpo.pack_length, grpo.per_device_train_batch_size
        )

    def _mini_batches(
        self, train_samples: Sequence[TrainSample], samples: Sequence[Sample], step: int, epoch: int
    ) -> Iterator[list[Sample]]:
        """Whole groups, shuffled; never an empty mini-batch."""
        parts = self.grpo.num_mini_batches
        pairs = zip(train_samples, samples, strict=True)
        groups = [
            [sample for _, sample in group]
            for _, group in groupby(pairs, key=lambda pair: (pair[0].group, pair[0].prompt_ids))
        ]
        order = permutation(len(groups), self.seed, "mini_batches", step, epoch)
        for part in range(parts):
            chosen = [sample for i in order[part::parts] for sample in groups[i]]
            if chosen:
                yield chosen

    def _optimizer_step(
        self, samples: Sequence[Sample], batches: _StepBatches, buffers: _Buffers, factor: float
    ) -> dict[str, float]:
        """One optimiser step, unless a health check skips it: sums over its tokens, gradient norm
        and packs; nothing if these are not finite."""
        weight_F = self._weights(samples, buffers)
        sums: dict[str, torch.Tensor] = {}
        for batch in batches:
            self._backward(batch, buffers, weight_F, sums)
        mine = torch.stack(list(sums.values())).tolist()
        found = dict(zip(sums, self.engine.ranks.add(mine), strict=True))
        loss, tokens = found["loss/total_avg"], found["tokens"]
        entropy = found["policy/entropy_avg"] / tokens if tokens else None
        kl = found["objective/kl3_avg"] / tokens if "objective/kl3_avg" in found else None
        norm = self.engine.gradient_norm()
        if self.health.before_update(loss=loss, grad_norm=norm, entropy=entropy, kl=kl):
            self.engine.drop()
        else:
            self.engine.step(factor)
            self.moved += 1
        finite = math.isfinite(loss) and math.isfinite(norm)
        counts = {"packs": batches.packs, "shared_prompts": float(batches.shares)}
        return {**found, "grad_norm": norm, **counts} if finite else {}

    def _metrics(self, steps: Sequence[dict[str, float]], samples: int) -> dict[str, float]:
        """Means over the tokens or the number of optimiser steps."""
        sums = {name: sum(found[name] for found in steps) for name in (steps[0] if steps else ())}
        tokens, packs = sums.pop("tokens", 0.0), sums.pop("packs", 0.0)
        out: dict[str, float] = {}
        for name, value in sums.items():
            count = len(steps) if name.startswith(("loss/", "grad_norm", "shared")) else tokens
            if count:
                out[name] = value / count
        return {**out, "optimizer_steps": self.moved, "packed_ratio": packs / samples}

    def _weights(self, samples: Sequence[Sample], buffers: _Buffers) -> torch.Tensor:
        grpo = self.grpo
        rollouts = grpo.num_unique_prompts_rollout * grpo.num_samples_per_prompt_rollout
        weights = token_weights(
            [sum(sample.loss_mask) for sample in samples],
            grpo.loss_aggregation,
            constant=rollouts * self.longest / grpo.num_mini_batches,
            packs=packs_in_order([sample.length for sample in samples], grpo.pack_length),
        )
        weight_F = torch.zeros_like(buffers.advantage_F)
        for sample, weight in zip(samples, weights, strict=True):
            weight_F[sample.start : sample.start + len(sample.response_ids)] = weight
        return weight_F

    def _backward(
        self, batch: Batch, buffers: _Buffers, weight_F: torch.Tensor, sums: dict[str, torch.Tensor]
    ) -> None:
        """Gradients of one batch's share of the loss; adds its parts to ``sums``, in double
        precision, on the tensors' device."""

        def add(name: str, values: torch.Tensor) -> None:
            value = values.detach().double().sum()
            sums[name] = sums[name] + value if name in sums else value

        grpo, at = self.grpo, batch.flat_T
        mode: Literal["loss", "metric"] = "loss" if grpo.entropy_coefficient else "metric"
        scores = self.engine.score(batch, temperature=grpo.temperature, entropy=mode)
        logprob_T = scores.logprob_T
        old_T = logprob_T.detach() if buffers.old_F is None else buffers.old_F[at]
        sampler_T = buffers.sampler_F[at]
        if grpo.old_logprobs == "sampler":
            # Appended tokens were not sampled, so there is no sampler log-probability to compare.
            old_T = sampler_T = torch.where(old_T.isnan(), logprob_T.detach(), old_T)
            importance_T = torch.ones_like(old_T)
            gap_T = (logprob_T.detach() - sampler_T).abs()
        else:
            sampler_T = torch.where(sampler_T.isnan(), old_T, sampler_T)
            cap = grpo.truncated_importance_sampling_ratio_cap
            importance_T = importance_weights(old_T, sampler_T, cap)
            gap_T = (old_T - sampler_T).abs()
        loss_T, ratio_T, clipped_T = policy_terms(
            logprob_T,
            old_T,
            buffers.advantage_F[at],
            clip_lower=grpo.clip_lower,
            clip_higher=grpo.clip_higher,
        )
        weight_T = weight_F[at]
        policy = (weight_T * importance_T * loss_T).sum()
        entropy = (weight_T * scores.entropy_T).sum()
        total = policy - grpo.entropy_coefficient * entropy
        add("loss/policy_avg", policy)
        if buffers.reference_F is not None:
            estimates = kl_estimates(logprob_T, buffers.reference_F[at], ratio_T)
            kl = grpo.beta * (weight_T * estimates[grpo.kl_estimator]).sum()
            total = total + kl
            add("loss/kl_avg", kl)
            for name in KL_NAMES:
                add(f"objective/{name}_avg", estimates[name])
        self.engine.backward(total)
        add("tokens", torch.ones_like(logprob_T))
        add("policy/entropy_avg", scores.entropy_T)
        add("policy/clipfrac_avg", clipped_T)
        add("val/ratio", ratio_T)
        add("val/importance_weight", importance_T)
        add("val/sampler_logprob_gap", gap_T)
        add("loss/total_avg", total)


def _placed(train_samples: Sequence[TrainSample]) -> tuple[list[Sample], int]:
    """Samples with their offsets in the flat buffers, and the buffers' length."""
    samples, start = [], 0
    for sample in train_samples:
        tokens, mask = sample.response_ids, sample.loss_mask
        mask = (True,) * len(tokens) if mask is None else mask
        samples.append(Sample(sample.prompt_ids, tokens, mask, start))
        start += len(tokens)
    return samples, start
