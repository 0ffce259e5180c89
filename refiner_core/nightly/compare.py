"""One night held against another, prompt by prompt, and how much nights differ by themselves.

In: values per prompt. Out: a :class:`Shift` with what it has to be beyond.

The same prompts are asked in every night, so how hard they are cancels out: per prompt, now minus
then, and a t interval over prompts. That says nothing about what moves all prompts at once (a
server under load, other batches). The canary does: its weights never change, so the spread of its
own nights is all noise. It is taken from *successive* nights (their median absolute difference), so
that one real shift of the canary does not pass for spread. A difference has to be beyond both, and
a spread known from few nights has to be passed by far: at first nothing but large changes count.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
#: In units of the error: beyond it a night counts; a claim about weights needs as much as
#: ``CLAIMED`` above what the canary did; below ``MOVED`` nothing is said to have moved.
BEYOND, CLAIMED, MOVED = 3.0, 2.5, 2.0
#: Median of |N(0, 2 s^2)|, in units of s.
_MEDIAN_DIFFERENCE = 0.9538725524
#: Successive differences that are worth one degree of freedom: their median has 37 % of the
#: efficiency of a standard deviation, and neighbours share a night.
_STEPS_A_DEGREE = 2


class Values(NamedTuple):
    """Means per prompt; ``prompts`` are their ids, in the same order as ``values``."""

    prompts: tuple[str, ...]
    values: Floats

    @classmethod
    def of(cls, prompts: Sequence[str], values: Sequence[float]) -> Values:
        """From plain lists, in any order."""
        order = sorted(range(len(prompts)), key=lambda i: prompts[i])
        ordered = np.array([values[i] for i in order], dtype=float)
        return cls(tuple(prompts[i] for i in order), ordered)

    @property
    def mean(self) -> float:
        """Over prompts."""
        return float(self.values.mean()) if len(self.values) else math.nan


class Noise(NamedTuple):
    """Spread of one night's mean that prompts do not show, and how well it is known."""

    spread: float = 0.0
    freedom: int = 1


class Shift(NamedTuple):
    """Now minus then over ``n`` prompts that both have.

    ``error`` of the mean as prompts show it, and ``noise`` of the nights that are in it.
    """

    difference: float
    error: float
    n: int
    noise: Noise = Noise()

    def beyond(self, sigmas: float) -> bool:
        """Whether it is more than ``sigmas`` errors of both kinds, at the tails of t distributions:
        few prompts, and few nights, need more."""
        return self.n > 1 and abs(self.difference) > self.margin(sigmas)

    def margin(self, sigmas: float) -> float:
        """What it has to be beyond."""
        prompts = critical(sigmas, max(self.n, 2) - 1) * self.error
        if self.noise.spread == 0:
            return prompts
        return max(prompts, critical(sigmas, self.noise.freedom) * self.noise.spread)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, as prompts show it."""
        half = critical(1.959964, max(self.n, 2) - 1) * self.error
        return self.difference - half, self.difference + half

    @property
    def direction(self) -> int:
        """1 up, -1 down, 0."""
        return (self.difference > 0) - (self.difference < 0)


_NONE = Noise()


def compare(now: Values, then: Values, noise: Noise = _NONE) -> Shift:
    """Now minus then on the prompts that both have; ``noise`` is that of one night."""
    new, old = _paired(now, then)
    return shift_of(new - old, noise)


def shift_of(differences: Floats, noise: Noise = _NONE, nights: int = 2) -> Shift:
    """The mean of differences per prompt; ``nights`` are how many nights' noise is in it."""
    n = len(differences)
    if n < 2:
        return Shift(float(differences.sum()), math.inf, n, noise)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    whole = Noise(math.sqrt(nights) * noise.spread, noise.freedom)
    return Shift(float(differences.mean()), error, n, whole)


def apart(now: Values, then: Values, canary_now: Values, canary_then: Values) -> Floats:
    """Per prompt, how much further a model has moved than the canary between the same nights."""
    new, old = _paired(now, then)
    prompts = [p for p in now.prompts if p in set(then.prompts)]
    moved = {
        p: a - b
        for p, a, b in zip(
            *_shared(canary_now, canary_then),
            strict=True,
        )
    }
    kept = [i for i, p in enumerate(prompts) if p in moved]
    canary = np.array([moved[prompts[i]] for i in kept], dtype=float)
    return np.asarray((new - old)[kept] - canary, dtype=float)


def night_noise(means: Sequence[float]) -> Noise:
    """Spread of one night's mean, from those of the canary's nights so far, in order."""
    if len(means) < 2:
        return _NONE
    steps = np.abs(np.diff(np.asarray(means, dtype=float)))
    freedom = 1 + len(steps) // _STEPS_A_DEGREE
    return Noise(float(np.median(steps)) / _MEDIAN_DIFFERENCE, freedom)


def mean_of(nights: Sequence[Values]) -> Values:
    """Means per prompt over several nights, on the prompts that all of them have."""
    first = nights[0]
    if all(n.prompts == first.prompts for n in nights):
        return Values(first.prompts, np.mean([n.values for n in nights], axis=0))
    common = sorted(set(first.prompts).intersection(*(n.prompts for n in nights[1:])))
    tables = [dict(zip(n.prompts, n.values, strict=True)) for n in nights]
    return Values(
        tuple(common), np.array([np.mean([t[p] for t in tables]) for p in common], dtype=float)
    )


@functools.cache
def critical(sigmas: float, freedom: int) -> float:
    """As improbable for a t distribution as ``sigmas`` are for a normal one."""
    from scipy.stats import norm, t

    return float(t.isf(norm.sf(sigmas), freedom))


def per_prompt(rows: Sequence[Mapping[str, Any]], metric: str) -> Values:
    """Means per prompt of a metric in per-sample rows; prompts without one are left out."""
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(metric)
        if value is not None:
            found.setdefault(str(row["sample_id"]), []).append(float(value))
    return Values.of(list(found), [sum(v) / len(v) for v in found.values()])


def _paired(now: Values, then: Values) -> tuple[Floats, Floats]:
    if now.prompts == then.prompts:
        return now.values, then.values
    _, new, old = _shared(now, then)
    return new, old


def _shared(now: Values, then: Values) -> tuple[list[str], Floats, Floats]:
    before = dict(zip(then.prompts, then.values, strict=True))
    prompts = [p for p in now.prompts if p in before]
    after = dict(zip(now.prompts, now.values, strict=True))
    return (
        prompts,
        np.array([after[p] for p in prompts], dtype=float),
        np.array([before[p] for p in prompts], dtype=float),
    )
