"""How far two series of scores agree.

In: two series of scores of the same things, in order, and which question each belongs to. Out: raw
agreement and Cohen's kappa, with intervals over questions. A score that is missing on either side
(None: the judge failed) takes its pair out of the count; it is never a number.

Raw agreement alone flatters judges that nearly always say the same. Cohen's kappa (Cohen 1960, "A
coefficient of agreement for nominal scales", Educational and Psychological Measurement 20:37-46) is
the agreement beyond what the two would reach by chance with their own frequencies, 0 for none and 1
for all. The quadratic form (Cohen 1968, "Weighted kappa", Psychological Bulletin 70:213-220) counts
a disagreement by the square of its size, so that 0 against 1 is worse than 0 against 0.5.

Pure functions over NumPy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.statistics import CONFIDENCE, Estimate, estimate

Weights = Literal["quadratic"] | None
Floats = npt.NDArray[np.float64]

#: Scores that differ by less are the same score.
_PLACES = 9
#: Resamples in which all scores are equal have no kappa; with more than this share of them, the
#: rest would give an interval of luck.
_MOST_UNDEFINED = 0.05


class Share(NamedTuple):
    """``numerator`` of ``denominator``."""

    numerator: int
    denominator: int

    @property
    def value(self) -> float | None:
        """The share; None of nothing."""
        return self.numerator / self.denominator if self.denominator else None


class Kappa(NamedTuple):
    """A kappa and its interval, each None where it is not defined or too little is known."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Agreement:
    """Agreement of two series.

    ``pairs`` have a score on both sides and stand behind every number here, ``left_out`` lack one;
    ``questions`` are the independent units behind the intervals. ``raw`` is None without pairs.
    """

    pairs: int
    left_out: int
    questions: int
    raw: Estimate | None
    kappa: Kappa
    quadratic: Kappa
    mean_difference: float | None  # mean of second minus first: which one is milder


def raw_agreement(a: Sequence[float], b: Sequence[float]) -> Share:
    """How many of the pairs are equal.

    Raises
    ------
    ConfigurationError
        The series differ in length.
    """
    first, second = _aligned(a, b)
    return Share(int((first == second).sum()), len(first))


def cohen_kappa(a: Sequence[float], b: Sequence[float], weights: Weights = None) -> float | None:
    """Cohen's kappa of two series of scores.

    Parameters
    ----------
    a, b
        Scores of the same things, in order. Any numbers: each distinct one is a category.
    weights
        None counts every disagreement alike; ``quadratic`` by the square of the distance.

    Returns
    -------
    float or None
        At most 1; below 0 for less agreement than by chance. None where it is not defined: there
        are no pairs, or both sides always give one and the same score, so that chance explains all.

    Raises
    ------
    ConfigurationError
        The series differ in length.
    """
    first, second = _aligned(a, b)
    if not len(first):
        return None
    tables, values = _tables(first, second, np.zeros(len(first), dtype=np.int64), 1)
    kappa = float(_kappas(tables.astype(np.float64), values, weights)[0])
    return None if np.isnan(kappa) else kappa


