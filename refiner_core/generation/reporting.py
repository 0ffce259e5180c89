"""Progress of stages that sample batch after batch.

In: a stage's IO. Out: progress on it, within a batch at most once a second.
"""

from __future__ import annotations

import time

from refiner_core.contract.types import Progress, StageIO


class BatchReporter:
    """``unit`` names the elements of a batch in the plural: samples, attempts."""

    def __init__(self, io: StageIO, total: int, unit: str) -> None:
        self._io, self.total, self._unit = io, total, unit
        self._done, self._phase = 0, ""
        self._last_s = time.monotonic()

    def batch(self, done: int, phase: str) -> None:
        """``done`` batches are finished; ``phase`` begins."""
        self._done, self._phase = done, phase
        self._io.progress(Progress(done=done, total=self.total, phase=phase))

    def step(self, finished: int, asked: int) -> None:
        """Report progress of decoding within the batch."""
        self._within(f"{self._unit}_finished", finished, self._unit, asked)

    def turn(self, finished: int, turns: int) -> None:
        """Report progress of an agent's turns, all that a generator knows."""
        self._within("turns_finished", finished, "turns", turns)

    def judged(self, judged: int, asked: int) -> None:
        """Report progress of judging the previous batch."""
        self._within(f"{self._unit}_judged", judged, self._unit, asked)

    def _within(self, what: str, count: int, of: str, all_of_them: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < 1.0:
            return
        self._last_s = now_s
        values = {what: float(count), of: float(all_of_them)}
        self._io.progress(Progress(self._done, self.total, self._phase, values))
