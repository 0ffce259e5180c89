"""Surroundings of a judge, and what it has done in them.

In: store, endpoints and callbacks; what happened, noted by one thread and read by any. Out:
:class:`~refiner_core.contract.types.JudgeUsage` values, their differences and sums, numbers of a
step (``judge/*``), and what a report or checkpoint keeps. Each call that was begun is counted once
more when it ended, by its status or by why there was none, so that at rest
``calls == sum(answers) + sum(lost)``.

The store here is that of this process; the workspace's is `infra`'s. A failed judgement is never
kept.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from refiner_core.contract.types import (
    Endpoint,
    Judge,
    JudgementStore,
    JudgeUsage,
    StoredJudgement,
    StreamingJudge,
)


@dataclass(frozen=True)
class Surroundings:
    """Resources that a judge may use besides its configuration.

    Attributes
    ----------
    store
        Where judgements are kept; none keeps them for the life of the judge.
    endpoints
        Where it may ask, looked up anew whenever no server answers (a server that refiner serves
        may come back elsewhere), from a thread of its own; none takes the configuration's
        addresses. They come with keys of their own: the user's (``judge.api_key_env``) goes to the
        configuration's addresses alone. What it raises ends the judging.
    should_stop
        Whether somebody wants it to end while it waits for servers.
    on_pause
        Told in words when all servers are gone, and with an empty text when one is back; like
        ``should_stop`` from the thread that waits for judgements.
    """

    store: JudgementStore | None = None
    endpoints: Callable[[], Sequence[Endpoint]] | None = None
    should_stop: Callable[[], bool] = lambda: False
    on_pause: Callable[[str], None] = lambda _: None


#: About 20 MB.
_LARGEST = 100_000


class MemoryStore:
    """Implements :class:`~refiner_core.contract.types.JudgementStore`; forgets the oldest."""

    def __init__(self, largest: int = _LARGEST) -> None:
        self._largest = largest
        self._known: OrderedDict[bytes, StoredJudgement] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Give what is known, in order."""
        with self._lock:
            return [self._known.get(key) for key in keys]

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Keep one."""
        with self._lock:
            self._known[key] = judgement
            if len(self._known) > self._largest:
                self._known.popitem(last=False)

    def flush(self) -> None:
        """Nothing: memory is all there is."""


_MOST_NAMES = 8


class Counts:
    """The counters behind :meth:`snapshot`; every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._by_key = {of: Counter[Any]() for of in ("answers", "lost", "unusable", "served")}

    def add(self, **numbers: float) -> None:
        """Add to fields of :class:`JudgeUsage` that are numbers."""
        with self._lock:
            self._numbers.update(numbers)

    def count(self, of: str, key: int | str) -> None:
        """Add one to a field that counts by key; of many names of servers the first few stay."""
        with self._lock:
            counts = self._by_key[of]
            if of != "served" or key in counts or len(counts) < _MOST_NAMES:
                counts[key] += 1

    def snapshot(self) -> JudgeUsage:
        """All of it, at one moment."""
        with self._lock:
            by_key = {of: dict(counts) for of, counts in self._by_key.items()}
            fields: dict[str, Any] = {**self._numbers, **by_key}
            return JudgeUsage(**fields)


def usage_of(judge: Judge) -> JudgeUsage | None:
    """Give what a judge has done since it was made; None where it keeps no count."""
    return judge.usage() if isinstance(judge, StreamingJudge) else None


def usage_between(before: JudgeUsage, now: JudgeUsage) -> JudgeUsage:
    """Give what was done from ``before`` to ``now``."""
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
    """Read what :func:`usage_to_json` wrote; what an older version did not count is 0."""
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
