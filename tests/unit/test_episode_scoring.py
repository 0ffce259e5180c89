"""Scores of episodes, and their loss against numbers by hand."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from infra.jobs.failures import classify
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import GrpoConfig, ModelConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError, EnvironmentOutage
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.sections.environment import (
    EnvironmentConfig,
    ShapingConfig,
    check_weights,
)
from refiner_core.contract.sections.training import CurriculumConfig
from refiner_core.contract.types import Completion, PromptRow, RewardResult
from refiner_core.environments.protocol import Check, EpisodeRecord, TurnRecord
from refiner_core.environments.scoring import (
    Curriculum,
    partial_score,
    require_episodes,
    shaped_reward,
)
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.model.loading import LoadedModel
from refiner_core.training.model.logprobs import token_scores
from refiner_core.training.rollouts.multi_turn import form_episode_groups
from refiner_core.training.rollouts.rollout import RolloutSample, TrainSample
from refiner_core.training.updates import GrpoUpdate
from tests.support.tiny_training import VOCABULARY, recipe, tiny_model, tiny_tokenizer

TAU2 = ShapingConfig(
    alpha=0.25,
    alpha_by_domain=("retail=0.8", "airline=1", "telecom=1.6"),
    weights_by_domain=("telecom.action=0.35", "telecom.communicate=0.35", "telecom.environment=.3"),
)


def checks(**kinds: tuple[int, int]) -> tuple[Check, ...]:
    """``kind=(passed, all)``."""
    return tuple(
        Check(kind, f"{kind}-{i}", i < passed)
        for kind, (passed, total) in kinds.items()
        for i in range(total)
    )


def record(**changes: Any) -> EpisodeRecord:
    """A finished episode of two turns: actions 2/4 and what had to be said."""
    made = checks(action=(2, 4), communicate=(1, 1))
    values: dict[str, Any] = {
        "task_id": "r-1",
        "domain": "retail",
        "seed": 1,
        "status": "finished",
        "ended": "done",
        "first_messages": (("user", "hello"),),
        "turns": (
            TurnRecord("a", "ok", 3, 5, {"name": "look", "arguments": {}}, repaired="what"),
            TurnRecord("b", "ok", 8, 9, {"name": "no", "arguments": {}}, tool_error="wrong_tool"),
        ),
        "reward": 0.0,
        "partial": 0.5,
        "checks": tuple(vars(check) for check in made),
        "components": {"db": 0.0, "communicate": 1.0},
        "failure": "incomplete",
    }
    return EpisodeRecord(**(values | changes))


# ---------------------------------------------------------------- partial credit


@pytest.mark.parametrize(
    ("domain", "kinds", "expected"),
    [
        ("retail", {"action": (2, 4), "communicate": (1, 1)}, 0.4 / 0.65),
        ("retail", {"action": (2, 4)}, 0.5),
        ("retail", {"action": (4, 4), "communicate": (0, 2), "environment": (1, 1)}, 0.85),
        ("telecom", {"action": (2, 4), "communicate": (1, 1)}, 0.525 / 0.7),
        ("telecom", {"action": (0, 1), "communicate": (0, 1), "environment": (1, 1)}, 0.3),
        ("retail", {"nl_assertion": (1, 2)}, None),
        ("retail", {}, None),
    ],
)
def test_partial_is_the_weighted_share_of_the_present_kinds(domain, kinds, expected):
    found = partial_score(checks(**kinds), check_weights(TAU2, domain))
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grpo.curriculum.min_attempts", 0),
        ("grpo.curriculum.low", 0.8),
        ("environment.shaping.alpha", -0.1),
        ("environment.shaping.alpha_by_domain", ("a=1", "a=2")),
        ("environment.shaping.weights", ("action=-1",)),
        ("environment.shaping.weights_by_domain", ("t=1",)),
    ],
)
def test_invalid_settings_are_refused_with_their_field(field: str, value: Any) -> None:
    agent = {"environment.name": "desk", "environment.demonstrations": 10}
    with pytest.raises(ConfigurationError, match=field):
        check_config(replace_fields(RecipeConfig(), agent | {field: value}))


# ---------------------------------------------------------------- the reward


def test_the_total_is_reward_plus_alpha_times_partial() -> None:
    found = shaped_reward(record(), EnvironmentConfig(shaping=TAU2))
    assert found.status == "scored"
    assert found.total == pytest.approx(0.2 * 0.4 / 0.65)
    assert found.components == pytest.approx(
        {
            "reward": 0.0,
            "partial": 0.4 / 0.65,
            "alpha": 0.2,
            "success": 0.0,
            "turns": 2.0,
            "repairs": 1.0,
            "tool_errors": 1.0,
            "environment_db": 0.0,
            "environment_communicate": 1.0,
        }
    )
    solved = record(
        reward=1.0, failure=None, checks=tuple(map(vars, checks(action=(4, 4)))), domain="telecom"
    )
    assert shaped_reward(solved, EnvironmentConfig(shaping=TAU2)).total == pytest.approx(1.4)


def test_an_episode_that_ends_without_a_call_is_worth_nothing() -> None:
    """Otherwise a policy would be paid for calls that it cannot finish."""
    broken = record(ended="no_call", failure="no_call", reward=1.0)
    found = shaped_reward(broken, EnvironmentConfig(shaping=TAU2))
    assert (found.status, found.total) == ("malformed", 0.0)
    assert found.components["partial"] == pytest.approx(0.4 / 0.65)


def test_excluded_episodes_are_no_errors() -> None:
    excluded = shaped_reward(
        record(ended="no_call", failure="no_call"), EnvironmentConfig(unparsable="exclude")
    )
    failed = shaped_reward(
        record(status="error", ended="error", reward=None, error_kind="user_down", error="gone"),
        EnvironmentConfig(),
    )
    assert (excluded.status, excluded.total) == ("unscored", None)
    assert (failed.status, failed.total) == ("unscored", None)
    require_episodes([("user_down", "gone")], 10, 0.1, of="episodes of a step")
    with pytest.raises(EnvironmentOutage) as met:
        require_episodes([("user_down", "gone")] * 2, 4, 0.4, of="episodes of a step")
    assert "2 of 4 episodes of a step: user_down (2 times); for one: gone" in str(met.value)
    assert "environment.max_error_share" in str(met.value)
    outcome = classify(met.value)
    assert (outcome.failure, outcome.decision, outcome.exit_code) == (
        *("environment_outage", "resume"),
        7,
    )


# ---------------------------------------------------------------- curriculum


def test_tasks_that_teach_little_weigh_less_after_enough_attempts() -> None:
    curriculum = Curriculum(CurriculumConfig(enabled=True))
    for task, attempts, successes in (
        ("few", 4, 4),
        ("easy", 5, 4),
        ("hard", 5, 1),
        ("between", 5, 3),
        ("at the upper edge", 8, 6),
        ("at the lower edge", 8, 2),
    ):
        curriculum.count(task, attempts, successes)
    assert [curriculum.weight(task) for task in ("new", "few", "easy", "hard", "between")] == [
        *(1.0, 1.0, 0.1, 0.5, 1.0)
    ]
    assert curriculum.weight("at the upper edge") == curriculum.weight("at the lower edge") == 1.0


# ---------------------------------------------------------------- credit


NAN = math.nan


def episode(*progress: float) -> EpisodeRecord:
    """An episode whose turn t has tokens 3t + 1 and 3t + 2, after one foreign token."""
    turns = tuple(
        TurnRecord("x", "ok", 3 * i + 1, 3 * i + 3, progress=p) for i, p in enumerate(progress)
    )
    first = (("user", "go"),)
    return EpisodeRecord("t", "near", 1, "finished", "done", first, turns, first_progress=0.0)


def completion(turns: int) -> Completion:
    """``foreign own own`` for each turn."""
    own = (False, True, True) * turns
    logprobs = tuple(-1.0 if mine else NAN for mine in own)
    return Completion(tuple(range(5, 5 + 3 * turns)), logprobs, "stop", own, {})


# ---------------------------------------------------------------- batches


def batch(weight: float = 1.0) -> Any:
    """Two groups of one domain and one of another, of two episodes each."""
    grpo = replace(GrpoConfig(), num_samples_per_prompt_rollout=2)
    prompts = [
        PromptRow(name, "q", "{}", ids, "")
        for name, ids in (("near/a", (1, 2)), ("far/b", (3,)), ("near/c", (1, 2)))
    ]
    records = [episode(0.0, p) for p in (0.0, 1.0, 0.5, 0.0, 1.0, 0.0)]
    totals = [0.0, 1.4, 0.2, None, 1.4, 0.0]
    samples = [RolloutSample(i // 2, i % 2, prompts[i // 2], completion(2), "") for i in range(6)]
    results = [RewardResult("scored", total, {}) for total in totals]
    return form_episode_groups(samples, results, records, grpo, lambda _: weight)


def test_episodes_carry_loss_on_own_tokens_and_domains_stay_together() -> None:
    found = batch().train_samples(mask_truncated=False)
    assert [sample.prompt_ids for sample in found] == [(1, 2)] * 4  # the other group has one reward
    assert [sample.group for sample in found] == [0, 0, 2, 2]
    assert [sample.advantage for sample in found] == pytest.approx([-1, 1, 1, -1], abs=1e-6)
    assert all(sample.loss_mask == (False, True, True) * 2 for sample in found)


def test_a_curriculums_weight_comes_after_the_statistics_of_the_group() -> None:
    whole, part = (batch(w).train_samples(mask_truncated=False) for w in (1.0, 0.1))
    for a, b in zip(whole, part, strict=True):
        assert b.advantage == pytest.approx(0.1 * a.advantage)


def test_a_repaired_turn_has_no_sampler_probabilities() -> None:
    """It was decoded greedily: a ratio to log-probabilities at temperature 1 would be noise."""
    made = batch()
    turns = made.records[1].turns
    repaired = replace(
        made.records[1], turns=(replace(turns[0], repaired="what I said first"), turns[1])
    )
    records = (made.records[0], repaired, *made.records[2:])
    found = replace(made, records=records).train_samples(mask_truncated=False)[1]
    assert [math.isnan(p) for p in found.sampler_logprobs] == [True] * 4 + [False] * 2
    assert found.loss_mask == (False, True, True) * 2


def test_episodes_that_hit_a_limit_can_be_masked_and_those_without_own_tokens_always_are() -> None:
    made = batch()
    samples = list(made.samples)
    samples[0] = replace(
        samples[0], completion=replace(samples[0].completion, finish_reason="length")
    )
    samples[1] = replace(samples[1], completion=Completion((7,), (NAN,), "stop", (False,), {}))
    made = replace(made, samples=tuple(samples))
    assert [s.group for s in made.train_samples(mask_truncated=False)] == [0, 2, 2]
    assert [s.group for s in made.train_samples(mask_truncated=True)] == [2, 2]


# ---------------------------------------------------------------- the update

GRPO = replace(
    recipe().grpo,
    learning_rate=0.0,
    temperature=0.7,
    beta=0.3,
    entropy_coefficient=0.01,
    truncated_importance_sampling_ratio_cap=1.5,
    pack_length=60,
)


def episodes(groups: int = 3, size: int = 3, *, one_prompt: bool = False) -> list[TrainSample]:
    """Rollouts of which some tokens are foreign, with log-probabilities that are no numbers."""
    rng = np.random.default_rng(0)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, VOCABULARY, n).tolist())

    shared, samples = tokens(7), []
    for group in range(groups):
        prompt = shared if one_prompt else tokens(5 + group)
        for _ in range(size):
            response = tokens(int(rng.integers(4, 12)))
            mask = [bool(value) for value in rng.integers(0, 2, len(response))]
            mask[0], mask[-1] = False, True
            own = np.array(mask)
            samples.append(
                TrainSample(
                    prompt,
                    response,
                    tuple(np.where(own, -3.5 + rng.normal(size=len(own)), NAN).tolist()),
                    float(rng.normal()),
                    loss_mask=tuple(mask),
                    group=group,
                )
            )
    return samples


def distribution(model: Any, sample: TrainSample, temperature: float) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].double()
    return torch.log_softmax(logits / temperature, -1)


def expected(model: Any, reference: Any, samples: list[TrainSample], grpo: GrpoConfig) -> Any:
    """The loss of one optimiser step, over own tokens alone: each sample by itself, in float64."""
    counts = [sum(sample.loss_mask or ()) for sample in samples]
    total = torch.zeros((), dtype=torch.float64)
    for sample, own in zip(samples, counts, strict=True):
        weight = {
            "token": 1 / sum(counts),
            "sequence": 1 / (own * len(samples)),
            "constant": 1 / (3 * 4 * 50),
        }[grpo.loss_aggregation]
        at = [i for i, mine in enumerate(sample.loss_mask or ()) if mine]
        every = distribution(model, sample, grpo.temperature)[at]
        place = (torch.arange(own), [sample.response_ids[i] for i in at])
        logprob = every[place]
        with torch.no_grad():
            held = distribution(reference, sample, grpo.temperature)[at][place]
            sampler = torch.tensor([sample.sampler_logprobs[i] for i in at], dtype=torch.float64)
            trust = (logprob - sampler).exp().clamp(max=1.5)
        advantage = torch.tensor(sample.advantage).double()
        ratio = (logprob - logprob.detach()).exp()
        d = (logprob - held).clamp(-40, 40)
        kl = (torch.expm1(-d) + d).sum()
        entropy = -(every.exp() * every).sum()
        policy = (trust * -advantage * ratio).sum()
        total = total + weight * (policy + grpo.beta * kl - grpo.entropy_coefficient * entropy)
    return total


def updated(samples: list[TrainSample], grpo: GrpoConfig, *, share: bool = True) -> Any:
    """Metrics and gradients of a step."""
    model, reference = tiny_model(), tiny_model(seed=1)
    gradients: dict[str, torch.Tensor] = {}

    class Kept(PlainEngine):
        def step(self, factor: float) -> float:
            gradients.update(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
            return super().step(factor)

    loaded = LoadedModel(model, tiny_tokenizer(), share, balance=50.0)
    engine = Kept(loaded, ModelConfig(), learning_rate=grpo.learning_rate)
    metrics = GrpoUpdate(engine, partial(token_scores, reference), grpo, 7, longest=50).run(
        samples, step=1, factor=1.0
    )
    return metrics, gradients, model, reference


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_foreign_tokens_have_no_part_in_loss_and_gradients(aggregation):
    grpo = replace(GRPO, loss_aggregation=aggregation)
    samples = episodes()
    metrics, gradients, model, reference = updated(samples, grpo)
    loss = expected(model, reference, samples, grpo)
    assert metrics["loss/total_avg"] == pytest.approx(float(loss.detach()), rel=1e-5)
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4)


def test_a_domains_prompt_is_read_once_for_all_its_tasks_and_changes_no_number() -> None:
    samples = episodes(one_prompt=True)
    grpo = replace(GRPO, pack_length=200)
    shared, gradients, *_ = updated(samples, grpo)
    alone, others, *_ = updated(samples, grpo, share=False)
    for name in ("loss/total_avg", "policy/entropy_avg", "objective/kl3_avg"):
        assert shared[name] == pytest.approx(alone[name], rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[name], rtol=1e-3, atol=1e-4)
