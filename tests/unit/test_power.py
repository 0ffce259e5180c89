"""The power of a comparison, computed independently of the code."""

import math

import numpy as np
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    likely_components,
    power_of,
    variance_components,
)
from refiner_core.evaluation.statistics import two_way_means


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
