"""The variance of a mean over seeds and prompts that are both drawn from something larger.

In: values [..., seeds, prompts], one per seed and prompt, or their mean squares. Out: the variance
of their mean with its degrees of freedom. Leading axes are layouts of their own.

Value = mean + seed + prompt + residual, each with a variance of its own; the residual holds what
seed and prompt do together, and the noise. The variance of the mean is (EMS_seed + EMS_prompt -
EMS_residual) / (S P) in expected mean squares of the crossed layout. Three seeds tell little about
the spread of seeds, and Satterthwaite's degrees of freedom with estimates in their place (1946, "An
approximate distribution of estimates of variance components", Biometrics Bulletin 2:110-114) reject
7 to 8 % at 5 % with them: where seeds are, by luck, alike, their two degrees of freedom are not
counted. What is done about it:

- The variance is (MS_prompt + max(MS_seed - MS_residual, 0)) / (S P): only the part of the seeds is
  held at zero or above. Prompts are many, so that their mean square needs no such help; helping it
  would count the residual twice.
- 1 / df = w_seed^0.8 / (S - 1) + w_prompt^2 / (P - 1), where w is a mean square's share of the
  variance. Satterthwaite has the power 2 in both; a smaller one counts the few degrees of freedom
  of seeds sooner.
- Seeds enter it unless their mean square lies among the lowest 46 % of what comes without any
  spread of seeds. Satterthwaite with estimates leaves them out as soon as they lie below the
  residual, which three seeds without any spread do in 63 of 100 cases.

The two numbers are the ones for which `make prove` finds 94.2 to 97.9 % coverage from three seeds
up, over all spreads of seeds, prompts and residual that it tries. With two seeds it is as little as
91 %.

Pure; SciPy is imported on first use.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_SEED_POWER = 0.8
_SEED_QUANTILE = 0.46


class MeanSquares(NamedTuple):
    """Of a crossed layout without replication; arrays of one shape, or numbers.

    ``residual`` is NaN with one seed or one prompt, ``seed`` and ``prompt`` likewise.
    """

    seed: Floats
    prompt: Floats
    residual: Floats


class Spread(NamedTuple):
    """Variance of a mean, and the degrees of freedom with which it is known."""

    variance: Floats
    freedom: Floats


def mean_squares(values: Floats) -> MeanSquares:
    """Mean squares of values [..., seeds, prompts], at least two of each."""
    seeds, prompts = values.shape[-2:]
    mean = values.mean(axis=(-2, -1))
    by_seed = values.mean(axis=-1) - mean[..., None]
    by_prompt = values.mean(axis=-2) - mean[..., None]
    of_seeds = prompts * (by_seed**2).sum(axis=-1)
    of_prompts = seeds * (by_prompt**2).sum(axis=-1)
    rest = values - mean[..., None, None] - by_seed[..., None] - by_prompt[..., None, :]
    residual = (rest**2).sum(axis=(-2, -1))
    return MeanSquares(
        of_seeds / (seeds - 1),
        of_prompts / (prompts - 1),
        residual / ((seeds - 1) * (prompts - 1)),
    )


def mean_spread(values: Floats) -> Spread:
    """Variance of the mean of values [..., seeds, prompts], and its degrees of freedom.

    With one seed it is that over prompts: it speaks about this checkpoint, not about the recipe.
    At least two prompts.
    """
    seeds, prompts = values.shape[-2:]
    if seeds == 1:
        variance = values[..., 0, :].var(axis=-1, ddof=1) / prompts
        return Spread(variance, np.full(variance.shape, prompts - 1.0))
    return spread_of_squares(mean_squares(values), seeds, prompts)


def spread_of_squares(squares: MeanSquares, seeds: int, prompts: int) -> Spread:
    """The same from mean squares of at least two seeds and prompts."""
    of_seeds, of_prompts, residual = squares
    total = of_prompts + np.maximum(of_seeds - residual, 0.0)
    something = total > 0
    safe = np.where(something, total, 1.0)
    entering = of_seeds > residual * _lowest(seeds, prompts)
    seed_share = np.where(entering, np.minimum(of_seeds / safe, 1.0), 0.0)
    prompt_share = of_prompts / safe
    inverse = seed_share**_SEED_POWER / (seeds - 1) + prompt_share**2 / (prompts - 1)
    freedom = np.where(something, 1.0 / np.where(something, inverse, 1.0), 1.0)
    return Spread(total / (seeds * prompts), freedom)


@functools.cache
def _lowest(seeds: int, prompts: int) -> float:
    """Ratio of the mean squares of seeds and residual below which seeds seem to have no spread."""
    from scipy.stats import f

    return float(f.ppf(_SEED_QUANTILE, seeds - 1, (seeds - 1) * (prompts - 1)))
