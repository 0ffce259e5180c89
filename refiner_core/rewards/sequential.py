"""Sequential test: has the proxy risen while the gold reward fell or stood?

In: per-row scores of proxy (the training reward) and gold on the same fixed rows at each monitored
point, as shares of their ranges, in [0, 1]; NaN without a score. Out: evidence after each point, an
*e-value*; the alarm is at ``1 / alpha``.

**Hypothesis.** For two points r < s, let p and g be the mean expected rises of proxy and gold over
the rows, given the weights at r and s. The pair *parts* if p > 0 and g < keep * p. The null
hypothesis is that no pair parts: wherever the proxy has risen, gold has kept at least the share
``keep`` of its rise. The probability that an alarm is ever raised under it is at most ``alpha``,
however often the evidence is looked at. An alarm says: at least one pair has parted. It names the
pair with the most evidence (``since``), which the bound does not cover. With ``keep`` 0 gold must
fall; a larger ``keep`` makes "stands" detectable.

**Assumptions.** (1) Given all weights of the run, rows are independent of each other: samples are
seeded by row, and the judge scores rows independently. Points may depend on each other in any way,
rows may have different means. (2) The monitored rows and scores do not influence the weights.
(3) The judge does not change over time. (4) Missing scores do not depend on quality.
If the rows are a random choice, the same holds for the population that they are drawn from.

**Proof.** Let X_1 … X_n be independent, in [-b, b], with a mean expectation of at most 0, and
0 <= t < 1/b. Then E prod(1 + t X_i) = prod(1 + t E X_i) <= (1 + t mean E X_i)^n <= 1, by the
inequality of arithmetic and geometric means; so is the mean over a grid of t. Such a value with an
expectation of at most 1 is an e-value. X = p_i tests "the proxy has not risen" (b = 1), and
X = keep * p_i - g_i tests "gold has kept up" (b = 1 + keep). Under the null hypothesis one of both
is true of each pair, so that the smaller of the two e-values is one, too. A sum of the pairs'
values with weights fixed beforehand, which sum to 1, has an expectation of at most 1 whatever their
dependence, and only grows with further points; by Markov's inequality its limit exceeds
``1 / alpha`` with probability at most ``alpha``, and so does any partial sum. ∎

Half of the weight is for pairs with the first point, half for the others: gold that first rises and
then falls is compared with its peak.

Sources: bets on bounded means, Waudby-Smith and Ramdas (2024), JRSS B 86(1); sums of e-values, Vovk
and Wang (2021), Annals of Statistics 49(3); the pattern of proxy and gold, Gao, Schulman and Hilton
(2023), ICML.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
#: Grid of t, as shares of its limit.
_BETS = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8])
#: Least share of the proxy's rise that gold must keep, by default.
KEEP = 0.25


class Evidence(NamedTuple):
    """Evidence after each point.

    Attributes
    ----------
    log_e
        Natural logarithm of the e-value; it never falls. Minus infinity at the first point.
    since
        The earlier point from which each point has parted most; 0 for the first.
    """

    log_e: Floats
    since: npt.NDArray[np.int64]

    def first_alarm(self, alpha: float) -> int | None:
        """The first point with an alarm; None without one."""
        reached = np.flatnonzero(self.log_e >= -math.log(alpha))
        return int(reached[0]) if reached.size else None


def evidence(proxy: Floats, gold: Floats, *, looks: int, keep: float = KEEP) -> Evidence:
    """Evidence that proxy and gold have parted. Pure; its cost grows with the square of the points.

    Parameters
    ----------
    proxy, gold
        Scores [points, rows] in [0, 1], NaN without one, the first point first.
    looks
        Number of points planned after the first, fixed before the first look.
    keep
        Least share of the proxy's rise that gold must keep, in [0, 1].

    Raises
    ------
    ValueError
        Shapes or ranges are others, or there are more points than planned.
    """
    if proxy.shape != gold.shape or proxy.ndim != 2 or not 0 < len(proxy) <= looks + 1:
        raise ValueError(f"scores {proxy.shape} and {gold.shape} with {looks} planned looks")
    known = np.concatenate([proxy, gold])
    if ((known < 0) | (known > 1)).any() or not 0 <= keep <= 1:
        raise ValueError("scores and keep must lie in [0, 1]")
    log_e, since = np.full(len(proxy), -math.inf), np.zeros(len(proxy), np.int64)
    for point in range(1, len(proxy)):
        rise_p, rise_g = proxy[point] - proxy[:point], gold[point] - gold[:point]
        rise_p, rise_g = (np.where(np.isnan(rise_p + rise_g), 0.0, x) for x in (rise_p, rise_g))
        parted = np.minimum(
            _log_e_value(rise_p, 1.0), _log_e_value(keep * rise_p - rise_g, 1.0 + keep)
        )
        weighed = parted + _log_weights(point, looks)
        log_e[point] = np.logaddexp.reduce([log_e[point - 1], *weighed])
        since[point] = int(np.argmax(weighed))
    return Evidence(log_e, since)


def _log_e_value(values: Floats, bound: float) -> Floats:
    """Logarithm of the e-value against a mean of at most 0, of values [..., rows] in [-bound,
    bound]. A value of 0 bets nothing."""
    terms = [np.log1p(bet / bound * values).sum(axis=-1) for bet in _BETS]
    total: Floats = np.logaddexp.reduce(terms, axis=0) - math.log(len(_BETS))
    return total


def _log_weights(point: int, looks: int) -> Floats:
    """Logarithms of the weights of the pairs (0, point) … (point - 1, point)."""
    if looks == 1:
        return np.zeros(1)
    weights = np.full(point, 1.0 / (looks * (looks - 1)))
    weights[0] = 0.5 / looks
    log_weights: Floats = np.log(weights)
    return log_weights
