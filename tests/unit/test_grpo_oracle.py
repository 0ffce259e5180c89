"""The update of GRPO held against a second writing of it in float64, and against TRL's own code.

The oracle computes every combination of aggregation, KL estimator, importance sampling and old
policy on moved weights, so that ratios are not 1 and the clip decides some tokens.

With TRL (1.16) definitions coincide, and are compared, for the clipped objective, advantages
without scaling (``centered`` is ``scale_rewards="none"``), aggregation (``token`` is ``bnpo``, and
``dapo`` where the step is one batch; ``sequence`` is ``grpo``; ``constant`` is ``dr_grpo``), the
k3 estimator as ``kl3``, the entropy bonus under ``token``, and truncated importance sampling, which
multiplies the policy term and not the KL term. They do not coincide where

* TRL divides by std + 1e-4, ours by std + 1e-8 (its std has n - 1: ``sample_std``);
* TRL multiplies KL by the importance ratio unless ``use_bias_correction_kl=False``; ours never
  does, but for ``kl4``, which is a ratio by definition; TRL has k3 alone;
* TRL's ``dapo``, its default, divides by the tokens of the whole generation batch, ours by those of
  the optimiser step: the same with one mini-batch; TRL's ``grpo`` and ``bnpo`` are means of means
  over accumulation steps, ours are sums whose weights are fixed before: the same with one;
* TRL's entropy bonus is a mean over tokens whatever ``loss_type`` says; ours is aggregated as the
  policy term is;
* TRL keeps samples of groups without spread (their advantage is 0): they count in its
  denominators; ours leave before packing;
* TRL clamps no log-ratio; ours are clamped at 40.
"""

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from refiner_core.contract.config import GrpoConfig, ModelConfig
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import LoadedModel
from refiner_core.training.model.logprobs import token_scores
from refiner_core.training.rollouts.rollout import TrainSample, group_advantages
from refiner_core.training.updates import GrpoUpdate
from tests.support.tiny_training import (
    EOS,
    VOCABULARY,
    recipe,
    save_tiny_model,
    tiny_model,
    tiny_tokenizer,
)

GROUPS, SIZE = 3, 3
AGGREGATIONS = ("token", "sequence", "pack", "constant")
ESTIMATORS = ("kl1", "kl2", "kl3", "kl4")
GRPO = replace(
    recipe().grpo,
    num_unique_prompts_rollout=GROUPS,
    num_samples_per_prompt_rollout=SIZE,
    temperature=0.7,
    beta=0.3,
    clip_lower=0.1,
    clip_higher=0.15,
    pack_length=40,
    response_length=7,
    num_epochs=2,
)


