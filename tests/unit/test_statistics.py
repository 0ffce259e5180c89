"""Intervals and differences: known values, coverage by simulation, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    estimate,
    holm,
    mcnemar_of,
    paired_difference_over_seeds,
    two_way_mean,
    wilson,
)


def paired_difference(a, b, metric):
    """One seed on each side."""
    return paired_difference_over_seeds([a], [b], metric)


def rows(values: Any, metric: str = "m") -> list[dict[str, Any]]:
    """values[prompt][sample], or values[prompt] for one sample each."""
    return [
        {"sample_id": f"p{p:03d}", "sample_index": s, metric: value}
        for p, samples in enumerate(values)
        for s, value in enumerate(np.atleast_1d(np.array(samples, dtype=object)))
    ]


def test_one_yes_or_no_per_prompt_has_a_wilson_interval() -> None:
    result = estimate(rows([1.0] * 8 + [0.0] * 2), "m", kind="yes_no")
    assert result is not None
    assert (result.value, result.numerator, result.denominator, result.n) == (0.8, 8.0, 10, 10)
    # Wilson 1927 for 8 of 10 at 95 %.
    assert (result.low, result.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert result.interval == "wilson"


def test_samples_of_one_prompt_are_not_taken_for_independent() -> None:
    """20 prompts x 4 equal samples know as much as 20 samples, not as 80."""
    rng = np.random.default_rng(0)
    per_prompt = rng.integers(0, 2, 20).astype(float)
    clustered = estimate(rows([[v] * 4 for v in per_prompt]), "m", kind="yes_no")
    assert clustered is not None
    assert clustered.low is not None
    assert clustered.high is not None
    assert (clustered.n, clustered.denominator) == (20, 80)
    naive = wilson(int(per_prompt.sum()) * 4, 80)
    honest = wilson(int(per_prompt.sum()), 20)
    width = clustered.high - clustered.low
    assert width > 1.5 * (naive[1] - naive[0])
    assert width == pytest.approx(honest[1] - honest[0], rel=0.25)


def test_the_bootstrap_covers_the_mean_it_estimates() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        values = rng.beta(2, 5, size=(40, 1)) + rng.normal(0, 0.1, size=(40, 3))
        result = estimate(rows(values.tolist()), "m", resamples=300)
        assert result is not None
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= 2 / 7 <= result.high
    assert 0.89 <= hits / 200 <= 0.99


def test_the_same_rows_give_the_same_interval_whatever_else_is_computed() -> None:
    table = [
        {"sample_id": str(i), "a": v, "b": v}
        for i, v in enumerate(np.random.default_rng(2).random(30))
    ]
    first = estimate(table, "a", seed=3)
    estimate(table, "b", seed=3)
    assert estimate(table, "a", seed=3) == first
    assert estimate(table, "a", seed=4) != first


def test_values_that_are_missing_are_excluded_not_zero() -> None:
    result = estimate(rows([[1.0, None], [0.5, 0.5], [None, None]]), "m")
    assert result is not None
    assert result.value == pytest.approx(2 / 3)
    assert (result.n, result.denominator) == (2, 3)
    assert estimate(rows([None, None]), "m") is None
    assert estimate([], "m") is None


def test_a_perfect_score_still_has_an_interval() -> None:
    """Resampling forty ones gives [1, 1], which claims more than forty prompts can."""
    for kind in ("yes_no", "share"):
        result = estimate(rows([[1.0] * 4] * 10), "m", kind=kind)  # type: ignore[arg-type]
        assert result is not None
        assert result.high == 1.0
        assert result.low == pytest.approx(wilson(10, 10)[0])


def test_a_count_that_happens_to_be_0_or_1_is_no_proportion() -> None:
    """One claim in every answer is not "between 72 % and 100 %"."""
    ones = estimate(rows([1.0] * 10), "m")
    assert ones is not None
    assert (ones.low, ones.high, ones.interval) == (1.0, 1.0, "constant")
    mixed = estimate(rows([1.0, 0.0] * 5), "m")
    assert mixed is not None
    assert mixed.interval == "bootstrap over prompts"


def test_one_prompt_has_no_interval_and_a_constant_has_a_point() -> None:
    single = estimate(rows([[0.2, 0.4]]), "m")
    assert single is not None
    assert (single.low, single.high) == (None, None)
    constant = estimate(rows([0.3, 0.3, 0.3]), "m")
    assert constant is not None
    assert (constant.low, constant.high) == pytest.approx((0.3, 0.3))


def test_pairing_is_by_prompt_whatever_the_order() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.random(50)
    gain = 0.05 + 0.01 * rng.standard_normal(50)
    a, b = rows((difficulty + gain).tolist()), rows(difficulty.tolist())
    result = paired_difference(a[::-1], b, "m")
    assert result.value == pytest.approx(gain.mean())
    assert result.low is not None
    assert result.low > 0.04
    assert result.p_value is not None
    assert result.p_value < 1e-6
    back = paired_difference(b, a, "m")
    assert back.value == pytest.approx(-result.value)


def test_a_prompt_without_a_value_is_excluded_on_both_sides() -> None:
    result = paired_difference(rows([1.0, None, 1.0, 0.0]), rows([0.0, 1.0, 0.5, 0.0]), "m")
    assert (result.n, result.excluded) == (3, 1)
    assert result.value == pytest.approx(0.5)


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"different prompts: 3 against 2.*p002"):
        paired_difference(rows([1, 1, 1]), rows([1, 1]), "m")
    with pytest.raises(ConfigurationError, match="2 seeds cannot be paired with 1"):
        paired_difference_over_seeds([rows([1]), rows([1])], [rows([1])], "m")


def test_several_seeds_widen_the_interval_where_seeds_differ() -> None:
    rng = np.random.default_rng(4)
    base = [rows(rng.random(40).tolist()) for _ in range(3)]
    arms = []
    for seed, shift in enumerate((0.0, 0.1, 0.2)):
        arms.append([{**r, "m": r["m"] + shift + 0.01 * rng.random()} for r in base[seed]])
    result = paired_difference_over_seeds(arms, base, "m")
    assert result.seeds == 3
    assert result.value == pytest.approx(0.105, abs=0.005)
    assert result.low is not None
    assert result.low < 0  # three seeds that differ by 0.1 prove nothing
    pooled = paired_difference(arms[1], base[1], "m")
    assert pooled.low is not None
    assert pooled.low > 0.09  # one checkpoint against one: sure, and about less


def test_two_way_variance_by_hand() -> None:
    """Rows 1, 3 and columns 1, 2, 3 add up without error: components by inspection."""
    values = np.array([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]])
    result = two_way_mean(values)
    # MS_seed = 3 * 2 = 6, MS_prompt = 2 * 2 / 2 = 2, MS_error = 0; variance 8 / 6.
    assert result.value == 2.0
    assert result.high is not None
    from scipy.stats import t

    # Three quarters of it are the seeds', which have one degree of freedom; prompts have two.
    at = (result.high - 2.0) / (8 / 6) ** 0.5
    assert 0.75 * 2 * t.sf(at, 1) + 0.25 * 2 * t.sf(at, 2) == pytest.approx(0.05, abs=1e-6)
    size = 2.0 / (8 / 6) ** 0.5
    assert result.p_value == pytest.approx(0.75 * 2 * t.sf(size, 1) + 0.25 * 2 * t.sf(size, 2))


@pytest.mark.parametrize("seed_spread", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("seeds", [3, 5])
def test_two_way_intervals_cover(seeds: int, seed_spread: float) -> None:
    """A bootstrap over three seeds covers as little as 80 %; these stay near 95 %."""
    rng = np.random.default_rng(seeds)
    hits, repeats = 0, 400
    for _ in range(repeats):
        result = two_way_mean(
            seed_spread * rng.standard_normal((seeds, 1))
            + 0.1 * rng.standard_normal((1, 60))
            + 0.3 * rng.standard_normal((seeds, 60))
        )
        assert result.low is not None
        assert result.high is not None
        hits += result.low <= 0 <= result.high
    assert 0.915 <= hits / repeats <= 0.995


def test_no_difference_at_all_and_nothing_to_compare() -> None:
    same = paired_difference(rows([1.0, 0.0]), rows([1.0, 0.0]), "m")
    assert (same.value, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    nothing = paired_difference(rows([None]), rows([1.0]), "m")
    assert (nothing.n, nothing.low, nothing.p_value) == (0, None, None)


def test_holm_holds_for_all_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


def test_mcnemar_counts_prompts_that_changed() -> None:
    changes = np.array([1.0] * 8 + [0.0] * 11 + [-1.0])
    # 8 up, 1 down: 2 * P(X <= 1), X ~ Binomial(9, 1/2).
    assert mcnemar_of(changes) == pytest.approx(2 * 10 / 512)
