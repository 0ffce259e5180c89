"""Parts of the name of a metric: ``METRIC``, ``METRIC/DOMAIN``, ``METRIC/people``,
``failure/CLASS``.

In: names of metrics. Out: their parts. Imports nothing; :mod:`.metrics` has the list of metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

FAILURE = "failure/"
#: In place of a domain: a mean corrected by people's labels, ``rubric_score/people``.
BY_PEOPLE = "people"
#: Classes of failed attempts, in words for tables and pages.
FAILURE_WORDS = {
    "no_call": "a turn that is no tool call, or none that can be read",
    "limit": "turns or context ran out",
    "rule_broken": "broke a rule",
    "wrong_tool": "called a tool that does not exist",
    "wrong_argument": "called a tool with arguments that it does not take",
    "gave_up": "gave up before the task was done",
    "incomplete": "ended with something missing or wrong",
}


def base_of(metric: str) -> str:
    """The metric without its domain: ``pass@4`` of ``pass@4/retail``."""
    return metric if metric.startswith(FAILURE) else metric.partition("/")[0]


def domain_of(metric: str) -> str:
    """The domain of a metric; empty for all domains."""
    return "" if metric.startswith(FAILURE) else metric.partition("/")[2]


def of_domain(metric: str, sample_ids: Sequence[str]) -> list[bool]:
    """Flags of the prompts of a metric: for a metric by domain, those of that domain."""
    domain = domain_of(metric)
    return [not domain or one.startswith(f"{domain}/") for one in sample_ids]


FIRST = "pass@1_first"


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that at least one of ``k`` of ``n`` attempts, ``c`` of them successes, succeeds.

    Correctly rounded for any ``n`` (binomials are exact); None with ``n`` below ``k``.
    """
    return None if n < k else (comb(n, k) - comb(n - c, k)) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """The chance that all of ``k`` of ``n`` attempts succeed; see :func:`pass_at_k`."""
    return None if n < k else comb(c, k) / comb(n, k)


def pass_names(attempts: int) -> tuple[str, ...]:
    """Metrics of tasks with that many attempts each, in order."""
    ks = range(1, attempts + 1)
    return (FIRST, *(f"pass@{k}" for k in ks), *(f"pass^{k}" for k in ks))


def task_passes(succeeded: Sequence[bool | None], attempts: int) -> dict[str, float | None]:
    """One task's part of every metric in :func:`pass_names`.

    Parameters
    ----------
    succeeded
        Per attempt, in the order of their numbers; None for one that the infrastructure
        ended, or that is missing.
    attempts
        Planned number of attempts.
    """
    valid = [one for one in succeeded if one is not None]
    n, c = len(valid), sum(valid)
    first = succeeded[0] if succeeded else None
    found: dict[str, float | None] = {FIRST: None if first is None else float(first)}
    ks = range(1, attempts + 1)
    found |= {f"pass@{k}": pass_at_k(n, c, k) for k in ks}
    return found | {f"pass^{k}": pass_hat_k(n, c, k) for k in ks}
