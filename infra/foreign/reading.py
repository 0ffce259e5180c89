"""What another trainer prints, as progress and metrics.

In: lines, and ``command.progress_pattern``. Out: per line the :class:`Progress` to tell, and the
step's numbers to log. Steps only grow: what a resumed trainer repeats is progress, and not logged
a second time.
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

from refiner_core.contract.types import Progress

PHASE = "train"


class Reading(NamedTuple):
    """What a line says; ``metrics`` is empty where it has none that is new."""

    progress: Progress
    step: int
    metrics: dict[str, float]


class LineReader:
    """Reads lines with a pattern whose groups are ``step``, ``total`` and metrics by name."""

    def __init__(self, pattern: str, logged_step: int = 0) -> None:
        self._pattern = re.compile(pattern)
        self._logged_step = logged_step
        self.progress = Progress(logged_step, 0, PHASE)

    def read(self, line: str) -> Reading | None:
        """What the line says of the training; None if nothing."""
        match = self._pattern.search(line)
        if match is None:
            return None
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        step = _number(groups.pop("step", ""))
        total = _number(groups.pop("total", ""))
        metrics = {
            name: value for name, text in groups.items() if (value := _number(text)) is not None
        }
        done = self.progress.done if step is None else int(step)
        self.progress = Progress(
            done,
            self.progress.total if total is None else int(total),
            PHASE,
            {**self.progress.values, **metrics},
        )
        if step is None or done < self._logged_step:
            return Reading(self.progress, done, {})
        if metrics:
            self._logged_step = done
        return Reading(self.progress, done, metrics)


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text.replace(",", "").rstrip("%"))
    return None
