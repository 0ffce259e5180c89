"""Members: runs that an orchestrator works on, with their plans, event logs and views.

A :class:`Member` is a whole run, a trial of a sweep, or one checkpoint of a night. Each has its own
event log, leases of servers and views, the same however many are worked on together. A log has one
writer, the process that works on the run. Neither the log nor the orchestrator's file decides
anything, so a failed write is logged and the work continues. A :class:`MemberSource` gives the
members: those of a run and of a night at once; a sweep admits its trials
(:mod:`flows.sweeping.admission`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from infra.host.processes import ProcessId, host_name
from infra.orchestrator.reconcile import StopWish, stages_by_id
from infra.orchestrator.waiting import Outage, with_patience
from infra.store.atomic import WarningLog
from infra.store.checkpoints import RetainedCheckpoints
from infra.store.orchestrators import CallLeases, take_up
from infra.store.provenance import require_snapshot
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, picked
from refiner_core.contract.types import StageView

log = logging.getLogger(__name__)


class EventLog:
    """The event log of one call, and its orchestrator's file.

    Parameters
    ----------
    workspace, run
        Where it is written, and the call's id.
    """

    def __init__(self, workspace: Workspace, run: str) -> None:
        self._workspace, self._run = workspace, run
        self._complaints = WarningLog()

    def note(self, event: Mapping[str, Any]) -> None:
        """Add a line to the run's event log, from any thread."""
        path = self._workspace.layout.run(self._run).events
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": now_text(), **event}) + "\n")
        except OSError as error:
            self._complaints.warn("log", "the event log cannot be written: %s", error)

    def write_orchestrator(self, state: str, exit_code: int | None) -> None:
        """Record that this process works on the run, for `refiner status`, `cancel`, `resume`."""
        me = {"process": str(ProcessId.of()), "host": host_name()}
        value = {**me, "state": state, "at": now_text(), "exit_code": exit_code}
        try:
            self._workspace.write_orchestrator(self._run, value)
        except OSError as error:
            log.warning("the process that works on the run could not be recorded: %s", error)


def stage_event(view: StageView) -> dict[str, Any]:
    """A stage's view as an event."""
    said = {"stage": view.name, "job": view.job_id, "seconds": round(view.seconds, 3)}
    return {"event": "stage", **said, **picked(view, "state", "attempt", "message")}


class Member(EventLog):
    """One of the runs of an orchestrator.

    Parameters
    ----------
    plan, run, workspace
        The run's plan, its call, and where it is recorded. The call's ``code`` names the snapshot
        that its jobs import.
    name
        Name within the orchestrator, such as ``ARM/seed1``; empty for a run alone.
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
        super().__init__(workspace, run.run)
        self.plan, self.run, self.name = plan, run, name
        #: By id: as in the plan, and with their inputs by id.
        self.planned = {stage.id: stage for stage in plan.stages}
        self.stages, self.given = stages_by_id(plan)
        self.ids = frozenset((*self.stages, *self.given))
        self.holds = RetainedCheckpoints(plan, workspace.layout)
        self.leases = CallLeases(workspace, run.run, clock)
        self.outage = Outage(plan.config.dispatch.poll_s, clock, self.note)
        #: What was done when it began; None before the first round.
        self.done_before: frozenset[str] | None = None
        #: Stages that a user has cancelled, by id.
        self.cancelled: dict[str, StopWish] = {}
        self._views: dict[str, StageView] = {}

    def take_up(self, *, regardless: bool = False) -> None:
        """Take over the run in this process; its log tells followers that earlier lines are
        history. See :func:`infra.store.orchestrators.take_up`."""
        take_up(self._workspace, self.run.run, regardless=regardless)
        self.note({"event": "begin", "process": str(ProcessId.of())})

    def begin(self) -> None:
        """Record the call, and that this process works on it.

        Raises
        ------
        NoSpaceError
            Not even the run's record fits on the disk.
        WorkspaceError
            The run's code is gone or differs from its digest.
        """
        with_patience(lambda: self._workspace.keep_run(self.run))
        if self.run.code:  # after the record, which keeps it from being reclaimed
            with_patience(lambda: require_snapshot(self._workspace, self.run.code))
        self.write_orchestrator("running", None)

    def end(self) -> None:
        """Record that every stage is in a terminal state."""
        self._leave(next((v.exit_code for v in self._views.values() if v.exit_code), 0))

    def give_up(self, error: BaseException) -> None:
        """Record that no process works on the run any more; its jobs continue."""
        self._leave(getattr(error, "exit_code", 70))

    def _leave(self, exit_code: int) -> None:
        try:
            self.leases.keep(())
        except OSError as trouble:
            log.warning("leases of servers could not be returned: %s", trouble)
        self.write_orchestrator("ended", exit_code)

    def views(self) -> dict[str, StageView]:
        """All stages by name, in the plan's order."""
        return dict(self._views)

    def publish(self, views: dict[str, StageView]) -> bool:
        """Replace the views and log what changed; True if all are final."""
        before, self._views = self._views, views  # replaced as a whole: other threads read it
        for name, view in views.items():
            old = before.get(name, StageView("", "", "", "waiting", -1))  # progress is not logged
            if (old.state, old.attempt, old.job_id) != (view.state, view.attempt, view.job_id):
                self.note(stage_event(view))
        return all(view.terminal for view in views.values())

    def handle_cancel(self, asked: Mapping[str, Any], grace_s: float) -> list[str]:
        """Note a request to cancel the run, or stages of it; names of those that are new."""
        reason = f"cancelled by {asked.get('by', 'an unknown user')}"
        stop_request = StopWish(reason, "cancelled", grace_s, everybody=True)
        names = asked.get("stages") or list(self.plan.by_name)
        wanted = [s for s in self.plan.stages if s.name in names or s.id in names]
        new = {s.id: s.name for s in wanted if s.id not in self.cancelled}
        self.cancelled |= dict.fromkeys(new, stop_request)
        if new:
            self.note({"event": "cancel", "reason": reason, "stages": list(new.values())})
        return list(new.values())


class MemberSource:
    """Gives members to an orchestrator and is notified of their ends. This one gives all of them at
    the beginning, and an error of one of them ends the call.

    Parameters
    ----------
    members
        In the order in which they get free slots.
    tell
        Called with each member that has ended.

    Attributes
    ----------
    more, at_once
        More members may come; more may come right now.
    request_stop
        Set by the orchestrator.
    """

    more = at_once = False
    request_stop: Callable[..., None]

    def __init__(
        self, members: Sequence[Member], tell: Callable[[Member], None] = lambda _: None
    ) -> None:
        self._members, self._tell = tuple(members), tell
        self._coming: Sequence[Member] = self._members

    @property
    def shown(self) -> Collection[Member]:
        """Members whose stages are shown now."""
        return self._members

    def begin(self) -> None:
        """Record the members; called once, first."""
        for member in self._members:
            member.begin()

    def admit(self, stopping: bool) -> Sequence[Member]:
        """Members that begin now; called after each round."""
        found, self._coming = self._coming, ()
        return found

    def ended(self, member: Member, error: Exception | None) -> None:
        """Handle the end of a member: all stages in a terminal state, or ``error``."""
        if error is not None:
            raise error
        self._tell(member)

    def end(self, error: BaseException | None) -> None:
        """Handle the end of the orchestrator: nothing left to do, or ``error``."""

    def note(self, event: Mapping[str, Any]) -> None:
        """Add a line to the call's event log, from any thread."""
        for member in self._members:
            member.note(event)
