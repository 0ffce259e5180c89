"""How a trial stands, in one word and a reason: from its stages, or from the error that ended it.

In: views of stages, or an error. Out: a :class:`TrialWord`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from refiner_core.contract.errors import RefinerError
from refiner_core.contract.views import StageView
from refiner_core.report.sweep.document import TrialState

log = logging.getLogger(__name__)
#: A trial that stands so is not worked on any more.
OVER: tuple[TrialState, ...] = ("done", "failed", "interrupted", "held")


@dataclass(frozen=True)
class TrialWord:
    """How a trial stands: its state, why, and the exit code that this would mean for a run."""

    state: TrialState = "waiting"
    reason: str = ""
    run: str = ""
    exit_code: int = 0


def word_of_views(views: Mapping[str, StageView], run: str) -> TrialWord:
    """How a trial ended, by its stages."""
    for state in ("failed", "interrupted"):
        for view in _in_order_of_cause(views.values(), state):
            said = f"{view.name}: {view.message}" if view.message else view.name
            return TrialWord(state, said, run, view.exit_code or 1)
    return TrialWord("done", run=run)


def _in_order_of_cause(views: Any, state: str) -> Iterator[StageView]:
    """Stages that ended so, those that did so by themselves before those that they stopped."""
    found = [v for v in views if v.state == state]
    yield from sorted(found, key=lambda v: v.message.startswith("needs "))


def word_of_error(error: Exception, run: str) -> TrialWord:
    """How a trial ended that an error has ended."""
    if isinstance(error, RefinerError):
        state: TrialState = "interrupted" if error.resumable else "failed"
        return TrialWord(state, str(error), run, error.exit_code)
    log.exception("a trial ends with an error", exc_info=error)
    return TrialWord("failed", f"{type(error).__name__}: {error}", run, 70)


def how(word: TrialWord) -> str:
    """``failed``: behind "has"."""
    return {"failed": "failed", "interrupted": "been stopped"}.get(word.state, word.state)
