"""One GRPO step against its formula, written out a second time: plain forward passes, float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch

from refiner_core.contract.config import GrpoConfig, ModelConfig
from refiner_core.training.batches import permutation
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import Loaded
from refiner_core.training.rollouts.rollout import TrainSample
from refiner_core.training.updates import GrpoUpdate
from tests.support.tiny_training import VOCABULARY, recipe, tiny_model, tiny_tokenizer

SEED, STEP = 7, 3
GRPO = replace(
    recipe().grpo,
    learning_rate=0.0,
    temperature=0.7,
    beta=0.3,
    entropy_coefficient=0.01,
    truncated_importance_sampling_ratio_cap=1.5,
    pack_length=40,
)


def rollouts(groups: int = 4, size: int = 3) -> list[TrainSample]:
    rng = np.random.default_rng(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCABULARY, n).tolist())

    samples = []
    for group in range(groups):
        prompt = tokens(5 + group)
        for _ in range(size):
            response = tokens(int(rng.integers(1, 7)))
            logprobs = tuple((-3.5 + rng.normal(size=len(response))).tolist())
            samples.append(TrainSample(prompt, response, logprobs, float(rng.normal())))
    return samples


def distribution(model, sample: TrainSample, temperature: float) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1)


def expected(model, reference, samples: list[TrainSample], grpo: GrpoConfig):
    """Policy part, KL part and total of one optimiser step; the old policy is the current one."""
    tokens = sum(len(sample.response_ids) for sample in samples)
    constant = 3 * 4 * grpo.response_length / grpo.num_mini_batches
    policy = kl = entropy = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        length = len(sample.response_ids)
        weight = {"token": 1 / tokens, "sequence": 1 / (length * len(samples))}.get(
            grpo.loss_aggregation, 1 / constant
        )
        every, target = distribution(model, sample, grpo.temperature), (
            torch.arange(length), list(sample.response_ids)
        )  # fmt: skip
        logprob = every[target]
        with torch.no_grad():
            held = distribution(reference, sample, grpo.temperature)[target]
            sampler = torch.tensor(sample.sampler_logprobs, dtype=torch.float64)
            trust = (logprob - sampler).exp().clamp(max=1.5)
        ratio = (logprob - logprob.detach()).exp()
        d = (logprob - held).clamp(-40, 40)
        estimate = {
            "kl1": d, "kl2": d**2 / 2, "kl3": torch.expm1(-d) + d, "kl4": ratio * d
        }[grpo.kl_estimator]  # fmt: skip
        policy = policy + weight * (trust * -sample.advantage * ratio).sum()
        kl = kl + grpo.beta * weight * estimate.sum()
        entropy = entropy + weight * -(every.exp() * every).sum()
    return policy, kl, policy + kl - grpo.entropy_coefficient * entropy


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    ("aggregation", "estimator", "mini_batches"),
    [
        ("token", "kl3", 1),
        ("token", "kl1", 2),
        ("sequence", "kl2", 2),
        ("constant", "kl4", 2),
    ],
)
def test_a_step_is_its_formula(aggregation, estimator, mini_batches, share_prompts):
    grpo = replace(
        GRPO,
        loss_aggregation=aggregation,
        kl_estimator=estimator,
        num_mini_batches=mini_batches,
    )
    model, reference = tiny_model(0), tiny_model(1)
    loaded = Loaded(model, tiny_tokenizer(), share_prompts, balance=50.0)
    samples = rollouts()
    engine = PlainEngine(loaded, ModelConfig(), learning_rate=0.0)
    update = GrpoUpdate(engine, reference, grpo, SEED)
    metrics = update.run(samples, step=STEP, factor=1.0)

    groups = [list(group) for _, group in groupby(samples, key=lambda s: s.prompt_ids)]
    order = permutation(len(groups), SEED, "mini_batches", STEP, 0)
    sums = np.zeros(4)
    for part in range(mini_batches):
        chosen = [s for i in order[part::mini_batches] for s in groups[i]]
        parts = expected(model, reference, chosen, grpo)
        parts[2].backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        model.zero_grad()
        sums += [float(part.detach()) for part in (*parts, norm)]
    names = ("loss/policy_avg", "loss/kl_avg", "loss/total_avg", "grad_norm")
    found = [metrics[name] for name in names]
    assert found == pytest.approx((sums / mini_batches).tolist(), rel=1e-3, abs=1e-5)
    assert metrics["optimizer_steps"] == mini_batches
