"""How the name of a metric is put together: ``METRIC``, ``METRIC/DOMAIN``, ``failure/CLASS``.

In: names of metrics. Out: their parts. Imports nothing; :mod:`.metrics` says what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

FAILURE = "failure/"


def base_of(metric: str) -> str:
    """The metric without its domain: ``pass@4`` of ``pass@4/retail``."""
    return metric if metric.startswith(FAILURE) else metric.partition("/")[0]


def domain_of(metric: str) -> str:
    """The domain that a metric is told of; empty where it is told of all."""
    return "" if metric.startswith(FAILURE) else metric.partition("/")[2]


def of_domain(metric: str, sample_ids: Sequence[str]) -> list[bool]:
    """Which prompts a metric is about: of one that is told by domain, those of that domain."""
    domain = domain_of(metric)
    return [not domain or one.startswith(f"{domain}/") for one in sample_ids]
