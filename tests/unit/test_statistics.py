"""Intervals, differences, power, pass@k, labels of people, the sequential test."""

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.metric_names import (
    of_domain,
    pass_at_k,
    pass_hat_k,
    pass_names,
    task_passes,
)
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    likely_components,
    power_of,
    variance_components,
)
from refiner_core.evaluation.statistics import (
    Floats,
    cluster_bootstrap,
    estimate,
    holm,
    mcnemar_of,
    paired_difference_over_seeds,
    two_way_mean,
    two_way_means,
    wilson,
)
from refiner_core.rescoring.labels import LabelledQuestion, corrected_mean, labels_report
from refiner_core.rewards.sequential import evidence
from tests.support.judged_worlds import LabelWorld, covered


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
    assert (result.value, result.numerator, result.denominator, result.n) == (0.8, 8.0, 10, 10)
    # Wilson 1927 for 8 of 10 at 95 %.
    assert (result.low, result.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert result.interval == "wilson"


def test_samples_of_one_prompt_are_not_taken_for_independent() -> None:
    """20 prompts x 4 equal samples know as much as 20 samples, not as 80."""
    rng = np.random.default_rng(0)
    per_prompt = rng.integers(0, 2, 20).astype(float)
    clustered = estimate(rows([[v] * 4 for v in per_prompt]), "m", kind="yes_no")
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
        hits += result.low <= 2 / 7 <= result.high
    assert 0.89 <= hits / 200 <= 0.99


def test_the_same_rows_give_the_same_interval() -> None:
    table = [
        {"sample_id": str(i), "a": v, "b": v}
        for i, v in enumerate(np.random.default_rng(2).random(30))
    ]
    first = estimate(table, "a", seed=3)
    other = estimate(table, "b", seed=3)
    assert estimate(table, "a", seed=3) == first
    assert estimate(table, "a", seed=4) != first
    assert estimate(table, "a") == estimate(table, "a", seed=0)
    assert other != first, "each metric has random numbers of its own"
    assert estimate(table, "b", seed=3, stream="a") == first, "unless it borrows another's"


def test_a_published_interval_is_reproduced_exactly() -> None:
    """Cards and reports hold it: another random stream would be another number in all of them."""
    found = estimate(rows([[i**0.5, i**0.25] for i in range(20)]), "m", seed=3)
    assert (found.n, found.denominator) == (20, 40)
    assert (found.low, found.high) == pytest.approx(
        (1.8008268833268912, 2.5348517783278726), abs=1e-12
    )


def test_the_bootstrap_resamples_prompts_and_divides_sums_by_counts() -> None:
    from scipy.stats import bootstrap

    sums, counts = np.array([1.5, 0.25, 1.75, 0.5, 2.0]), np.array([3.0, 1.0, 2.0, 2.0, 2.0])

    def mean(a: Floats, b: Floats) -> float:
        return float(a.sum() / b.sum())

    expected = bootstrap(
        *((sums, counts), mean),
        **{"paired": True, "vectorized": False, "n_resamples": 300, "confidence_level": 0.9},
        rng=np.random.default_rng(11),
    ).confidence_interval
    found = cluster_bootstrap(sums, counts, resamples=300, seed=11, confidence=0.9)
    assert found == pytest.approx((expected.low, expected.high))


def test_values_that_are_missing_are_excluded_not_zero() -> None:
    result = estimate(rows([[1.0, None], [0.5, 0.5], [None, None]]), "m")
    assert result.value == pytest.approx(2 / 3)
    assert (result.n, result.denominator) == (2, 3)
    assert estimate(rows([None, None]), "m") is None
    assert estimate([], "m") is None


def test_a_perfect_score_still_has_an_interval() -> None:
    """Resampling forty ones gives [1, 1], which claims more than forty prompts can."""
    for kind in ("yes_no", "share"):
        result = estimate(rows([[1.0] * 4] * 10), "m", kind=kind)
        assert result.high == 1.0
        assert result.low == pytest.approx(wilson(10, 10)[0])
        none = estimate(rows([[0.0] * 4] * 10), "m", kind=kind)
        assert (none.low, none.high) == pytest.approx((0.0, 1 - result.low))


def test_a_count_of_0_or_1_is_not_a_proportion() -> None:
    """One claim in every answer is not "between 72 % and 100 %"."""
    ones = estimate(rows([1.0] * 10), "m")
    assert (ones.low, ones.high, ones.interval) == (1.0, 1.0, "constant")
    mixed = estimate(rows([1.0, 0.0] * 5), "m")
    assert mixed.interval == "bootstrap over prompts"


def test_one_prompt_has_no_interval_and_a_constant_has_a_point() -> None:
    single = estimate(rows([[0.2, 0.4]]), "m")
    assert (single.low, single.high) == (None, None)
    constant = estimate(rows([0.3, 0.3, 0.3]), "m")
    assert (constant.low, constant.high) == pytest.approx((0.3, 0.3))


def test_pairing_is_by_prompt_in_any_order() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.random(50)
    gain = 0.05 + 0.01 * rng.standard_normal(50)
    a, b = rows((difficulty + gain).tolist()), rows(difficulty.tolist())
    result = paired_difference(a[::-1], b, "m")
    assert result.value == pytest.approx(gain.mean())
    assert result.low > 0.04
    assert result.p_value < 1e-6
    back = paired_difference(b, a, "m")
    assert back.value == pytest.approx(-result.value)


def test_a_prompt_without_a_value_is_excluded_on_both_sides() -> None:
    result = paired_difference(rows([1.0, None, 1.0, 0.0]), rows([0.0, 1.0, 0.5, 0.0]), "m")
    assert (result.n, result.excluded) == (3, 1)
    assert result.value == pytest.approx(0.5)
    nan = paired_difference(rows([1.0, math.nan, 1.0, 0.0]), rows([0.0, 1.0, 0.5, 0.0]), "m")
    assert nan == result, "what is no number is no value"


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
    assert result.low < 0  # three seeds that differ by 0.1 prove nothing
    pooled = paired_difference(arms[1], base[1], "m")
    assert pooled.low > 0.09  # one checkpoint against one: sure, and about less


def test_two_way_variance_by_hand() -> None:
    """Rows 1, 3 and columns 1, 2, 3 add up without error: components by inspection."""
    values = np.array([[0.0, 1.0, 2.0], [2.0, 3.0, 4.0]])
    result = two_way_mean(values)
    # MS_seed = 3 * 2 = 6, MS_prompt = 2 * 2 / 2 = 2, MS_error = 0; variance 8 / 6.
    assert result.value == 2.0
    from scipy.stats import t

    # Three quarters of it are the seeds', which have one degree of freedom; prompts have two.
    at = (result.high - 2.0) / (8 / 6) ** 0.5
    assert 0.75 * 2 * t.sf(at, 1) + 0.25 * 2 * t.sf(at, 2) == pytest.approx(0.05, abs=1e-6)
    size = 2.0 / (8 / 6) ** 0.5
    assert result.p_value == pytest.approx(0.75 * 2 * t.sf(size, 1) + 0.25 * 2 * t.sf(size, 2))


def told_rule(values: Floats) -> tuple[float, Callable[[float], float]]:
    """Standard error and p-value by |mean|, as the docstring of ``crossed`` puts them, by SciPy."""
    from scipy.stats import f, t

    seeds, prompts = values.shape
    by_seed, by_prompt = values.mean(1, keepdims=True), values.mean(0, keepdims=True)
    ms_seed = prompts * by_seed.var(ddof=1)
    ms_prompt = seeds * by_prompt.var(ddof=1)
    left = values - by_seed - by_prompt + values.mean()
    ms_left = (left**2).sum() / ((seeds - 1) * (prompts - 1))
    variance = (ms_prompt + max(ms_seed - ms_left, 0.0)) / (seeds * prompts)
    share = min(ms_seed / (seeds * prompts * variance), 1.0)
    among = f.cdf(ms_seed / ms_left, seeds - 1, (seeds - 1) * (prompts - 1))

    def p_value(mean: float) -> float:
        size = mean / variance**0.5
        of_prompts = 2 * t.sf(size, prompts - 1)
        both = share * 2 * t.sf(size, seeds - 1) + (1 - share) * of_prompts
        # Taken for no spread of seeds at a level p if that is among the lowest 46 % * (p / 5 %).
        if among >= 0.46 * min(1.0, both / 0.05):
            return float(both)
        return float(min(both, max(of_prompts, 0.05 * among / 0.46)))

    return float(variance**0.5), p_value


def layouts() -> list[Floats]:
    """Of 2 to 6 seeds, equal ones and far apart ones; as many prompts as seeds, fewer, and more."""
    rng = np.random.default_rng(12)
    shapes = [(2, 2), (2, 30), (3, 3), (3, 12), (3, 12), (5, 4), (6, 40), (6, 40)]
    return [
        (spread * rng.normal(size=(seeds, 1)) + rng.normal(size=(1, prompts)) * 0.5
         + rng.normal(size=(seeds, prompts)))
        for seeds, prompts in shapes
        for spread in (0.0, 0.0, 0.3, 2.0)
    ]  # fmt: skip


def test_p_values_and_intervals_follow_the_documented_rule() -> None:
    kinds = set()
    for values in layouts():
        error, p_value = told_rule(values)
        for size in (0.1, 0.7, 1.5, 2.1, 2.6, 3.5, 8.0):
            shifted = values - values.mean() + size * error
            found = two_way_mean(shifted)
            assert found.p_value == pytest.approx(p_value(size * error), rel=1e-6)
            for confidence in (0.95, 0.99):
                found = two_way_mean(shifted, confidence=confidence)
                half = found.high - found.value
                assert found.value - found.low == pytest.approx(half)
                # Means beyond its ends would be found at that level, and means inside would not.
                assert p_value(half * 1.002) < 1 - confidence < p_value(half * 0.998)
                kinds.add((confidence, half > 1.001 * error * critical(values, confidence)))
    assert kinds == {(c, k) for c in (0.95, 0.99) for k in (False, True)}, "seeds do and do not"


def critical(values: Floats, confidence: float) -> float:
    """Of the t test over prompts alone."""
    from scipy.stats import t

    return float(t.isf((1 - confidence) / 2, values.shape[1] - 1))


def test_seeds_that_differ_alike_on_all_prompts_are_a_spread_of_seeds() -> None:
    """Nothing is left over to hold them against; and where they do not differ, prompts decide."""
    from scipy.stats import t

    apart = np.array([[1.0], [2.0], [3.0]]) + np.zeros((1, 10)) + np.linspace(-1e-3, 1e-3, 10)
    found = two_way_mean(apart)
    assert found.p_value == pytest.approx(2 * t.sf(2.0 / (1 / 3) ** 0.5, 2), rel=1e-3)
    alike = np.zeros((3, 1)) + np.array([0.5, -0.25, 1.0, 0.25, 0.75])
    found = two_way_mean(alike)
    error = (alike[0].var(ddof=1) / 5) ** 0.5
    assert found.p_value == pytest.approx(2 * t.sf(0.45 / error, 4))
    assert found.high == pytest.approx(0.45 + t.isf(0.025, 4) * error)


def test_prompts_with_a_gap_leave_their_layout_alone() -> None:
    values = np.random.default_rng(7).normal(size=(3, 2, 6))
    values[1, 0, 2:4] = values[1, 1, 3] = np.nan
    values[2, 0, 1:] = np.nan
    found = two_way_means(values)
    assert [(f.n, f.excluded) for f in found] == [(6, 0), (4, 2), (1, 5)]
    assert found[0] == two_way_mean(values[0])
    assert found[1] == two_way_mean(values[1][:, [0, 1, 4, 5]], excluded=2)
    assert two_way_means(np.ones((1, 2, 1)))[0] == (1.0, None, None, 1, 2, 0, None, "none")
    one = values[2][:, 0].mean()
    assert found[2] == (one, None, None, 1, 2, 5, None, "none")
    (none,) = two_way_means(np.full((1, 2, 3), np.nan))
    assert math.isnan(none.value)
    assert (none.n, none.excluded, none.low, none.p_value) == (0, 3, None, None)


@pytest.mark.filterwarnings("error")
def test_equal_values_are_flat_in_spite_of_rounding() -> None:
    for value in (0.1, 12345.6, 1e-9):
        values = np.full((3, 4), value)
        values[0, 0] = np.nextafter(value, math.inf)
        found = two_way_mean(values)
        assert (found.low, found.high) == (found.value, found.value)
        assert found.p_value == 0.125, "the sign test: 2 * 2**-4"
    third = np.array([[1 / 3, 1 - 2 / 3, 0.1 + 0.7 / 3], [1 / 3, 1 / 3, 1 / 3]])
    assert two_way_mean(third).p_value == 0.25
    assert two_way_mean(np.zeros((3, 4))).p_value == 1.0
    assert two_way_mean(np.array([[1e-3, 2e-3, 1.5e-3]])).interval == "t over prompts"
    small = two_way_mean(np.array([[1e-10, 2e-10, 4e-10]]))
    assert small.high > small.value, "small is not equal"


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
    assert mcnemar_of(np.array([1.0, 0.0, -1.0])) == mcnemar_of(np.zeros(3)) == 1.0


# ---------------------------------------------------------------- pass@k and pass^k


def test_both_equal_the_count_over_all_choices() -> None:
    for n in range(1, 8):
        for c in range(n + 1):
            attempts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                chosen = list(combinations(attempts, k))
                some = Fraction(sum(map(any, chosen)), len(chosen))
                every = Fraction(sum(map(all, chosen)), len(chosen))
                assert pass_at_k(n, c, k) == float(some)
                assert pass_hat_k(n, c, k) == float(every)


def test_errors_count_as_no_attempt_and_too_few_attempts_give_no_number() -> None:
    assert pass_at_k(3, 3, 4) is None
    assert pass_hat_k(3, 0, 4) is None
    assert pass_at_k(0, 0, 1) is None
    found = task_passes([None, True, False, True], 4)
    assert found["pass@1_first"] is None, "the second attempt is not the first"
    assert found["pass@1"] == 2 / 3
    assert found["pass@3"] == 1.0
    assert found["pass@4"] is None
    assert found["pass^2"] == 1 / 3
    assert task_passes([None, None], 2) == dict.fromkeys(pass_names(2)), "no value, and never 0"
    found = task_passes([False, True, True, True], 4)
    assert (found["pass@1_first"], found["pass@1"]) == (0.0, 0.75)
    assert (found["pass@4"], found["pass^4"]) == (1.0, 0.0)


def test_a_metric_of_a_domain_is_about_the_tasks_of_that_domain() -> None:
    tasks = ["a/1", "b/1"]
    assert of_domain("pass@1/a", tasks) == [True, False]
    assert of_domain("pass@1", tasks) == [True, True]


# ---------------------------------------------------------------- statistics of people's labels


def test_corrected_intervals_hold_what_people_would_say_and_the_judges_do_not() -> None:
    share, raw, width = covered(LabelWorld(0.7, 0.9, 0.6), labelled=50, repetitions=400)
    assert 0.92 <= share <= 0.98
    assert raw < 0.05
    assert width < 0.2


def test_a_judge_that_people_always_confirm_keeps_its_mean() -> None:
    means = np.random.default_rng(0).random(100)
    drawn = means[:30]
    found = corrected_mean(means, drawn, drawn, drawn)
    assert found.value == pytest.approx(means.mean())
    blind = corrected_mean(means, drawn, np.zeros(30), drawn)
    assert blind.value == pytest.approx(drawn.mean()), "people alone, if the judge says nothing"


def test_few_labels_have_no_interval() -> None:
    found = corrected_mean(np.ones(20), np.ones(4), np.ones(4), np.zeros(4))
    assert (found.value, found.low, found.high) == (0.0, None, None)


def test_errors_of_the_judge_are_in_credits() -> None:
    def question(number: int, fault: bool, score: float, *labels: float) -> LabelledQuestion:
        given = {f"person {i}": label for i, label in enumerate(labels)}
        return LabelledQuestion(f"prompt {number}", "rubric", fault, score, given)

    report = labels_report(
        [
            question(1, False, 1.0, 1.0, 1.0),  # met, and the judge says so
            question(2, True, 1.0, 0.0, 0.0),  # no fault, but the judge sees one
            question(3, True, 0.0, 1.0, 1.0),  # a fault that the judge does not see
            question(4, False, 0.0, 1.0, 0.0),  # people do not agree
        ]
    )
    judge = report["judge"]["all"]
    assert judge["sensitivity"]["value"] == 0.5
    assert judge["specificity"]["value"] == 0.0
    assert judge["undecided"] == 1
    (pair,) = report["pairs"]
    assert (pair["raw"]["numerator"], pair["raw"]["denominator"]) == (3.0, 4)


# ---------------------------------------------------------------- power


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("prompts", "alpha"), [(2, 0.05), (5, 0.05), (50, 0.05), (50, 0.01)])
def test_with_one_seed_power_is_that_of_the_t_test(prompts: int, alpha: float) -> None:
    from scipy.stats import nct, t

    parts = VarianceComponents(0.3, 0.04, 0.02)  # what seeds spread does not show in one seed
    error, critical = (0.06 / prompts) ** 0.5, t.isf(alpha / 2, prompts - 1)
    for effect in (0.0, 0.05, 0.1, 0.2):
        by, freedom = effect / error, prompts - 1
        expected = nct.sf(critical, freedom, by) + nct.cdf(-critical, freedom, by)
        assert power_of(parts, 1, prompts, effect, alpha) == pytest.approx(expected, abs=2e-5)
        assert power_of(parts, 1, prompts, -effect, alpha) == pytest.approx(expected, abs=2e-5)
    for power in (0.8, 0.5):
        effect = detectable_effect(parts, 1, prompts, power, alpha)
        assert power_of(parts, 1, prompts, effect, alpha) == pytest.approx(power, abs=1e-3)


