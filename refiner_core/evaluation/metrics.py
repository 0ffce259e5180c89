"""What metrics are called, and what their names say of them.

In: names. Out: whether there is such a metric, which way it is good, what kind of number it is, of
which prompts it is told, and in which order metrics stand.

Answers (one prompt, one answer) have the fixed :data:`~refiner_core.evaluation.samples.METRICS`.
Episodes of an agent have those of :data:`EPISODE_METRICS`, the numbers of
:mod:`refiner_core.evaluation.pass_at_k` for each k, and the shares of attempts that failed for each
reason, ``failure/CLASS``. All but these are told by domain too, as ``METRIC/DOMAIN``. A number of a
task (``pass@4``) stands in the row of its first attempt alone, so that sums over rows are sums over
tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.environments.protocol import FAILURES
from refiner_core.evaluation.names import FAILURE, base_of
from refiner_core.evaluation.pass_at_k import FIRST, pass_names
from refiner_core.evaluation.samples import METRICS, NUMBERS, YES_NO, metric_kind
from refiner_core.evaluation.statistics import Kind

#: Of one attempt each, in the order of reports: ``success`` (yes or no), ``reward`` (the
#: environment's own), ``partial`` (weighted share of the checks that passed), turns, tokens that
#: the model sampled, turns that were repaired, calls that a tool refused, and whether the
#: infrastructure ended it (which alone has a value then).
EPISODE_METRICS = (
    "success",
    "reward",
    "partial",
    "turns",
    "length_tokens",
    "repairs",
    "tool_errors",
    "episode_error",
)
FAILURE_METRICS = tuple(f"{FAILURE}{name}" for name in FAILURES)
#: Those of them that are told by domain, beside what is told of tasks.
_BY_DOMAIN = ("success", "reward", "partial", "episode_error")
#: The metrics that have a protocol of their own: how checks (or judge and citations) are weighed
#: has a part in these alone.
WEIGHED = frozenset({"reward", "partial"})

#: The metrics that a short table shows, in its order; of agents the largest k stands with them.
_MAIN = ("format_valid", "rubric_score", "citation_f1", "reward", "oracle", "claims")
_MAIN_OF_TASKS = ("pass@1_first", "pass@1", "pass@k", "pass^k", "partial", "turns", "episode_error")

_PASS = re.compile(r"pass@1_first|pass[@^][1-9]\d*")
_EPISODE_YES_NO = frozenset({"success", "episode_error", FIRST})
_EPISODE_NUMBERS = frozenset({"turns", "repairs", "tool_errors"})
_LOWER = frozenset({"uncited", "judge_failed", "episode_error", "repairs", "tool_errors"})
_NEITHER = frozenset({"claims", "length_tokens", "turns"})


def episode_metrics(attempts: int, domains: Sequence[str]) -> tuple[str, ...]:
    """All metrics of an evaluation with so many attempts at each task, in the order of reports."""
    passes = pass_names(attempts)
    split = (*passes, *_BY_DOMAIN)
    by_domain = (f"{metric}/{domain}" for domain in domains for metric in split)
    return (*passes, *EPISODE_METRICS, *FAILURE_METRICS, *by_domain)


def of_tasks(metric: str) -> bool:
    """Whether it is a number of whole tasks, not of attempts."""
    return _PASS.fullmatch(base_of(metric)) is not None


def weighed(metric: str) -> bool:
    """Whether it is one of :data:`WEIGHED`, of whatever domain."""
    return base_of(metric) in WEIGHED


def of_episodes(metric: str) -> bool:
    """Whether episodes have such a metric."""
    base = base_of(metric)
    return of_tasks(metric) or base in EPISODE_METRICS or base in FAILURE_METRICS


def metrics_of(config: RecipeConfig) -> tuple[str, ...]:
    """What evaluations of a recipe may tell; of an agent without what is told by domain."""
    if not config.environment.name:
        return METRICS
    sampled = "sampled" in config.evaluate.decoding
    return episode_metrics(config.evaluate.num_samples if sampled else 1, ())


def main_metrics(metrics: Iterable[str]) -> list[str]:
    """Those that a short table shows, in its order."""
    found = set(metrics)
    ks = [int(m[5:]) for m in found if re.fullmatch(r"pass@\d+", m)]
    if not ks:
        return [m for m in _MAIN if m in found]
    if max(ks) == 1:  # of one attempt, pass@1 is all of them
        once = ("pass@1_first", "pass@k", "pass^k")
        return [m for m in _MAIN_OF_TASKS if m in found and m not in once]
    most = str(max(ks))
    named = (m.replace("k", most) if m in ("pass@k", "pass^k") else m for m in _MAIN_OF_TASKS)
    return [m for m in dict.fromkeys(named) if m in found]


def has_metric(config: RecipeConfig, metric: str) -> bool:
    """Whether evaluations of a recipe may tell it (whether there is such a domain, tasks say)."""
    return base_of(metric) in metrics_of(config)


def in_order(metrics: Iterable[str]) -> list[str]:
    """In the order of reports; those of episodes as they come."""
    found = list(dict.fromkeys(metrics))
    place = {metric: i for i, metric in enumerate(METRICS)}
    if any(metric not in place for metric in found):
        return found
    return sorted(found, key=lambda metric: place[metric])


def higher_is_better(metric: str) -> bool | None:
    """Which way a metric is good; None where neither is."""
    base = base_of(metric)
    if base in _NEITHER:
        return None
    return base not in _LOWER and not base.startswith(FAILURE)


def is_number(metric: str) -> bool:
    """Whether it is any number, and not a share in [0, 1]."""
    base = base_of(metric)
    return base in NUMBERS or base in _EPISODE_NUMBERS


def is_yes_no(metric: str) -> bool:
    """Whether a sample has or has not what it is about."""
    base = base_of(metric)
    return base in YES_NO or base in _EPISODE_YES_NO or base.startswith(FAILURE)


def once_per_prompt(metric: str, decoding: str) -> bool:
    """Whether a prompt has one value and no more, so that a yes or no is one trial."""
    return decoding == "greedy" or base_of(metric) == FIRST


def kind_of(metric: str, rows: Sequence[Mapping[str, Any]], config: RecipeConfig) -> Kind:
    """Which interval a metric of these rows may have. pass@k and pass^k are a yes or no of each
    task where k is the number of its attempts, and a share below."""
    if not of_episodes(metric) or metric in METRICS:
        return metric_kind(metric, config.reward)
    base = base_of(metric)
    if of_tasks(metric) and base != FIRST:
        attempts = max((int(row["sample_index"]) for row in rows), default=0) + 1
        return "yes_no" if int(base[5:]) == attempts else "share"
    if is_yes_no(metric):
        return "yes_no"
    return "number" if is_number(metric) else "share"
