"""Intervals for numbers and for differences of numbers.

In: per-sample rows (mappings with ``sample_id`` and metrics; None if a sample does not count).
Out: an estimate or a paired difference with an interval.

Choice of the interval:

- A yes/no metric with independent samples (greedy: one sample per prompt) has a Wilson interval.
  A metric is yes/no by declaration, not because its values happen to be 0 and 1.
- Everything else has a bootstrap over *prompts*: samples of one prompt are correlated, and
  treating them as independent would make intervals too narrow. A prompt is one resampled unit, the
  statistic is sum over samples / number of samples.
- A difference is paired: per prompt, arm minus baseline, then a t interval over prompts. Pairing
  removes the spread of prompt difficulty, which is most of the total spread.
- With several seeds, both seeds and prompts are samples of larger populations: a t interval with
  the variance of a crossed two-way layout (:func:`two_way_means`).

Pure functions; SciPy is imported on first use.
"""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.metric_names import of_domain

Floats = npt.NDArray[np.float64]
#: Share of null samples in which the seeds are assumed to have no spread, and its level.
_LOWEST, _AT_LEVEL = 0.46, 0.05
#: Points of a table of critical values.
_POINTS = 4096


class MeanSquares(NamedTuple):
    """Mean squares of a crossed layout without replication; arrays of one shape, or numbers.

    ``residual`` is NaN with one seed or one prompt, as are ``seed`` and ``prompt``.
    """

    seed: Floats
    prompt: Floats
    residual: Floats


class Spread(NamedTuple):
    """Spread of a mean; arrays of one shape, for layouts with ``seeds`` and ``prompts``.

    ``variance`` is that of the mean, ``share`` the seeds' part of it, in [0, 1]. At levels from
    ``level`` on, seeds are assumed to have no spread; 1: never.
    """

    variance: Floats
    share: Floats
    level: Floats
    seeds: int
    prompts: int


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
        of_seeds / (seeds - 1), of_prompts / (prompts - 1), residual / ((seeds - 1) * (prompts - 1))
    )


def mean_spread(values: Floats) -> Spread:
    """Spread of the means of values [..., seeds, prompts]; at least two prompts.

    With one seed it covers prompts only: this checkpoint, not the recipe.
    """
    seeds, prompts = values.shape[-2:]
    if seeds == 1:
        variance = values[..., 0, :].var(axis=-1, ddof=1) / prompts
        return Spread(variance, np.zeros_like(variance), np.zeros_like(variance), 1, prompts)
    return spread_of_squares(mean_squares(values), seeds, prompts)


def spread_of_squares(squares: MeanSquares, seeds: int, prompts: int) -> Spread:
    """Spread from mean squares of at least two seeds and prompts."""
    from scipy.special import fdtr

    of_seeds, of_prompts, residual = (np.asarray(square) for square in squares)
    total = of_prompts + np.maximum(of_seeds - residual, 0.0)
    share = np.divide(of_seeds, total, out=np.zeros_like(total), where=total > 0)
    # With a residual of 0, any spread of seeds is real.
    beyond = np.full_like(total, np.inf)
    ratio = np.divide(of_seeds, residual, out=beyond, where=residual > 0)
    place = fdtr(seeds - 1, (seeds - 1) * (prompts - 1), ratio)
    level = np.where(place < _LOWEST, _AT_LEVEL * place / _LOWEST, 1.0)
    return Spread(total / (seeds * prompts), np.minimum(share, 1.0), level, seeds, prompts)


def p_values(means: Floats, spread: Spread) -> Floats:
    """Two-sided p-values of means that are truly 0; their variance is above 0."""
    from scipy.special import stdtr

    size = np.abs(means) / np.sqrt(spread.variance)
    by_prompts = 2 * stdtr(spread.prompts - 1, -size)
    if spread.seeds == 1:
        return np.asarray(by_prompts)
    by_seeds = 2 * stdtr(spread.seeds - 1, -size)
    both = spread.share * by_seeds + (1 - spread.share) * by_prompts
    return np.asarray(np.minimum(both, np.maximum(by_prompts, spread.level)))


def half_widths(spread: Spread, alpha: float) -> Floats:
    """Half widths of intervals at level ``alpha``: means with a smaller p-value lie outside."""
    critical = np.full(spread.variance.shape, _critical_t(spread.prompts - 1, alpha))
    if spread.seeds > 1:
        shares, values = _critical_values(spread.seeds - 1, spread.prompts - 1, alpha)
        both = np.interp(spread.share, shares, values)
        critical = np.where(alpha >= spread.level, np.minimum(critical, both), both)
    return np.asarray(critical * np.sqrt(spread.variance))


@functools.cache
def _critical_t(freedom: int, alpha: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - alpha / 2))


