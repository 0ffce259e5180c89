"""A run that an orchestrator works on: its plan, its records, and how its stages look.

In: a plan and the record of a call. Out: a :class:`Member`: a whole run, a trial of a sweep, or one
checkpoint of a night. Each keeps its own event log, leases of servers and views, so that whoever
looks at a run afterwards finds the same, however many were worked on together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from infra.host.processes import ProcessId
from infra.orchestrator.actions import StopWish
from infra.orchestrator.diary import Diary, news_of, stage_event
from infra.orchestrator.outage import Outage, with_patience
from infra.orchestrator.union import stages_by_id
from infra.store.holds import Holds
from infra.store.leases import CallLeases
from infra.store.orchestrators import take_up
from infra.store.snapshot import require_snapshot
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)


class Member:
    """One of the runs of an orchestrator.

    Parameters
    ----------
    plan, run, workspace
        What should be, the call, and where it is recorded. The call's ``code`` names the snapshot
        that its jobs import.
    name
        Tells it from the others, such as ``ARM/seed1``; empty for a run alone.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunRecord,
        workspace: Workspace,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.run, self.name = plan, run, name
        #: By id: as the plan has them, and with their inputs by id, too.
        self.planned = {stage.id: stage for stage in plan.stages}
        self.stages, self.given = stages_by_id(plan)
        self.ids = frozenset((*self.stages, *self.given))
        self.holds = Holds(plan, workspace.layout)
        self.leases = CallLeases(workspace, run.run, clock)
        self.outage = Outage(plan.config.dispatch.poll_s, clock, self.note)
        #: What was done when it began; None before the first look.
        self.done_before: frozenset[str] | None = None
        #: Stages that somebody has cancelled, by id.
        self.cancelled: dict[str, StopWish] = {}
        self._workspace, self._diary = workspace, Diary(workspace, run.run, str(ProcessId.of()))
        self._views: dict[str, StageView] = {}
        self._lock = threading.Lock()

    def take_up(self, *, regardless: bool = False) -> None:
        """Take the run up in this process; whoever follows it hears at once that what its log said
        before is history. See :func:`infra.store.orchestrators.take_up`."""
        take_up(self._workspace, self.run.run, regardless=regardless)
        self.note({"event": "begin", "process": str(ProcessId.of())})

    def begin(self) -> None:
        """Record the call, and that this process works on it.

        Raises
        ------
        NoSpaceError
            Not even the run's record fits.
        WorkspaceError
            The run's code is gone, or is not what was pinned.
        """
        with_patience(self._record)
        self._diary.write_orchestrator("running", None)

    def _record(self) -> None:
        self._workspace.keep_run(self.run)
        if self.run.code:  # after the record, which keeps it from being reclaimed
            require_snapshot(self._workspace, self.run.code)

    def end(self) -> None:
        """Say that every stage is in a terminal state."""
        self._leave(next((v.exit_code for v in self._views.values() if v.exit_code), 0))

    def give_up(self, error: BaseException) -> None:
        """Say that nobody works on the run any more; what it has begun goes on."""
        self._leave(getattr(error, "exit_code", 70))

    def _leave(self, exit_code: int) -> None:
        try:
            self.leases.keep(())
        except OSError as trouble:
            log.warning("leases of servers are not given back: %s", trouble)
        self._diary.write_orchestrator("ended", exit_code)

    def note(self, event: Mapping[str, Any]) -> None:
        """A line in the run's event log, from any thread."""
        self._diary.note(event)

    def views(self) -> dict[str, StageView]:
        """All stages by name, in the plan's order."""
        with self._lock:
            return dict(self._views)

    def publish(self, views: dict[str, StageView]) -> bool:
        """Replace the views, and log what is news of them; whether all are final."""
        with self._lock:
            before, self._views = self._views, views
        for name, view in views.items():
            if news_of(view) != news_of(before.get(name)):
                self.note(stage_event(view))
        return all(view.terminal for view in views.values())

    def hear_cancel(self, asked: Mapping[str, Any], grace_s: float) -> list[str]:
        """Take note of who has cancelled the run, or stages of it; names of those that are new."""
        reason = f"cancelled by {asked.get('by', 'somebody')}"
        wish = StopWish(reason, "cancelled", grace_s, everybody=True)
        names = asked.get("stages") or list(self.plan.by_name)
        wanted = [s for s in self.plan.stages if s.name in names or s.id in names]
        new = [s for s in wanted if s.id not in self.cancelled]
        self.cancelled |= {s.id: wish for s in new}
        if new:
            named = [s.name for s in new]
            self.note({"event": "cancel", "reason": reason, "stages": named})
        return [s.name for s in new]
