"""Statistics against results whose truth is known, and against statsmodels where it has the method.

A small part of ``python -m tests.prove.statistics``.
"""

import math

import numpy as np
import pytest

from refiner_core.evaluation.statistics import mean_squares, two_way_mean
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
