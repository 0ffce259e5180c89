"""How a run looks while it is worked on: a :class:`StageView` per stage, for terminals and UIs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from refiner_core.contract.types import Progress

ViewState = Literal[
    "waiting",  # for inputs, for a free local slot, or out a pause between two attempts
    "paused",  # for room on the disk; it goes on by itself
    "queued",  # submitted; the scheduler has not started it yet, or has suspended it
    "running",  # started by this call
    "reattached",  # found running, started by an earlier call or another process
    "skipped",  # was done before this call
    "done",  # finished during this call
    "failed",
    "interrupted",  # stopped on request or resumable; the same command goes on
    "blocked",  # an input failed
]
TERMINAL: frozenset[ViewState] = frozenset({"skipped", "done", "failed", "interrupted", "blocked"})


@dataclass(frozen=True)
class StageView:
    """What a person may know of a stage right now."""

    name: str
    kind: str
    fingerprint: str
    state: ViewState
    attempt: int = 0
    job_id: str | None = None
    progress: Progress | None = None
    seconds: float = 0.0  # of work, summed over this call's attempts
    message: str = ""
    log: str = ""  # path of the newest attempt's log
    exit_code: int = 0  # of a failed or interrupted stage (errors.EXIT_CODES)
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen to it in this call."""
        return self.state in TERMINAL