def test_power_is_how_often_the_comparison_finds_it() -> None:
    rng = np.random.default_rng(8)
    parts, draws = VarianceComponents(0.01, 0.04, 0.09), (8_000, 3, 20)
    values = (
        parts.prompt**0.5 * rng.normal(size=(8_000, 1, 20))
        + 0.1 * rng.normal(size=(8_000, 3, 1))
        + parts.residual**0.5 * rng.normal(size=draws)
    )
    for effect in (0.0, 0.15, 0.3):
        found = two_way_means(values + effect)
        for alpha in (0.05, 0.01):
            share = np.mean([f.p_value is not None and f.p_value < alpha for f in found])
            assert power_of(parts, 3, 20, effect, alpha) == pytest.approx(share, abs=0.012)
    assert power_of(parts, 3, 20, detectable_effect(parts, 3, 20)) == pytest.approx(0.8, abs=1e-3)


def test_a_published_power_is_reproduced_exactly() -> None:
    """Its draws are the same in every process and version: plans are compared by it."""
    assert power_of(VarianceComponents(0.01, 0.02, 0.05), 3, 20, 0.2) == pytest.approx(
        0.4043937468435399, rel=1e-9
    )
    assert power_of(VarianceComponents(None, 0.02, 0.05), 1, 20, 0.2) == pytest.approx(
        0.8935199223563732, rel=1e-9
    )
    assert detectable_effect(VarianceComponents(0.01, 0.02, 0.05), 3, 20) == pytest.approx(
        0.3660411164339093, rel=1e-9
    )


