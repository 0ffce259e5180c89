"""What a long training step says of itself: where it is, and where its time went.

In: counts and durations. Out: progress reports, at most one a second, and ``time/…`` metrics.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

#: Told of a part of a step, how many samples are done, and of how many. The first call of a part,
#: with no samples, says that it begins.
Tell = Callable[[str, int, int], None]

#: What the counts of a part are called.
_UNITS = {"generate": "samples_finished", "judge": "samples_judged"}
#: Part -> what it is called where agents are trained, and what its counts are.
_OF_AGENTS = {
    "generate": ("generate", "turns_finished", "turns"),
    "judge": ("score", "samples_scored", "samples"),
}
_EVERY_S = 1.0


class Teller:
    """Passes on that a part of a step begins, and then how far it is, at most once a second.

    ``report(part, values)`` gets it. ``turns``: what is generated are turns of an agent.
    """

    def __init__(
        self, report: Callable[[str, Mapping[str, float]], None], *, turns: bool = False
    ) -> None:
        self._report, self._last_s, self._turns = report, 0.0, turns

    def __call__(self, part: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if total and now_s - self._last_s < _EVERY_S:
            return
        self._last_s = now_s
        units, of = _UNITS[part], "samples"
        if self._turns:
            part, units, of = _OF_AGENTS[part]
        self._report(part, {units: float(done), of: float(total)} if total else {})


class Clock:
    """Wall-clock seconds of the parts of one step."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        """Add what the block takes to a part."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._parts[part] += time.perf_counter() - started

    def metrics(self, tokens: int, *, beside: float | None = None) -> dict[str, float]:
        """``time/PART_s``, ``time/step_s``, ``time/idle_s`` (the step without its parts) and the
        throughput. ``beside``: what sampling took in a thread; ``time/wait_s`` is then what the
        step waited for it. A batch that was sampled during a save is no faster for it."""
        total = time.perf_counter() - self._started
        parts = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        idle = max(0.0, total - sum(self._parts.values()))
        if beside is not None:
            parts["time/generate_s"] = parts.get("time/generate_s", 0.0) + beside
        out = {**parts, "time/idle_s": idle, "time/step_s": total}
        return {**out, "tokens_per_second": tokens / max(total, beside or 0.0)}
