"""Health checks of training: what each finds, noise that is no finding, policies, resume."""

import json
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from refiner_core.contract.errors import HealthStop, NotFiniteError
from refiner_core.contract.sections.training import HealthConfig
from refiner_core.training.steps.health import WARM_UP, HealthMonitor

#: Policies of all checks at once.
CHECKS = (
    *("loss_spike", "entropy_collapse", "zero_reward_variance", "length_explosion", "kl_blow_up"),
)


def monitor(stage: Any = "grpo", **config: Any) -> HealthMonitor:
    return HealthMonitor(HealthConfig(**config), stage)


def updates(health: HealthMonitor, norms: Iterable[float], **numbers: Any) -> list[bool]:
    """Steps of one optimiser step each; whether each was skipped."""
    skipped = []
    for norm in norms:
        health.begin(health.step + 1)
        skipped.append(health.before_update(**{"loss": 0.1, "grad_norm": norm, **numbers}))
    return skipped


def noise(seed: int, count: int = 400) -> list[float]:
    """Gradient norms as training has them: log-normal, falling slowly."""
    rng = random.Random(seed)
    return [math.exp(rng.gauss(0, 0.5)) * (1 + 4 / (1 + i / 50)) for i in range(count)]


def found(health: HealthMonitor) -> list[str]:
    return [finding.check for finding in health.findings]


# ------------------------------------------------------------ spikes


@pytest.mark.parametrize("seed", range(3))
def test_noise_of_real_training_is_no_finding(seed: int) -> None:
    health, rng = monitor(**dict.fromkeys(CHECKS, "stop")), random.Random(seed)
    for norm in noise(seed):
        health.begin(health.step + 1)
        groups, truncated = rng.choice([0, 3, 8]) if health.step % 2 else 5, rng.random() * 0.85
        assert not health.after_rollouts(groups_with_spread=groups, truncated_share=truncated)
        kl, entropy = rng.random() * 2, 0.2 + rng.random()
        loss = rng.gauss(0, 1)
        assert not health.before_update(loss=loss, grad_norm=norm, entropy=entropy, kl=kl)
        assert health.metrics() == {}


def test_a_norm_far_above_its_running_mean_is_a_spike_and_is_skipped() -> None:
    health = monitor(loss_spike="skip")
    assert updates(health, [*[1.0] * 20, 10.1, 1.0]) == [*[False] * 20, True, False]
    updates(health, [50.0])
    assert found(health) == ["loss_spike"]
    assert health.metrics() == {"health/loss_spike": 1, "health/skipped_updates": 1}


def test_nothing_is_a_spike_before_there_is_a_mean() -> None:
    assert not any(updates(monitor(loss_spike="skip"), [1.0] * (WARM_UP - 1) + [1000.0]))
    assert any(updates(monitor(loss_spike="skip"), [1.0] * WARM_UP + [1000.0]))


def test_the_loss_spikes_in_sft_and_not_in_grpo_where_it_has_either_sign() -> None:
    for stage, spikes in (("sft", 1), ("grpo", 0)):
        health = monitor(stage)
        updates(health, [1.0] * 10, loss=2.0)
        updates(health, [1.0], loss=21.0)
        assert len(health.findings) == spikes


# ------------------------------------------------------------ not finite


@pytest.mark.parametrize("numbers", [{"loss": math.nan}, {"grad_norm": math.inf}, {"kl": math.nan}])
def test_a_number_that_is_not_finite_stops_training(numbers: dict[str, float]) -> None:
    health = monitor()
    with pytest.raises(NotFiniteError, match=r"grpo step 1: the .* is (nan|inf)") as caught:
        updates(health, [1.0], **numbers)
    assert "the weights were not updated with it" in str(caught.value)


def test_a_step_that_is_not_finite_is_skipped_where_the_recipe_says_so() -> None:
    health = monitor(not_finite="skip")
    assert updates(health, [1.0] * 6) == [False] * 6
    assert updates(health, [math.nan]) == [True]
    assert health.metrics() == {"health/not_finite": 1, "health/skipped_updates": 1}
    json.dumps(health.state(), allow_nan=False)  # a checkpoint can hold it
    assert updates(health, [1.0]) == [False]


# ------------------------------------------------------------ rows of steps