def test_components_by_hand() -> None:
    """Rows (seeds) 0 and 3 apart, columns (prompts) 1 apart, and 1 in one cell on top."""
    values = np.array([[0.0, 1.0, 2.0, np.nan], [3.0, 4.0, 6.0, 9.0]])
    # Row means 1, 13/3; column means 1.5, 2.5, 4. MS_seed = 3 (10/3)^2 / 2 = 50/3,
    # MS_prompt = 2 * (19/6) / 2 = 19/6, residuals 1/6, 1/6, 1/3: MS = 2 (1/36 + 1/36 + 1/9) / 2.
    found = variance_components(values)
    residual = 1 / 6
    assert found == pytest.approx(
        ((50 / 3 - residual) / 3, (19 / 6 - residual) / 2, residual, 2, 3)
    )
    crossed = variance_components(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert crossed == (0.0, 0.0, 1.0, 2, 2), "below zero is zero"
    one = variance_components(np.array([[1.0, 2.0, 6.0, np.nan]]))
    assert one == (None, 7.0, 0.0, 1, 3)
    assert VarianceComponents(None, 0.0, 0.5)[3:] == (0, 0), "assumed"
    with pytest.raises(ConfigurationError, match="from 1 of 2 prompts"):
        variance_components(np.array([[1.0, np.nan]]))


def test_likely_spreads_of_three_seeds_by_hand() -> None:
    """With two degrees of freedom chi-squared is -2 ln of a share."""
    known = VarianceComponents(0.01, 0.02, 0.5, 3, 100)
    square = 100 * 0.01 + 0.5
    found = likely_components(known)
    least, most = found
    assert least == known._replace(seed=pytest.approx((square / math.log(10) - 0.5) / 100))
    assert most == known._replace(seed=pytest.approx((square / -math.log(0.9) - 0.5) / 100))
    half = likely_components(known, 0.5)
    assert half[1].seed == pytest.approx((square / -math.log(0.75) - 0.5) / 100)
    small = likely_components(known._replace(seed=0.0))
    assert small[0].seed == 0.0
    assert likely_components(known._replace(seeds=2)) is not None
    assert likely_components(known._replace(seeds=1)) is None
    assert likely_components(known._replace(seed=None)) is None


# ---------------------------------------------------------------- the sequential test


LOOKS, ROWS = 20, 64
TIME = np.linspace(0, 1, LOOKS + 1)
UP = 0.4 + 0.3 * TIME


def scores(rng: np.random.Generator, means: np.ndarray) -> np.ndarray:
    """Scores of rows that differ in difficulty, mostly close to 0 or 1."""
    mean = np.clip(means[:, None] + rng.normal(0, 0.15, ROWS), 0.05, 0.95)
    return rng.beta(1.5 * mean, 1.5 * (1 - mean))


def alarms(proxy: np.ndarray, gold: np.ndarray, runs: int, keep: float = 0.25) -> list[int]:
    rng, found = np.random.default_rng(7), []
    for _ in range(runs):
        one = evidence(scores(rng, proxy), scores(rng, gold), looks=LOOKS, keep=keep)
        found.append(one.first_alarm(0.05))
    return [point for point in found if point is not None]


@pytest.mark.parametrize(
    "gold",
    [UP, 0.4 + 0 * TIME + 0.25 * (UP - 0.4), np.minimum(UP, 0.5)],
    ids=["rises too", "keeps exactly its share", "saturates"],
)
def test_false_alarms_are_rare(gold: np.ndarray) -> None:
    proxy = np.minimum(UP, 0.5) if gold.max() == 0.5 else UP
    assert len(alarms(proxy, gold, 60)) <= 60 * 0.05


def test_nothing_is_seen_where_nothing_changes_or_both_fall() -> None:
    assert not alarms(0.5 + 0 * TIME, 0.5 + 0 * TIME, 40)
    assert not alarms(1 - UP, 1 - UP, 40)


def test_a_falling_gold_is_found_before_the_end() -> None:
    found = alarms(UP, 0.5 - 0.2 * TIME, 40)
    assert len(found) >= 36
    assert np.median(found) < LOOKS


def test_gold_that_first_rises_is_compared_with_its_peak() -> None:
    peak = 0.4 + 0.8 * np.minimum(TIME, 0.4) - 0.6 * np.maximum(0, TIME - 0.4)
    assert len(alarms(0.3 + 0.5 * TIME, peak, 40)) >= 32


def test_a_standing_gold_is_found_with_a_higher_share_to_keep() -> None:
    assert len(alarms(0.3 + 0.5 * TIME, 0.5 + 0 * TIME, 20, keep=0.75)) >= 18


def test_evidence_never_depends_on_later_points() -> None:
    rng = np.random.default_rng(1)
    proxy, gold = scores(rng, UP), scores(rng, 0.6 - 0.3 * TIME)
    whole = evidence(proxy, gold, looks=LOOKS)
    for point in range(1, LOOKS + 1):
        part = evidence(proxy[: point + 1], gold[: point + 1], looks=LOOKS)
        assert part.log_e.tolist() == whole.log_e[: point + 1].tolist()
    assert (np.diff(whole.log_e) >= 0).all()
    assert whole.since[-1] < LOOKS


def test_rows_without_a_score_are_left_out() -> None:
    rng = np.random.default_rng(1)
    proxy, gold = scores(rng, UP), scores(rng, 0.6 - 0.3 * TIME)
    fewer = evidence(np.delete(proxy, 5, axis=1), np.delete(gold, 5, axis=1), looks=LOOKS)
    proxy[:, 5] = np.nan
    assert evidence(proxy, gold, looks=LOOKS).log_e == pytest.approx(fewer.log_e)
    gold[:] = np.nan
    assert evidence(proxy, gold, looks=LOOKS).log_e[-1] == pytest.approx(0.0)


def test_series_outside_of_the_assumptions_are_refused() -> None:
    points = np.zeros((3, ROWS))
    with pytest.raises(ValueError, match="planned"):
        evidence(points, points, looks=1)
    with pytest.raises(ValueError, match="lie in"):
        evidence(points, points + 2, looks=2)
