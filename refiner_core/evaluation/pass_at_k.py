"""How often a task is solved: by one of k attempts (pass@k), by all of k (pass^k).

In: of one task, which of its attempts succeeded. Out: its part of each number. Pure.

Of n attempts with c successes, k drawn without putting back:

=========== ============================= =====================================================
pass@k      1 - C(n - c, k) / C(n, k)     at least one of the k succeeds: Chen et al. 2021,
                                          "Evaluating Large Language Models Trained on Code"
pass^k      C(c, k) / C(n, k)             all of the k succeed: Yao et al. 2024, "tau-bench"
pass@1_first                              the first attempt succeeds; nothing is averaged
=========== ============================= =====================================================

The first two are unbiased for k attempts of their own; pass@1 and pass^1 are c / n. With fewer
than k attempts neither is defined: None, not 0. An attempt that the infrastructure ended is none of
the n. Where it is the first one, pass@1_first has no value for that task: taking the second in its
place would make it another number than the one that it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from refiner_core.contract.errors import ConfigurationError

FIRST = "pass@1_first"


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of ``k`` of ``n`` attempts, ``c`` of them successes, succeeds.

    Returns
    -------
    float or None
        Correctly rounded however large ``n`` is (binomials are exact); None with ``n`` below ``k``.

    Raises
    ------
    ConfigurationError
        ``k`` is below 1, or ``c`` no number of successes of ``n``.
    """
    _check(n, c, k)
    if n < k:
        return None
    ways = comb(n, k)
    return (ways - comb(n - c, k)) / ways


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """The chance that all of ``k`` of ``n`` attempts succeed; as :func:`pass_at_k`."""
    _check(n, c, k)
    return None if n < k else comb(c, k) / comb(n, k)


def _check(n: int, c: int, k: int) -> None:
    if k < 1 or not 0 <= c <= n:
        raise ConfigurationError(
            f"There is no pass@{k} of {c} successes in {n} attempts",
            expected="k of at least 1, and between 0 and n successes",
            fix="give k, n and c as counts of one task's attempts",
        )


def pass_names(attempts: int) -> tuple[str, ...]:
    """What is told of tasks with so many attempts each, in order."""
    ks = range(1, attempts + 1)
    return (FIRST, *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks))


def task_passes(succeeded: Sequence[bool | None], attempts: int) -> dict[str, float | None]:
    """One task's part of every number that :func:`pass_names` gives.

    Parameters
    ----------
    succeeded
        Per attempt, in the order in which they were numbered; None for one that the infrastructure
        ended, or that is missing.
    attempts
        How many there were to be.
    """
    valid = [one for one in succeeded if one is not None]
    n, c = len(valid), sum(valid)
    first = succeeded[0] if succeeded else None
    found: dict[str, float | None] = {FIRST: None if first is None else float(first)}
    ks = range(1, attempts + 1)
    found |= {f"pass@{k}": pass_at_k(n, c, k) for k in ks}
    return found | {f"pass^{k}": pass_hat_k(n, c, k) for k in ks}
