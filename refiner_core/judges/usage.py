"""What a judge has done, as differences, sums, metrics and JSON.

In: :class:`~refiner_core.contract.types.JudgeUsage` values. Out: the usage between two of them, a
sum over attempts, numbers of a step (``judge/*``), and what a report or checkpoint keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from refiner_core.contract.types import Judge, JudgeUsage, StreamingJudge


def usage_of(judge: Judge) -> JudgeUsage | None:
    """What a judge has done since it was made; None where it keeps no count."""
    return judge.usage() if isinstance(judge, StreamingJudge) else None


def usage_between(before: JudgeUsage, now: JudgeUsage) -> JudgeUsage:
    """What was done from ``before`` to ``now``."""
    return _each(operator.sub, now, before)


def usage_sum(one: JudgeUsage, other: JudgeUsage) -> JudgeUsage:
    """Both together."""
    return _each(operator.add, one, other)


def usage_metrics(usage: JudgeUsage) -> dict[str, float]:
    """The numbers that a step logs. They are measurements: what a store knows already, and how a
    server felt that day, makes them differ between runs that are otherwise the same."""
    answered = sum(usage.answers.values())
    return {
        "judge/asked": usage.asked,
        "judge/stored": usage.stored,
        "judge/shared": usage.shared,
        "judge/failed": usage.failed,
        "judge/calls": usage.calls,
        "judge/retries": usage.retries,
        "judge/prompt_tokens": usage.prompt_tokens,
        "judge/completion_tokens": usage.completion_tokens,
        "judge/latency_mean_s": usage.latency_s / answered if answered else 0.0,
        "judge/paused_s": usage.paused_s,
    }


def usage_to_json(usage: JudgeUsage) -> dict[str, Any]:
    """JSON-ready; HTTP statuses become text."""
    value = asdict(usage)
    value["answers"] = {str(status): n for status, n in sorted(usage.answers.items())}
    return value


def usage_from_json(value: Mapping[str, Any]) -> JudgeUsage:
    """What :func:`usage_to_json` wrote; what an older version did not count is 0."""
    known = {f.name: value[f.name] for f in fields(JudgeUsage) if f.name in value}
    if "answers" in known:
        known["answers"] = {int(status): n for status, n in known["answers"].items()}
    return JudgeUsage(**known)


def _each(combine: Callable[[Any, Any], Any], one: JudgeUsage, other: JudgeUsage) -> JudgeUsage:
    """Combine number by number, and counts by key; counts that come to 0 are left out."""
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(JudgeUsage)):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, Mapping):
            keys = sorted({*a, *b})
            counts = {key: combine(a.get(key, 0), b.get(key, 0)) for key in keys}
            values[name] = {key: n for key, n in counts.items() if n}
        else:
            values[name] = combine(a, b)
    return JudgeUsage(**values)
