"""Resources and usage counts of a judge.

In: store, endpoints and callbacks; events, recorded by one thread and read by any. Out:
:class:`~refiner_core.contract.types.JudgeUsage` values, their differences and sums, metrics of a
step (``judge/*``), and their form in reports and checkpoints. Each started call is counted once
more at its end, by its status or by the reason for having none, so that at rest
``calls == sum(answers) + sum(lost)``.

The store here is that of this process; the workspace's is in `infra`. Failed judgements are never
stored.
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
class JudgeContext:
    """Resources that a judge uses besides its configuration.

    Attributes
    ----------
    store
        Storage of judgements; None: in memory, for the life of the judge.
    endpoints
        Addresses, looked up again in a separate thread whenever no server answers (a server
        started by refiner may come back elsewhere); None uses the configuration's addresses. They
        have their own keys: the user's (``judge.api_key_env``) is sent only to the
        configuration's addresses. An exception from it ends the judging.
    should_stop
        Whether to stop while waiting for servers.
    on_pause
        Called with a text when all servers are gone, and with an empty text when one is back;
        like ``should_stop`` from the thread that waits for judgements.
    """

    store: JudgementStore | None = None
    endpoints: Callable[[], Sequence[Endpoint]] | None = None
    should_stop: Callable[[], bool] = lambda: False
    on_pause: Callable[[str], None] = lambda _: None


#: About 20 MB.
_LARGEST = 100_000


class MemoryStore:
    """Implements :class:`~refiner_core.contract.types.JudgementStore`; drops the oldest entries."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, StoredJudgement] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, keys: Sequence[bytes]) -> list[StoredJudgement | None]:
        """Known judgements, in order."""
        with self._lock:
            return [self._known.get(key) for key in keys]

    def put(self, key: bytes, judgement: StoredJudgement) -> None:
        """Keep one."""
        with self._lock:
            self._known[key] = judgement
            if len(self._known) > _LARGEST:
                self._known.popitem(last=False)

    def flush(self) -> None:
        """Do nothing: memory is the only storage."""


_MOST_NAMES = 8


class UsageCounts:
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
        """Add one to a field that counts by key; only the first few names of servers are kept."""
        with self._lock:
            counts = self._by_key[of]
            if of != "served" or key in counts or len(counts) < _MOST_NAMES:
                counts[key] += 1

    def snapshot(self) -> JudgeUsage:
        """A consistent copy of all counts."""
        with self._lock:
            by_key = {of: dict(counts) for of, counts in self._by_key.items()}
            fields: dict[str, Any] = {**self._numbers, **by_key}
            return JudgeUsage(**fields)


def usage_of(judge: Judge) -> JudgeUsage | None:
    """Usage of a judge since it was created; None if it keeps no count."""
    return judge.usage() if isinstance(judge, StreamingJudge) else None


def usage_between(before: JudgeUsage, now: JudgeUsage) -> JudgeUsage:
    """Usage from ``before`` to ``now``."""
    return _each(operator.sub, now, before)


def usage_sum(one: JudgeUsage, other: JudgeUsage) -> JudgeUsage:
    """Both together."""
    return _each(operator.add, one, other)


def usage_metrics(usage: JudgeUsage) -> dict[str, float]:
    """The metrics of a step. They are measurements: the store's content and the servers' speed make
    them differ between otherwise equal runs."""
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
    """JSON-ready form; HTTP statuses become text."""
    value = asdict(usage)
    value["answers"] = {str(status): n for status, n in sorted(usage.answers.items())}
    return value


def usage_from_json(value: Mapping[str, Any]) -> JudgeUsage:
    """Read the form of :func:`usage_to_json`; fields missing in older versions are 0."""
    known = {f.name: value[f.name] for f in fields(JudgeUsage) if f.name in value}
    if "answers" in known:
        known["answers"] = {int(status): n for status, n in known["answers"].items()}
    return JudgeUsage(**known)


def _each(combine: Callable[[Any, Any], Any], one: JudgeUsage, other: JudgeUsage) -> JudgeUsage:
    """Combine number by number, and counts by key; zero counts are dropped."""
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
