"""The event log of a call, and who works on it. One writer: the process that does.

In: events. Out: lines of the log, and the orchestrator's file. Neither decides anything, so what
cannot be written is logged, and the work goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from infra.host.processes import host_name
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)


class Diary:
    """Of one call.

    Parameters
    ----------
    workspace, run
        Where it is kept, and the call's id.
    owner
        The process that works on it.
    """

    def __init__(self, workspace: Workspace, run: str, owner: str) -> None:
        self._workspace, self._run, self._owner = workspace, run, owner
        self._log_works = True

    def note(self, event: Mapping[str, Any]) -> None:
        """One line in the run's event log."""
        path = self._workspace.layout.run(self._run).events
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": now_text(), **event}) + "\n")
        except OSError as error:
            if self._log_works:
                log.warning("the event log cannot be written: %s", error)
            self._log_works = False

    def write_orchestrator(self, state: str, exit_code: int | None) -> None:
        """Who works on the run, for `refiner status`, `cancel` and `resume` in other shells."""
        value = {"process": self._owner, "host": host_name(), "state": state}
        try:
            self._workspace.write_orchestrator(
                self._run, {**value, "exit_code": exit_code, "at": now_text()}
            )
        except OSError as error:
            log.warning("who works on the run could not be noted: %s", error)


def news_of(view: StageView | None) -> tuple[Any, ...]:
    """What of a stage's view is news when it changes; progress is not."""
    return () if view is None else (view.state, view.attempt, view.job_id)


def stage_event(view: StageView) -> dict[str, Any]:
    """A stage's view as an event."""
    return {
        "event": "stage",
        "stage": view.name,
        "state": view.state,
        "attempt": view.attempt,
        "job": view.job_id,
        "seconds": round(view.seconds, 3),
        "message": view.message,
    }
