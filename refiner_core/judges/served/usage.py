"""Counts of a judge's work, written by one thread and read by any.

In: what happened. Out: :class:`~refiner_core.contract.types.JudgeUsage`. Each call that was begun
is counted once more when it ended, by its status or by why there was none, so that at rest
``calls == sum(answers) + sum(lost)``.
"""

from __future__ import annotations

import threading
from collections import Counter

from refiner_core.contract.types import JudgeUsage

_MOST_NAMES = 8


class Counts:
    """The counters behind :meth:`snapshot`; every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: Counter[str] = Counter()
        self._answers: Counter[int] = Counter()
        self._lost: Counter[str] = Counter()
        self._unusable: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._latency_s = self._paused_s = 0.0

    def wanted(self, asked: int) -> None:
        """Judgements were asked for."""
        with self._lock:
            self._numbers["asked"] += asked

    def settled(self, *, stored: int, shared: int, failed: int) -> None:
        """A batch is complete."""
        with self._lock:
            self._numbers.update(stored=stored, shared=shared, failed=failed)

    def call(self, again: bool) -> None:
        """A call is sent."""
        with self._lock:
            self._numbers["calls"] += 1
            self._numbers["retries"] += again

    def answer(self, status: int, seconds: float) -> None:
        """It was answered."""
        with self._lock:
            self._answers[status] += 1
            self._latency_s += seconds

    def lost(self, reason: str) -> None:
        """It was not."""
        with self._lock:
            self._lost[reason] += 1

    def unusable(self, reason: str) -> None:
        """An answer of status 200 gave no usable judgement."""
        with self._lock:
            self._unusable[reason] += 1

    def tokens(self, prompt: int, completion: int) -> None:
        """A reply says what it took."""
        with self._lock:
            self._numbers["prompt_tokens"] += prompt
            self._numbers["completion_tokens"] += completion

    def served(self, name: str) -> None:
        """A reply says who wrote it; of many names the first few are kept."""
        with self._lock:
            if name and (name in self._served or len(self._served) < _MOST_NAMES):
                self._served[name] += 1

    def paused(self, seconds: float) -> None:
        """Nobody could be asked for so long."""
        with self._lock:
            self._paused_s += seconds

    def snapshot(self) -> JudgeUsage:
        """All of it, at one moment."""
        with self._lock:
            return JudgeUsage(
                **self._numbers,
                answers=dict(self._answers),
                lost=dict(self._lost),
                unusable=dict(self._unusable),
                served=dict(self._served),
                latency_s=self._latency_s,
                paused_s=self._paused_s,
            )
