"""How the name of a metric is put together: ``METRIC``, ``METRIC/DOMAIN``, ``failure/CLASS``.

In: names of metrics. Out: their parts. Imports nothing; :mod:`.metrics` says what there is.
"""

from __future__ import annotations

from collections.abc import Sequence

FAILURE = "failure/"
#: Why an agent's attempt failed, by class, as tables and pages say it.
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
    """The domain that a metric is told of; empty where it is told of all."""
    return "" if metric.startswith(FAILURE) else metric.partition("/")[2]


def of_domain(metric: str, sample_ids: Sequence[str]) -> list[bool]:
    """Which prompts a metric is about: of one that is told by domain, those of that domain."""
    domain = domain_of(metric)
    return [not domain or one.startswith(f"{domain}/") for one in sample_ids]
