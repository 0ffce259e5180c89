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
_NOTHING = Progress(0, 0, PHASE)
#: Numbers that only a step of training has, and a bar: signs of life where no pattern fits.
_NUMBERS = re.compile(r"\b(loss|grad_norm)\b\W{0,4}\d")
_BAR = re.compile(r"\b(\d+)/\d+ \[")


class Reading(NamedTuple):
    """What a line says; ``metrics`` is empty where it has none that is new."""

    progress: Progress
    step: int
    metrics: dict[str, float]


class LineReader:
    """Reads lines with a pattern whose groups are ``step``, ``total`` and metrics by name."""

    def __init__(self, pattern: str, told: Progress = _NOTHING) -> None:
        self._pattern = re.compile(pattern)
        self._logged_step = told.done + 1 if told.done else 0
        self.progress = told

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


def says_that_it_moves(line: str, first_step: int) -> bool:
    """Whether a line is of a training that has got beyond ``first_step``, whatever its pattern."""
    bar = _BAR.search(line)
    return bool(_NUMBERS.search(line)) or (bar is not None and int(bar.group(1)) > first_step)


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text.replace(",", "").rstrip("%"))
    return None
