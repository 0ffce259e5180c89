"""Power: the smallest detectable effect, from the spread of values.

In: values [seeds, prompts] of a difference of two arms, or estimates of its variance. Out: its
variance components, and the smallest effect that a design detects with a given probability.

The power is that of the actual test between arms (:mod:`.statistics`), not of an ideal one: mean
squares are drawn from their distribution, and the power is averaged over them. Effects may have
either sign. Values are assumed normal.

>>> found = variance_components(arm - baseline)
>>> detectable_effect(found, seeds=3, prompts=200)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import (
    MeanSquares,
    half_widths,
    mean_squares,
    spread_of_squares,
)

Floats = npt.NDArray[np.float64]
#: Draws of mean squares, a power of two: points of a Sobol sequence.
_DRAWS = 4096


class VarianceComponents(NamedTuple):
    """Variance components of a value, in squared units of the metric.

    Attributes
    ----------
    seed
        Effect of a seed on all prompts. None: unknown, with a single seed.
    prompt
        Effect of a prompt with all seeds.
    residual
        The rest: their interaction, and sampling.
    seeds, prompts
        Numbers of seeds and prompts in the estimate; 0 if assumed.
    """

    seed: float | None
    prompt: float
    residual: float
    seeds: int = 0
    prompts: int = 0


def variance_components(values: Floats) -> VarianceComponents:
    """Components of a layout [seeds, prompts] by its mean squares (ANOVA estimators).

    A negative estimate becomes zero. With one seed, prompt and residual cannot be separated: all
    of it is assigned to the prompt.

    Parameters
    ----------
    values
        Per seed and prompt, usually arm minus baseline. Prompts with a NaN in any seed are dropped.

    Raises
    ------
    ConfigurationError
        Fewer than two prompts are left, which gives no spread.
    """
    kept = values[:, ~np.isnan(values).any(axis=0)]
    seeds, prompts = kept.shape
    if prompts < 2:
        raise ConfigurationError(
            f"A spread cannot be estimated from {prompts} of {values.shape[1]} prompts",
            expected="at least two prompts with a value for every seed",
            fix="evaluate on more prompts",
        )
    if seeds == 1:
        return VarianceComponents(None, float(kept.var(ddof=1)), 0.0, 1, prompts)
    squares = mean_squares(kept)
    residual = float(squares.residual)
    return VarianceComponents(
        max(0.0, float(squares.seed) - residual) / prompts,
        max(0.0, float(squares.prompt) - residual) / seeds,
        residual,
        seeds,
        prompts,
    )


def mean_components(found: Sequence[VarianceComponents]) -> VarianceComponents:
    """Means of several estimates; the spread of seeds over estimates that have one."""
    seeds = [c.seed for c in found if c.seed is not None]
    return VarianceComponents(
        float(np.mean(seeds)) if seeds else None,
        float(np.mean([c.prompt for c in found])),
        float(np.mean([c.residual for c in found])),
        max(c.seeds for c in found),
        max(c.prompts for c in found),
    )


def likely_components(
    components: VarianceComponents, share: float = 0.8
) -> tuple[VarianceComponents, VarianceComponents] | None:
    """The smallest and the largest plausible spread of seeds, given an estimate's mean square: the
    truth lies between them for ``share`` of all estimates. None if the seeds' spread is unknown.

    With few seeds the mean square is chi-squared with as few degrees of freedom; prompts are
    many, so their estimated spread is used unchanged.
    """
    if components.seed is None or components.seeds < 2:
        return None
    from scipy.stats import chi2

    freedom = components.seeds - 1
    square = components.prompts * components.seed + components.residual
    tail = (1 - share) / 2
    least, most = (
        max(0.0, square * freedom / float(chi2.ppf(q, freedom)) - components.residual)
        / components.prompts
        for q in (1 - tail, tail)
    )
    return components._replace(seed=least), components._replace(seed=most)


def detectable_effect(
    components: VarianceComponents,
    seeds: int,
    prompts: int,
    power: float = 0.8,
    alpha: float = 0.05,
) -> float:
    """The smallest difference of two arms that is detected in ``power`` of all sweeps.

    Parameters
    ----------
    components
        Of the paired difference, per seed and prompt. An unknown spread of seeds counts as zero,
        so the result is then a lower bound.
    seeds, prompts
        Planned numbers; with one seed the effect is that of these checkpoints, not of their
        recipes.
    power, alpha
        Probability of detection, and of a false positive (two-sided, for one comparison; for the
        strictest of k arms under Holm's method pass alpha / k).

    Returns
    -------
    float
        In units of the metric; infinite with fewer than two prompts, 0 without any spread.
    """
    if prompts < 2:
        return math.inf
    from scipy.optimize import brentq

    half, error = _half_widths(components, seeds, prompts, alpha)
    if not error:
        return 0.0  # no spread, or only of a single seed
    high = error
    while _power(high, half, error) < power:
        high *= 2
    return float(brentq(lambda d: _power(d, half, error) - power, 0.0, high, rtol=1e-4))


def power_of(
    components: VarianceComponents, seeds: int, prompts: int, effect: float, alpha: float = 0.05
) -> float:
    """Share of sweeps that detect a difference of this size; see :func:`detectable_effect`."""
    if prompts < 2:
        return 0.0
    half, error = _half_widths(components, seeds, prompts, alpha)
    return _power(effect, half, error) if error else float(effect != 0)


def _half_widths(
    components: VarianceComponents, seeds: int, prompts: int, alpha: float
) -> tuple[Floats, float]:
    """Half widths of the interval as random draws, and the true standard error."""
    from scipy.stats import t

    if seeds == 1:
        variance = components.prompt + components.residual
        drawn = variance * _chi_squares(1, prompts - 1)
        half = t.ppf(1 - alpha / 2, prompts - 1) * np.sqrt(drawn / prompts)
        return half, math.sqrt(variance / prompts)
    of_seeds = prompts * (components.seed or 0.0) + components.residual
    of_prompts = seeds * components.prompt + components.residual
    squares = MeanSquares(
        of_seeds * _chi_squares(0, seeds - 1),
        of_prompts * _chi_squares(1, prompts - 1),
        components.residual * _chi_squares(2, (seeds - 1) * (prompts - 1)),
    )
    error = math.sqrt((of_seeds + of_prompts - components.residual) / (seeds * prompts))
    return half_widths(spread_of_squares(squares, seeds, prompts), alpha), error


@functools.lru_cache(maxsize=64)
def _chi_squares(which: int, freedom: int) -> Floats:
    """Draws of a mean square with expectation 1; the three of a layout are independent."""
    from scipy.stats import chi2

    drawn: Floats = chi2.ppf(_points()[:, which], freedom) / freedom
    return drawn


@functools.cache
def _points() -> Floats:
    from scipy.stats import qmc

    points: Floats = qmc.Sobol(3, scramble=True, rng=np.random.default_rng(0)).random(_DRAWS)
    return points


def _power(effect: float, half: Floats, error: float) -> float:
    from scipy.special import ndtr

    return float((ndtr((effect - half) / error) + ndtr((-effect - half) / error)).mean())