def agreement(
    a: Sequence[float | None],
    b: Sequence[float | None],
    questions: Sequence[Hashable],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> Agreement:
    """Agreement with intervals of 95 % over questions.

    Scores of one question resemble each other, so a question is what is drawn again, with all its
    pairs. ``questions`` names that of each pair. An interval is None for fewer than two questions,
    and for a kappa that more than 5 % of the draws leave undefined, or that all of them leave the
    same (the interval of ``raw`` says how little that may mean).

    Raises
    ------
    ConfigurationError
        The series differ in length.
    """
    if not len(a) == len(b) == len(questions):
        raise _unequal(len(a), len(b))
    kept = [
        (x, y, q)
        for x, y, q in zip(a, b, questions, strict=True)
        if x is not None and y is not None
    ]
    left_out = len(a) - len(kept)
    if not kept:
        nothing = Kappa(None, None, None)
        return Agreement(0, left_out, 0, None, nothing, nothing, None)
    first, second = _aligned([x for x, _, _ in kept], [y for _, y, _ in kept])
    numbers = {q: i for i, q in enumerate(dict.fromkeys(q for _, _, q in kept))}
    unit = np.array([numbers[q] for _, _, q in kept])
    rows = [
        {"sample_id": str(u), "equal": float(x == y)}
        for u, x, y in zip(unit, first, second, strict=True)
    ]
    tables, values = _tables(first, second, unit, len(numbers))
    drawn = _drawn(tables, resamples, seed) if len(numbers) > 1 else None
    return Agreement(
        pairs=len(kept),
        left_out=left_out,
        questions=len(numbers),
        raw=estimate(rows, "equal", kind="yes_no", resamples=resamples, seed=seed),
        kappa=_with_interval(tables, drawn, values, None),
        quadratic=_with_interval(tables, drawn, values, "quadratic"),
        mean_difference=float((second - first).mean()),
    )


def _aligned(a: Sequence[float], b: Sequence[float]) -> tuple[Floats, Floats]:
    if len(a) != len(b):
        raise _unequal(len(a), len(b))
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return first.round(_PLACES), second.round(_PLACES)


def _unequal(first: int, second: int) -> ConfigurationError:
    return ConfigurationError(
        f"{first} scores cannot be held against {second}",
        expected="two scores of the same things, in order",
        fix="let both judges score the same requests",
    )


def _tables(
    a: Floats, b: Floats, unit: npt.NDArray[np.int64], units: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Counts [units, values, values] of (first, second), and the distinct values."""
    values = np.unique(np.concatenate([a, b]))
    tables = np.zeros((units, len(values), len(values)), dtype=np.int64)
    np.add.at(tables, (unit, np.searchsorted(values, a), np.searchsorted(values, b)), 1)
    return tables, values


def _drawn(tables: npt.NDArray[np.int64], resamples: int, seed: int) -> Floats:
    """Summed tables [resamples, values, values] of units drawn with replacement."""
    units = len(tables)
    counts = np.random.default_rng(seed).multinomial(
        units, np.full(units, 1 / units), size=resamples
    )
    flat = counts.astype(np.float64) @ tables.reshape(units, -1).astype(np.float64)
    return flat.reshape(resamples, *tables.shape[1:])


def _kappas(tables: Floats, values: Floats, weights: Weights) -> Floats:
    """Kappa of each table [n, values, values]; NaN where chance explains all."""
    distance = np.subtract.outer(values, values)
    cost = (distance != 0).astype(np.float64) if weights is None else distance**2
    total = tables.sum(axis=(1, 2))
    rows, columns = tables.sum(axis=2), tables.sum(axis=1)
    observed = (tables * cost).sum(axis=(1, 2)) * total
    by_chance = np.einsum("ni,ij,nj->n", rows, cost, columns)
    undefined = np.full(len(tables), np.nan)
    ratio = np.divide(observed, by_chance, out=undefined, where=by_chance > 0)
    kappas: Floats = 1.0 - ratio
    return kappas


def _with_interval(
    tables: npt.NDArray[np.int64], drawn: Floats | None, values: Floats, weights: Weights
) -> Kappa:
    whole = tables.sum(axis=0, keepdims=True).astype(np.float64)
    value = float(_kappas(whole, values, weights)[0])
    if np.isnan(value):
        return Kappa(None, None, None)
    if drawn is None:
        return Kappa(value, None, None)
    found = _kappas(drawn, values, weights)
    known = found[~np.isnan(found)]
    if len(known) < (1 - _MOST_UNDEFINED) * len(found):
        return Kappa(value, None, None)
    if np.ptp(known) < 10**-_PLACES:  # as where all are equal: drawing again says nothing
        return Kappa(value, None, None)
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Kappa(value, float(low), float(high))