class Noting(PlainEngine):
    """Keeps the weights and gradients of every optimiser step."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.models: list[Any] = []
        self.gradients: list[list[torch.Tensor]] = []

    def step(self, factor: float) -> float:
        self.gradients.append([p.grad.clone() for p in self.model.parameters()])
        self.models.append(copy.deepcopy(self.model))
        return super().step(factor)


def engine_over(
    model: Any, learning_rate: float, share_prompts: bool = True, flex_balance: float | None = None
) -> Noting:
    loaded = LoadedModel(model, tiny_tokenizer(), share_prompts, 50.0, flex_balance)
    return Noting(loaded, ModelConfig(), learning_rate=learning_rate)


@functools.cache
def rollouts() -> tuple[TrainSample, ...]:
    """Groups of samples whose sampler was near the policy; rewards 0, 1, 2, ... in each group."""
    torch.manual_seed(3)
    model, samples = tiny_model(0), []
    for group in range(GROUPS):
        prompt = tuple(torch.randint(3, VOCABULARY, (4 + group,)).tolist())
        for i in range(SIZE):
            response = tuple(torch.randint(3, VOCABULARY, (2 + (group + 2 * i) % 5,)).tolist())
            with torch.no_grad():
                exact = scores(model, [TrainSample(prompt, response, (), 0.0)], 0.7)[0][0]
            logprobs = (exact + 0.3 * torch.randn(len(response))).tolist()
            advantage = group_advantages([0.0, 1.0, 3.0], "centered").values[i]
            samples.append(TrainSample(prompt, response, tuple(logprobs), advantage))
    return tuple(samples)


def scores(
    model: Any, samples: Sequence[TrainSample], temperature: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities and entropies of each sample's response, one forward pass per sample."""
    logprobs, entropies = [], []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids])
        logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        every = torch.log_softmax(logits / temperature, -1)
        target = torch.tensor(sample.response_ids)
        logprobs.append(every.gather(-1, target[:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return logprobs, entropies


class Step(NamedTuple):
    """An optimiser step by the oracle; how many tokens the clip decides."""

    policy: torch.Tensor
    kl: torch.Tensor
    loss: torch.Tensor
    clipped: int


def oracle(
    model: Any,
    old: list[torch.Tensor],
    reference: list[torch.Tensor],
    grpo: GrpoConfig,
    chosen: range = range(GROUPS * SIZE),
) -> Step:
    """The loss of the step over these samples."""
    samples, clipped = rollouts(), 0
    logprobs, entropies = scores(model, samples, grpo.temperature)
    policy_sum = kl_sum = bonus_sum = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(samples[i].response_ids) for i in chosen)
    packs = packed(chosen, grpo.pack_length)
    assert len(packs) > 1 or len(chosen) < GROUPS * SIZE
    for i in chosen:
        sample = samples[i]
        weight = {
            "token": 1 / tokens,
            "sequence": 1 / (len(chosen) * len(sample.response_ids)),
            "pack": next(1 / (len(packs) * answers(pack)) for pack in packs if i in pack),
            "constant": 1 / (len(chosen) * grpo.response_length),
        }[grpo.loss_aggregation]
        sampled = torch.tensor(sample.sampler_logprobs, dtype=torch.float64)
        before = sampled if grpo.old_logprobs == "sampler" else old[i]
        ratio = (logprobs[i] - before).exp()
        bounded = ratio.clamp(1 - grpo.clip_lower, 1 + grpo.clip_higher)
        free, held = ratio * sample.advantage, bounded * sample.advantage
        clipped += int((held < free).sum())
        policy = -torch.minimum(free, held)
        cap = grpo.truncated_importance_sampling_ratio_cap
        if cap and grpo.old_logprobs == "recomputed":
            policy = policy * (old[i] - sampled).exp().clamp(max=cap)
        d = logprobs[i] - reference[i]
        kl = {"kl1": d, "kl2": d**2 / 2, "kl3": (-d).exp() - 1 + d, "kl4": ratio * d}
        policy_sum = policy_sum + weight * policy.sum()
        kl_sum = kl_sum + weight * grpo.beta * kl[grpo.kl_estimator].sum()
        bonus_sum = bonus_sum + weight * grpo.entropy_coefficient * entropies[i].sum()
    return Step(policy_sum, kl_sum, policy_sum + kl_sum - bonus_sum, clipped)


def packed(chosen: range, pack_length: int) -> list[list[int]]:
    """Samples in packs as the reference trainer fills them: in order, prompts included."""
    packs: list[list[int]] = [[]]
    for i in chosen:
        if sum(map(whole, packs[-1])) + whole(i) > pack_length:
            packs.append([])
        packs[-1].append(i)
    return packs


def whole(i: int) -> int:
    return len(rollouts()[i].prompt_ids) + len(rollouts()[i].response_ids)


def answers(pack: Sequence[int]) -> int:
    return sum(len(rollouts()[i].response_ids) for i in pack)


@pytest.mark.parametrize(
    ("aggregation", "estimator", "cap", "old_logprobs"),
    [
        *itertools.product(AGGREGATIONS, ESTIMATORS, (1.1,), ("recomputed",)),
        *itertools.product(AGGREGATIONS, ("kl3",), (0.0,), ("recomputed",)),
        *itertools.product(AGGREGATIONS, ("kl4",), (0.0,), ("sampler",)),
    ],
)
def test_both_steps_of_an_update_are_the_oracles(aggregation, estimator, cap, old_logprobs):
    grpo = replace(
        GRPO,
        loss_aggregation=aggregation,
        kl_estimator=estimator,
        truncated_importance_sampling_ratio_cap=cap,
        old_logprobs=old_logprobs,
        entropy_coefficient=0.02,
    )
    engine, held = engine_over(tiny_model(0), 0.01), tiny_model(1)
    metrics = GrpoUpdate(engine, partial(token_scores, held), grpo, 7).run(
        rollouts(), step=1, factor=1.0
    )
    with torch.no_grad():
        old = scores(engine.models[0].double(), rollouts(), grpo.temperature)[0]
        reference = scores(held.double(), rollouts(), grpo.temperature)[0]
    losses, clips = [], []
    for model, found in zip(engine.models, engine.gradients, strict=True):
        step = oracle(model.double(), old, reference, grpo)
        exact = torch.autograd.grad(step.loss, list(model.parameters()))
        for one, other in zip(found, exact, strict=True):
            assert (one - other).norm() < 1e-4 * exact_norm(exact)
        losses.append(float(step.loss.detach()))
        clips.append(step.clipped)
    assert metrics["loss/total_avg"] == pytest.approx(sum(losses) / 2, rel=1e-4, abs=1e-6)
    tokens = sum(len(sample.response_ids) for sample in rollouts())
    assert metrics["policy/clipfrac_avg"] == pytest.approx(sum(clips) / (2 * tokens))
    assert clips[1] > 0


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize(
    ("aggregation", "estimator"),
    [("token", "kl1"), ("sequence", "kl2"), ("pack", "kl3"), ("constant", "kl4")],
)
def test_each_mini_batch_is_the_oracles(aggregation, estimator, share_prompts):
    """One group in each, at a learning rate of 0."""
    grpo = replace(
        GRPO,
        num_epochs=1,
        num_mini_batches=GROUPS,
        loss_aggregation=aggregation,
        kl_estimator=estimator,
        truncated_importance_sampling_ratio_cap=1.1,
        entropy_coefficient=0.02,
    )
    engine, held = engine_over(tiny_model(0), 0.0, share_prompts), tiny_model(1)
    metrics = GrpoUpdate(engine, partial(token_scores, held), grpo, 7).run(
        rollouts(), step=3, factor=1.0
    )
    model = tiny_model(0).double()
    with torch.no_grad():
        old = scores(model, rollouts(), grpo.temperature)[0]
        reference = scores(held.double(), rollouts(), grpo.temperature)[0]
    sums = np.zeros(4)
    for first in range(0, GROUPS * SIZE, SIZE):
        step = oracle(model, old, reference, grpo, range(first, first + SIZE))
        exact = torch.autograd.grad(step.loss, list(model.parameters()), retain_graph=True)
        parts = (step.policy, step.kl, step.loss, exact_norm(exact))
        sums += [float(part.detach()) for part in parts]
    names = ("loss/policy_avg", "loss/kl_avg", "loss/total_avg", "grad_norm")
    found = [metrics[name] for name in names]
    assert found == pytest.approx((sums / GROUPS).tolist(), rel=1e-3, abs=1e-5)
    assert metrics["optimizer_steps"] == GROUPS


def test_an_update_is_the_same_whether_prompts_are_shared_or_not():
    """The way is chosen per optimiser step from its lengths, and logged."""
    updates = {}
    grpo = replace(GRPO, num_epochs=1, num_mini_batches=GROUPS)
    # a group is small for a block of FlexAttention, unless attention costs nothing
    for balance, shared in ((1e9, 1.0), (50.0, 0.0)):
        engine = engine_over(tiny_model(0), 0.0, flex_balance=balance)
        reference = partial(token_scores, tiny_model(1))
        metrics = GrpoUpdate(engine, reference, grpo, 7).run(rollouts(), step=3, factor=1.0)
        assert metrics.pop("shared_prompts") == shared
        del metrics["packed_ratio"]
        updates[shared] = metrics, engine.gradients
    assert updates[1.0][0] == pytest.approx(updates[0.0][0], rel=1e-4, abs=1e-6)
    for one, other in zip(updates[1.0][1], updates[0.0][1], strict=True):
        assert exact_norm([a - b for a, b in zip(one, other, strict=True)]) < 1e-4 * exact_norm(one)


def exact_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def test_a_token_that_was_appended_has_no_ratio_to_a_sampler(monkeypatch):
    """What stands in for a sampled end is trained on as if the policy had said it itself."""
    grpo = replace(GRPO, old_logprobs="sampler", beta=0.0, num_epochs=1)
    sample = TrainSample((5, 6, 7), (8, EOS), (-1.0, float("nan")), 1.0)
    engine = engine_over(tiny_model(0), 0.0)
    metrics = GrpoUpdate(engine, None, grpo, 7).run([sample], step=1, factor=1.0)
    (logprobs,), _ = scores(tiny_model(0), [sample], grpo.temperature)
    ratio = float((logprobs[0] + 1.0).exp())
    assert metrics["val/ratio"] == pytest.approx((ratio + 1.0) / 2, rel=1e-4)
    assert all(math.isfinite(value) for value in metrics.values())


# ---------------------------------------------------------------- TRL


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    """Makes TRL's trainer over the same model, completions and rewards; it never trains."""
    trl = pytest.importorskip("trl", reason="TRL, the other implementation, is not installed")
    from datasets import Dataset

    class Fixed(trl.GRPOTrainer):  # type: ignore[name-defined]
        def _generate_single_turn(self, *args: Any, **options: Any) -> Any:
            return [list(sample.response_ids) for sample in rollouts()], None

    folder = save_tiny_model(tmp_path_factory.mktemp("model"))

    def make(**changes: Any) -> Any:
        prompts = [" ".join(f"w{i}" for i in s.prompt_ids) for s in rollouts()[::SIZE]]
        settings: dict[str, Any] = {
            "loss_type": "bnpo",
            "beta": 0.3,
            "use_bias_correction_kl": False,
            "scale_rewards": "none",
            "temperature": 0.7,
            "epsilon": 0.1,
            "epsilon_high": 0.15,
        }
        root: Path = tmp_path_factory.mktemp("trl")
        trainer = Fixed(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [0.0, 1.0, 3.0] * GROUPS,
            args=trl.GRPOConfig(
                output_dir=str(root),
                use_cpu=True,
                bf16=False,
                activation_checkpointing=False,
                per_device_train_batch_size=GROUPS * SIZE,
                num_generations=SIZE,
                max_completion_length=7,
                report_to=[],
                **(settings | changes),
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tiny_tokenizer(),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        batch = trainer._generate_and_score_completions(
            [{"prompt": prompt} for prompt in prompts for _ in range(SIZE)]
        )
        # The tiny tokenizer reads "w21" as the unknown word "w2" and a rest: ids are given instead.
        longest = max(len(sample.prompt_ids) for sample in rollouts())
        gaps = [longest - len(sample.prompt_ids) for sample in rollouts()]
        batch["prompt_ids"] = torch.tensor(
            [[0] * gap + list(s.prompt_ids) for gap, s in zip(gaps, rollouts(), strict=True)]
        )
        batch["prompt_mask"] = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        return trainer, batch

    return make


def padded(values: Sequence[Sequence[float]], like: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(like.shape)
    for row, line in zip(out, values, strict=True):
        row[: len(line)] = torch.tensor(line)
    return out


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token is bnpo": ({}, {}),
    "token is dapo": ({}, {"loss_type": "dapo"}),
    "sequence is grpo": ({"loss_aggregation": "sequence"}, {"loss_type": "grpo"}),
    "constant is dr_grpo": ({"loss_aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "without KL": ({"beta": 0.0}, {"beta": 0.0}),
    "entropy": ({"entropy_coefficient": 0.05}, {"entropy_coef": 0.05}),
}


@pytest.mark.parametrize("case", [*CASES, "importance sampling"])
def test_loss_and_gradients_are_trls(trl_trainer, case):
    """Against the sampler's log-probabilities, so that ratios are not 1 and some are clipped."""
    ours, theirs = CASES.get(case, ({}, {}))
    grpo = replace(GRPO, num_epochs=1, **{"old_logprobs": "sampler", **ours})
    trainer, batch = trl_trainer(**theirs)
    held = tiny_model(1)
    sampler = padded([s.sampler_logprobs for s in rollouts()], batch["completion_mask"])
    batch["old_per_token_logps"] = sampler
    with torch.no_grad():
        reference = scores(held, rollouts(), 0.7)[0]
        policy = scores(tiny_model(0), rollouts(), 0.7)[0]
    batch["ref_per_token_logps"] = padded([v.tolist() for v in reference], sampler)
    if case == "importance sampling":
        grpo = replace(grpo, old_logprobs="recomputed", truncated_importance_sampling_ratio_cap=1.1)
        batch.pop("old_per_token_logps")
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        exact = padded([v.tolist() for v in policy], sampler)
        batch["importance_sampling_ratio"] = (exact - sampler).exp().clamp(max=1.1)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()

    engine = engine_over(tiny_model(0), 0.0)
    scorer = partial(token_scores, held) if grpo.beta else None
    metrics = GrpoUpdate(engine, scorer, grpo, 7).run(rollouts(), step=1, factor=1.0)
    assert metrics["loss/total_avg"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    exact_gradients = [p.grad for p in trainer.model.parameters()]
    for one, other in zip(engine.gradients[0], exact_gradients, strict=True):
        assert (one - other).norm() < 2e-4 * exact_norm(exact_gradients)
    if case != "importance sampling":
        assert metrics["policy/clipfrac_avg"] > 0