@functools.cache
def _critical_values(of_seeds: int, of_prompts: int, alpha: float) -> tuple[Floats, Floats]:
    """Shares of the seeds, ascending, and the values at which the mean of both p-values is
    ``alpha``, so that a share gives a value."""
    from scipy.special import stdtr

    ends = _critical_t(of_prompts, alpha), _critical_t(of_seeds, alpha)
    if ends[0] == ends[1]:
        return np.zeros(1), np.array(ends[:1])
    values = np.linspace(*ends, _POINTS)
    by_seeds, by_prompts = (2 * stdtr(df, -values) for df in (of_seeds, of_prompts))
    with np.errstate(invalid="ignore"):
        shares = (alpha - by_prompts) / (by_seeds - by_prompts)
    order = np.argsort(shares, kind="stable")
    return shares[order], values[order]


CONFIDENCE = 0.95
Row = Mapping[str, Any]
#: ``yes_no``: 0 or 1 per sample; ``share``: in [0, 1]; ``number``: any number.
Kind = Literal["yes_no", "share", "number"]


class Estimate(NamedTuple):
    """``value`` = ``numerator`` / ``denominator`` (sum and number of counted samples).

    ``n`` is the number of independent units behind the interval: prompts. ``low`` and ``high`` are
    None with a single prompt, which gives no estimate of a spread.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    numerator: float
    denominator: int
    interval: str


class Difference(NamedTuple):
    """First minus second. ``n`` prompts are included, ``excluded`` are not (no value on a side).

    ``p_value`` is two-sided, for no difference. ``low``, ``high`` and ``p_value`` are None if
    they cannot be estimated (fewer than two prompts).
    """

    value: float
    low: float | None
    high: float | None
    n: int
    seeds: int
    excluded: int
    p_value: float | None
    interval: str


# ---------------------------------------------------------------- one number


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927), by SciPy."""
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def cluster_bootstrap(
    sums: Floats, counts: Floats, *, resamples: int, seed: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of sum(sums) / sum(counts) over resampled prompts.

    BCa (Efron 1987, "Better bootstrap confidence intervals") by SciPy; percentiles if the
    acceleration is undefined.

    Parameters
    ----------
    sums, counts
        Per prompt, sum of the metric and number of samples; both of shape [prompts], at least two.
    resamples, seed
        Number of resamples, and the random stream.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap

    def ratio(a: Any, b: Any, axis: int = -1) -> Any:
        return a.sum(axis=axis) / b.sum(axis=axis)

    for method in ("BCa", "percentile"):
        with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateDataWarning)  # percentiles are the fallback
            result = bootstrap(
                (sums, counts),
                ratio,
                paired=True,
                vectorized=True,
                n_resamples=resamples,
                batch=max(1, 4_000_000 // len(sums)),
                confidence_level=confidence,
                method=method,
                rng=np.random.default_rng(seed),
            )
        low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
        if math.isfinite(low):  # both ends or neither
            break
    return low, high


def estimate(
    rows: Sequence[Row],
    metric: str,
    *,
    kind: Kind = "number",
    resamples: int = 2000,
    seed: int = 0,
    stream: str = "",
) -> Estimate | None:
    """Mean of a metric over the samples that have it, with its interval.

    ``stream`` names the random numbers of a bootstrap, to share them with another metric.

    Returns
    -------
    Estimate or None
        None if no sample has the metric.
    """
    groups = by_prompt(rows, metric)
    values = np.concatenate([np.zeros(0), *groups.values()])
    if not len(values):
        return None
    numerator, denominator, n = float(values.sum()), len(values), len(groups)
    mean = numerator / denominator
    low: float | None = None
    high: float | None = None
    if kind == "yes_no" and denominator == n:
        name, (low, high) = "wilson", wilson(round(numerator), denominator)
    elif kind != "number" and mean in (0.0, 1.0):
        # A bootstrap of equal values has no width. Treat each prompt as one yes or no, which has
        # the largest spread of all values in [0, 1].
        name, (low, high) = "wilson over prompts", wilson(int(mean) * n, n)
    elif n == 1:
        name = "none"
    elif np.ptp(values) == 0:
        name, (low, high) = "constant", (mean, mean)
    else:
        sums = np.array([group.sum() for group in groups.values()])
        counts = np.array([float(len(group)) for group in groups.values()])
        name = "bootstrap over prompts"
        low, high = cluster_bootstrap(
            sums, counts, resamples=resamples, seed=_stream(seed, stream or metric)
        )
    return Estimate(mean, low, high, n, numerator, denominator, name)


def by_prompt(rows: Sequence[Row], metric: str) -> dict[str, Floats]:
    """Values of a metric by prompt; prompts without any are dropped."""
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(metric)
        if value is not None:
            found.setdefault(str(row["sample_id"]), []).append(float(value))
    return {prompt: np.array(values) for prompt, values in found.items()}


def _stream(seed: int, metric: str) -> int:
    """A random stream per metric, independent of the other computed metrics."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{metric}".encode()).digest()[:8], "big")


# ---------------------------------------------------------------- differences


def paired_difference_over_seeds(
    a_rows: Sequence[Sequence[Row]], b_rows: Sequence[Sequence[Row]], metric: str
) -> Difference:
    """Mean over seeds and prompts of (a - b), paired on both, with an interval over both.

    Parameters
    ----------
    a_rows, b_rows
        Rows per seed; position s on both sides is the same seed.
    metric
        A prompt that lacks it in any seed on either side is excluded and counted; for a metric
        of one domain (``pass@4/retail``) tasks of others are ignored.

    Raises
    ------
    ConfigurationError
        The sides have different numbers of seeds, or two sets of prompts differ.
    """
    if len(a_rows) != len(b_rows) or not a_rows:
        raise ConfigurationError(
            f"{len(a_rows)} seeds cannot be paired with {len(b_rows)}",
            expected="the same seeds on both sides",
            fix="run the missing seeds, or leave them out on both sides",
        )
    prompts = _same_prompts([*a_rows, *b_rows])
    prompts = [p for p, about in zip(prompts, of_domain(metric, prompts), strict=True) if about]
    differences = np.array(
        [_means(a, metric, prompts) - _means(b, metric, prompts)
         for a, b in zip(a_rows, b_rows, strict=True)]
    )  # fmt: skip
    complete = ~np.isnan(differences).any(axis=0)
    return two_way_mean(differences[:, complete], excluded=int((~complete).sum()))


def _same_prompts(sides: Sequence[Sequence[Row]]) -> list[str]:
    """The prompts of all sides; raises if the sides differ."""
    sets = [{str(row["sample_id"]) for row in side} for side in sides]
    for other in sets[1:]:
        if other != sets[0]:
            odd = sorted(other ^ sets[0])
            raise ConfigurationError(
                f"The two sides were measured on different prompts: {len(sets[0])} against "
                f"{len(other)}, {len(odd)} on one side only (such as {odd[0]!r})",
                expected="the same held-out prompts on both sides",
                fix="evaluate both on one data set with the same evaluate.max_prompts",
            )
    return sorted(sets[0])


def _means(rows: Sequence[Row], metric: str, prompts: Sequence[str]) -> Floats:
    """Per prompt, the mean over its counted samples; NaN without any."""
    groups = by_prompt(rows, metric)
    return np.array([groups[p].mean() if p in groups else np.nan for p in prompts])


def two_way_mean(
    values: Floats, *, excluded: int = 0, confidence: float = CONFIDENCE
) -> Difference:
    """Mean of a crossed layout [seeds, prompts] without gaps; see :func:`two_way_means`."""
    (found,) = two_way_means(values[None], confidence=confidence)
    return found._replace(excluded=excluded)


def two_way_means(values: Floats, *, confidence: float = CONFIDENCE) -> list[Difference]:
    """Means of crossed layouts [layouts, seeds, prompts] and their t intervals.

    With one seed this is the t interval over prompts: it describes this checkpoint, not
    the recipe. If all values of a layout are equal, t is undefined: the p-value is that of the sign
    test over prompts.

    Parameters
    ----------
    values
        NaN for a missing value: the prompt is excluded from its layout, with all seeds, and
        counted.
    """
    gaps = np.asarray(np.isnan(values).any(axis=1))
    whole = np.asarray(~gaps.any(axis=1))
    found: list[Difference | None] = [None] * len(values)
    for place, result in zip(np.flatnonzero(whole), _whole(values[whole], confidence), strict=True):
        found[place] = result
    for place in np.flatnonzero(~whole):
        kept = values[place][:, ~gaps[place]]
        (result,) = _whole(kept[None], confidence)
        found[place] = result._replace(excluded=int(gaps[place].sum()))
    return [result for result in found if result is not None]


def _whole(values: Floats, confidence: float) -> list[Difference]:
    """Layouts [layouts, seeds, prompts] without gaps."""
    layouts, seeds, prompts = values.shape
    if prompts < 2:
        means = values.mean(axis=(1, 2)) if prompts else np.full(layouts, math.nan)
        return [Difference(float(m), None, None, prompts, seeds, 0, None, "none") for m in means]
    if not layouts:
        return []
    means = values.mean(axis=(1, 2))
    spread = mean_spread(values)
    # Rounding errors of equal values are no spread.
    flat = np.ptp(values, axis=(1, 2)) <= 1e-12 * np.maximum(1.0, np.abs(means))
    half = np.where(flat, 0.0, half_widths(spread, 1 - confidence))
    safe = spread._replace(variance=np.where(flat, 1.0, spread.variance))
    alike = np.where(np.abs(means) > 1e-12, 2.0 ** (1 - prompts), 1.0)
    found = np.where(flat, alike, p_values(means, safe))
    name = "t over prompts" if seeds == 1 else "t over seeds and prompts"
    return [
        Difference(m, m - h, m + h, prompts, seeds, 0, p, name)
        for m, h, p in zip(means.tolist(), half.tolist(), found.tolist(), strict=True)
    ]


# ---------------------------------------------------------------- many comparisons


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that hold for all comparisons together (Holm 1979), in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = list(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def mcnemar_of(changes: Floats) -> float:
    """Two-sided exact p-value from changes of a yes/no value per prompt (-1, 0, 1).

    Pooling several seeds has false positives far above its level: use
    :func:`paired_difference_over_seeds` instead.
    """
    from scipy.stats import binomtest

    up, down = int((changes > 0).sum()), int((changes < 0).sum())
    return float(binomtest(up, up + down).pvalue) if up != down else 1.0