def bad_entropy(health: HealthMonitor, bad: bool) -> bool:
    return health.before_update(loss=0.0, grad_norm=1.0, entropy=0.001 if bad else 1.0)


def bad_kl(health: HealthMonitor, bad: bool) -> bool:
    return health.before_update(loss=0.0, grad_norm=1.0, kl=11.0 if bad else 1.0)


def bad_spread(health: HealthMonitor, bad: bool) -> bool:
    return health.after_rollouts(groups_with_spread=0 if bad else 1, truncated_share=0.0)


def bad_lengths(health: HealthMonitor, bad: bool) -> bool:
    return health.after_rollouts(groups_with_spread=1, truncated_share=0.95 if bad else 0.9)


IN_A_ROW = {
    "entropy_collapse": bad_entropy,
    "kl_blow_up": bad_kl,
    "zero_reward_variance": bad_spread,
    "length_explosion": bad_lengths,
}


def steps(
    health: HealthMonitor, check: Callable[[HealthMonitor, bool], bool], bad: Iterable[bool]
) -> list[bool]:
    skipped = []
    for value in bad:
        health.begin(health.step + 1)
        skipped.append(check(health, value))
    return skipped


@pytest.mark.parametrize("check", IN_A_ROW)
def test_a_check_counts_after_its_patience_and_begins_again_after_a_good_step(check: str) -> None:
    health = monitor(**{check: "skip", "patience": 3})
    series = [True, True, False, True, True, True, True, False, True]
    skipped = steps(health, IN_A_ROW[check], series)
    assert skipped == [False, False, False, False, False, True, True, False, False]


@pytest.mark.parametrize("check", IN_A_ROW)
def test_policies_do_what_they_say(check: str, caplog: pytest.LogCaptureFixture) -> None:
    off, warn = (monitor(**{check: policy, "patience": 1}) for policy in ("off", "warn"))
    assert steps(off, IN_A_ROW[check], [True]) == [False]
    assert (off.metrics(), caplog.records) == ({}, [])
    assert steps(warn, IN_A_ROW[check], [True]) == [False]
    assert warn.metrics() == {f"health/{check}": 1}
    assert f"grpo step 1: {warn.findings[0].message} [{check}]" in caplog.text
    with pytest.raises(HealthStop, match=rf"grpo\.health\.{check}=warn") as caught:
        steps(monitor(**{check: "stop", "patience": 1}), IN_A_ROW[check], [True])
    assert caught.value.resumable
    assert caught.value.exit_code == 1


def test_what_all_ranks_find_one_says(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [HealthMonitor(HealthConfig(), "grpo", says=rank == 0) for rank in range(2)]
    for health in ranks:
        steps(health, bad_kl, [True] * 3)
    assert len(caplog.records) == 1
    assert ranks[0].metrics() == ranks[1].metrics() == {"health/kl_blow_up": 1}


# ------------------------------------------------------------ resume


@pytest.mark.parametrize("cut", [1, 9, 23])
def test_a_resumed_run_decides_as_the_uninterrupted_one(cut: int) -> None:
    rng = random.Random(3)
    norms = [n * (30 if i % 11 == 10 else 1) for i, n in enumerate(noise(9, 40))]
    kls = [rng.choice([1.0, 20.0, 20.0]) for _ in norms]

    def play(health: HealthMonitor, first: int, last: int) -> list[tuple[bool, dict[str, float]]]:
        out = []
        for i in range(first, last):
            health.begin(i + 1)
            health.after_rollouts(groups_with_spread=i % 3, truncated_share=kls[i] / 20.5)
            skipped = health.before_update(loss=0.0, grad_norm=norms[i], kl=kls[i])
            out.append((skipped, health.metrics()))
        return out

    config = {"loss_spike": "skip", "kl_blow_up": "skip", "patience": 2}
    straight = play(monitor(**config), 0, len(norms))
    before, after = monitor(**config), monitor(**config)
    first = play(before, 0, cut)
    after.restore(json.loads(json.dumps(before.state())))
    assert first + play(after, cut, len(norms)) == straight
    assert any(skipped for skipped, _ in straight[cut:])
    fresh = play(monitor(**config), cut, len(norms))
    assert cut == 1 or first + fresh != straight  # the state does matter
