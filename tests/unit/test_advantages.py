"""Advantages compare samples of one prompt; what was not scored does not enter."""

from __future__ import annotations

import pytest

from refiner_core.training.rollouts.rollout import group_advantages


@pytest.mark.parametrize(
    ("normalization", "low", "high"),
    [("standard", -0.57735, 1.73205), ("centered", -2.5, 7.5), ("sample_std", -0.5, 1.5)],
)
def test_reference_vectors(normalization, low, high):
    group = group_advantages([0.0, 0.0, 0.0, 10.0], normalization)
    assert group.dropped is None
    assert group.values == pytest.approx((low, low, low, high), abs=1e-5)


@pytest.mark.parametrize("normalization", ["standard", "centered", "sample_std"])
def test_an_unscored_sample_changes_nothing_for_the_others(normalization):
    without = group_advantages([0.0, 4.0, 10.0], normalization).values
    with_failed = group_advantages([0.0, None, 4.0, 10.0, None], normalization).values
    assert with_failed == (without[0], None, without[1], without[2], None)


@pytest.mark.parametrize("rewards", [[1.0, None, None], [None, None], []])
def test_a_group_with_nothing_to_compare_is_dropped(rewards):
    group = group_advantages(rewards)
    assert group.dropped == "too_few_scored"
    assert group.values == (None,) * len(rewards)


def test_a_group_without_spread_is_dropped():
    group = group_advantages([2.0, None, 2.0])
    assert group.dropped == "zero_std"
    assert group.values == (0.0, None, 0.0)


def test_rounding_noise_is_not_spread():
    noisy = [0.1 + 0.2, 0.3, 0.3]
    assert len(set(noisy)) == 2
    assert group_advantages(noisy).dropped == "zero_std"
