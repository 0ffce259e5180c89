"""Statistics against results whose truth is known, and against statsmodels where it has the method.

A small part of ``python -m tests.prove.statistics``.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.power import (
    VarianceComponents,
    detectable_effect,
    power_of,
    variance_components,
)
from refiner_core.evaluation.statistics import (
    mean_squares,
    two_way_mean,
    two_way_means,
)
from tests.prove.statistics import Cell, count, leniency, ours, over_prompts, pooled
from tests.support.results import World

pytestmark = pytest.mark.slow

REPEATS = 2_000
#: Three standard errors of a share near 5 % in so many repetitions.
SLACK = 3 * math.sqrt(0.05 * 0.95 / REPEATS)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(World(seed=0.0, interaction=0.0), 3, 50),
        Cell(World(seed=0.1, interaction=0.1), 3, 50),
        Cell(World(seed=0.2, interaction=0.4), 3, 50),
        Cell(World(seed=0.1, interaction=0.4, yes_no=0.5), 3, 50),
        Cell(World(seed=0.03, interaction=0.1, yes_no=0.1), 5, 50),
        Cell(World(seed=0.1, interaction=0.1), 3, 200),
    ],
    ids=lambda cell: cell.name,
)
def test_differences_are_neither_found_where_none_are_nor_too_sure(cell: Cell) -> None:
    found = count(cell, ours, REPEATS)
    assert found.false_positives <= 0.06 + SLACK
    for covered in (found.covered_null, found.covered_effect):
        assert 0.92 <= covered <= 0.98 + SLACK


def test_methods_that_take_seeds_for_prompts_find_what_is_not_there() -> None:
    """Why the report does not use them: every other sweep of equal arms would have a winner."""
    cell = Cell(World(seed=0.1, interaction=0.1, yes_no=0.5), 3, 200)
    assert count(cell, pooled, 300).false_positives > 0.2
    assert count(cell, over_prompts, 300).false_positives > 0.2


def test_a_lenient_judge_is_no_progress_in_a_hundred_sweeps() -> None:
    assert leniency(60, shift=0.05, noise=0.02).holds
    assert leniency(60, shift=0.05, noise=0.02, policy=2.0).holds


def test_an_effect_that_is_called_detectable_is_found_in_four_of_five() -> None:
    world = World(seed=0.05)
    parts = VarianceComponents(2 * world.seed**2, 2 * world.interaction**2, 2 * world.residual**2)
    effect = detectable_effect(parts, 3, 100)
    values = world.draw(np.random.default_rng(3), (1_000, 3, 100), (0.0, effect))
    found = two_way_means((values[:, 1] - values[:, 0]).astype(np.float64))
    share = np.mean([f.p_value is not None and f.p_value < 0.05 for f in found])
    assert share == pytest.approx(0.8, abs=0.05)
    assert power_of(parts, 3, 100, effect) == pytest.approx(0.8, abs=1e-3)
    assert power_of(parts, 3, 100, 0.0) < 0.06


def test_more_of_what_spreads_sees_smaller_effects() -> None:
    seeds_spread = VarianceComponents(0.01, 0.001, 0.01)
    assert detectable_effect(seeds_spread, 5, 50) < detectable_effect(seeds_spread, 3, 50) / 1.5
    assert detectable_effect(seeds_spread, 3, 500) > 0.9 * detectable_effect(seeds_spread, 3, 50)
    prompts_spread = VarianceComponents(0.0, 0.09, 0.09)
    few, many = (detectable_effect(prompts_spread, 3, n) for n in (50, 200))
    assert many == pytest.approx(few / 2, rel=0.05)
    assert detectable_effect(prompts_spread, 3, 1) == math.inf
    assert detectable_effect(VarianceComponents(0.0, 0.0, 0.0), 3, 50) == 0.0


def test_components_are_those_that_values_were_drawn_with() -> None:
    world = World(seed=0.2, prompt=0.0, interaction=0.3, residual=0.4)
    values = world.draw(np.random.default_rng(4), (1, 60, 400), (0.0,))[0, 0].astype(np.float64)
    found = variance_components(values)
    assert found.seed == pytest.approx(0.04, rel=0.4)
    assert found.prompt == pytest.approx(0.09, rel=0.2)
    assert found.residual == pytest.approx(0.16, rel=0.05)
    values[3, :10] = np.nan
    assert variance_components(values).prompts == 390
    assert variance_components(values[:1]).seed is None
    with pytest.raises(ConfigurationError, match="at least two prompts"):
        variance_components(values[:, :1])


# ---------------------------------------------------------------- second opinions


def test_mean_squares_are_those_of_an_analysis_of_variance() -> None:
    import pandas as pd
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    values = np.random.default_rng(5).normal(size=(4, 7)) + np.arange(4)[:, None]
    table = pd.DataFrame(
        {"value": values.ravel(), "seed": np.repeat(range(4), 7), "prompt": list(range(7)) * 4}
    )
    other = anova_lm(ols("value ~ C(seed) + C(prompt)", table).fit())["mean_sq"]
    mine = mean_squares(values)
    assert [float(m) for m in mine] == pytest.approx(other.tolist())


def test_one_seed_is_the_paired_t_test() -> None:
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(6).normal(0.1, 1.0, size=30)
    found, other = two_way_mean(values[None]), ttest_1samp(values, 0.0)
    assert found.p_value == pytest.approx(other.pvalue)
    interval = other.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_many_layouts_at_once_equal_each_alone() -> None:
    values = np.random.default_rng(7).normal(size=(5, 3, 20))
    values[2, 1, 4:9] = np.nan
    together = two_way_means(values)
    for layout, found in zip(values, together, strict=True):
        kept = ~np.isnan(layout).any(axis=0)
        alone = two_way_mean(layout[:, kept], excluded=int((~kept).sum()))
        assert found.n == alone.n
        assert found.excluded == alone.excluded
        assert found[:3] == pytest.approx(alone[:3])


def test_equal_differences_on_few_prompts_have_a_sign_test() -> None:
    """t over values without spread would give p = 0 from three prompts."""
    assert two_way_mean(np.full((3, 3), 0.5)).p_value == 0.25
    assert two_way_mean(np.full((3, 20), 0.5)).p_value == pytest.approx(2.0**-19)
