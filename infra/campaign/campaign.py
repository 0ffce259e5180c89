"""Brings the world to a plan: looks, reconciles, acts, and says how it stands.

In: a plan, a workspace, a router of dispatchers. Out: a :class:`StageView` per stage, and an event
log beside the run's record. The loop runs in a thread, or round by round (:meth:`Campaign.step`);
it may die at any point, and the next campaign on the plan goes on from what is recorded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from infra.campaign.acting import Actor, StopWish
from infra.campaign.actions import Action, CloseAttempt, Launch, Release, Serve
from infra.campaign.diary import Diary, news_of, stage_event
from infra.campaign.observe import Observer, Patience
from infra.campaign.outage import Backoff, Outage, one_by_one, with_patience
from infra.campaign.reconcile import Observed, Policy, Taken, reconcile
from infra.campaign.room_keeping import Keeper, ProbingKeeper, Rooms
from infra.campaign.together import Together
from infra.campaign.views import view_of, views_in_outage
from infra.host.processes import ProcessId
from infra.host.waiting import wait_for
from infra.jobs.dispatch import Router
from infra.jobs.failures import is_outage
from infra.store.holds import Holds
from infra.store.leases import CallLeases, held_by_others
from infra.store.orchestrators import wanted_by_others
from infra.store.snapshot import require_snapshot
from infra.store.workspace import Workspace
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import RunRecord, StageRecord
from refiner_core.contract.services import is_service
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)
#: Looking and showing may cost this share of a core, or the next round comes later.
_LOOK_SHARE = 0.04


class Campaign:
    """One call's work on a plan.

    Parameters
    ----------
    plan, workspace, router
        What should be, where it is recorded, and where jobs run.
    run
        The call; it is recorded when it begins. Its ``code`` names the snapshot that jobs import.
    keeper
        What knows of room on the disk and makes it; without one a write is tried.
    clock
        Seconds, monotonic.
    together
        What it shares with others that this process works on, one step at a time.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        router: Router,
        *,
        run: RunRecord,
        keeper: Keeper | None = None,
        clock: Callable[[], float] = time.monotonic,
        together: Together | None = None,
    ) -> None:
        self.plan, self.workspace, self.router, self.run = plan, workspace, router, run
        self.owner = str(ProcessId.of())
        self._diary = Diary(workspace, run.run, self.owner)
        self._settings, self._clock = plan.config.dispatch, clock
        patience = Patience(self._settings.heartbeat_timeout_s, self._settings.hung_after_s)
        self._observer = Observer(workspace, router, patience, clock=clock)
        self._keeper = keeper or ProbingKeeper(workspace)
        self._rooms = Rooms(workspace, self._keeper, plan.config.disk, clock, self._diary.note)
        self._actor = Actor(
            plan=plan,
            workspace=workspace,
            router=router,
            owner=self.owner,
            code=workspace.layout.code / run.code if run.code else None,
            rooms=self._rooms,
            clock=clock,
            note=self._diary.note,
        )
        self._holds = Holds(plan, workspace.layout)
        self._leases = CallLeases(workspace, run.run, clock)
        self._together = together
        self._outage = Outage(self._settings.poll_s, clock, self._diary.note)
        self._observed = Observed()
        self._own = tuple(dict.fromkeys(s.id for s in (*plan.given, *plan.stages)))
        self._ended_before: dict[str, int] | None = None
        self._done_before: frozenset[str] = frozenset()
        self._stop: StopWish | None = None
        self._stop_at = 0.0
        self._cancelled: dict[str, StopWish] = {}
        self._spared: Mapping[str, str] = {}
        self._backoff = Backoff(self._settings.backoff_s, clock)
        self._views: dict[str, StageView] = {}
        self._look_s = 0.0
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="campaign", daemon=True)

    # ------------------------------------------------------------ for the caller

    def start(self) -> None:
        """Record the call and begin, in a thread.

        Raises
        ------
        NoSpaceError
            Not even the run's record fits.
        WorkspaceError
            The run's code is gone, or is not what was pinned.
        """
        self.begin()
        self._thread.start()

    def begin(self) -> None:
        """Record the call and look, for who calls :meth:`step` themselves; errors as for
        :meth:`start`."""
        with_patience(self._record)
        self._diary.write_orchestrator("running", None)
        self._round(act=False)

    def _record(self) -> None:
        self.workspace.keep_run(self.run)
        if self.run.code:  # after the record, which keeps it from being reclaimed
            require_snapshot(self.workspace, self.run.code)

    def step(self) -> bool:
        """One round: look, decide, act; nothing in an outage. True when all stages have ended."""
        return self._round()

    def give_up(self, error: BaseException) -> None:
        """Say that nobody works on the run any more; what it has begun goes on."""
        try:
            self._leases.keep(())
        except OSError as trouble:
            log.warning("leases of servers are not given back: %s", trouble)
        self._diary.write_orchestrator("ended", getattr(error, "exit_code", 70))

    @property
    def look_s(self) -> float:
        """What looking and showing have cost in the last round, seconds of a core."""
        return self._look_s

    def wake_after(self) -> float:
        """Seconds until the next round is due."""
        look_s = min(self._look_s / _LOOK_SHARE, 10.0)
        pause_s = self._outage.pause_s if self._stop is None else 0.0
        return max(self._settings.poll_s, look_s, pause_s)

    def views(self) -> dict[str, StageView]:
        """All stages by name, in the plan's order."""
        with self._lock:
            return dict(self._views)

    def request_stop(
        self,
        reason: str,
        failure: Literal["interrupted", "cancelled"] = "interrupted",
        spared: Mapping[str, str] | None = None,
    ) -> None:
        """Begin nothing more and ask the running jobs to save and end. Returns at once.

        Jobs that belong to another call that still runs are left alone, and so are those of
        ``spared`` stages (id -> the run that goes on with them): after a job that was cancelled,
        nobody begins another.
        """
        if self._stop is None:
            self._spared = {**self._spared, **(spared or {})}
            self._stop = StopWish(reason, failure, grace_s=self._settings.grace_s)
            self._stop_at = self._clock()
            self._diary.note({"event": "stop", "reason": reason})
        self._wake.set()

    def join(self) -> dict[str, StageView]:
        """Wait until every stage is in a terminal state; the last views.

        Raises
        ------
        Exception
            Whatever ended the campaign's thread.
        """
        wait_for(self._ended)
        if self._error is not None:
            raise self._error
        return self.views()

    def next_save_bytes(self) -> int:
        """What the largest save that runs now, or is about to, will need; 0 when nothing runs."""
        open_ = list(self._observer.open)
        return max((self._keeper.need_of(stage_id) for stage_id in open_), default=0)

    def note(self, event: Mapping[str, Any]) -> None:
        """A line in the run's event log, from any thread: something that the user should know."""
        self._diary.note(event)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self._round():
                self._wake.wait(self.wake_after())
                self._wake.clear()
        except BaseException as error:  # it surfaces in join()
            log.debug("the campaign ends with an error", exc_info=error)
            self._error = error
            self.give_up(error)
        self._ended.set()

    def _round(self, act: bool = True) -> bool:
        if self._outage.pause_s and self._stop is None:
            return False
        try:
            over = self._look_and_act(act)
        except Exception as error:
            self._outage.met(error)
            return self._wait_out()
        self._outage.is_over()
        return over

    def _wait_out(self) -> bool:
        """Show that no round can be made now. Who wants it to end is waited for no longer than
        jobs get to save: they are asked, as far as they are known."""
        self._look_s, reason = 0.0, self._outage.reason
        asked = self._stop is not None or all(s.id in self._cancelled for s in self.plan.stages)
        try:
            self._stop_jobs(self._observed)
        except Exception as error:
            if not is_outage(error):
                raise
        waited_s = self._clock() - max(self._stop_at, self._outage.since)
        leaves = asked and waited_s > self._settings.grace_s
        if leaves:
            self.give_up(Interrupted(reason, fix="run the same command again"))
        return self._publish(views_in_outage(self.plan, self._views, reason, leaves=leaves))

    def _look_and_act(self, act: bool) -> bool:
        began = time.thread_time()
        self._hear_cancel()
        records, observed = self._observer.look(self._own)
        self._observed = observed
        self._diary.record_ends(self._observer.sights)
        self._note_beginning(records, observed)
        done = {i for i, r in records.items() if r.result is not None}
        self._holds.keep(done)
        observed = replace(
            observed, short=self._rooms.short(records), checkpoints=self._holds.there(done)
        )
        actions = reconcile(self.plan, records, observed, self._policy(records))
        look_s = time.thread_time() - began
        if act:
            self._leases.keep([a.stage.id for a in actions if isinstance(a, Serve) and a.wanted])
            self._act(actions, records)
        self._tell_others(observed, actions if act else ())
        self._stop_jobs(observed)
        began = time.thread_time()
        over = self._show(actions, records)
        self._look_s = look_s + time.thread_time() - began
        if over:
            if self._together is not None:
                self._together.note_busy(self.run.run, ())
            code = next((v.exit_code for v in self._views.values() if v.exit_code), 0)
            self._diary.write_orchestrator("ended", code)
        return over

    def _policy(self, records: Mapping[str, StageRecord]) -> Policy:
        return Policy(
            owner=self.owner,
            max_parallel=self._settings.max_parallel,
            retries=self._settings.retries,
            stopping=self._stop is not None,
            cancelled=frozenset(self._cancelled),
            ended_before=self._ended_before or {},
            refused=self._actor.refused,
            now=self._clock(),
            not_before=self._backoff.not_before(records, self._ended_before or {}),
            gave_up=self._rooms.gave_up(),
            runs_local=self._runs_local,
            taken=self._together.taken(self._own) if self._together else Taken(0, 0),
        )

    def _runs_local(self, stage: PlannedStage) -> bool:
        return self.router.executor_for(stage) == "local"

    def _tell_others(self, observed: Observed, actions: tuple[Action, ...]) -> None:
        """Which slots of this machine this plan takes now."""
        if self._together is None:
            return
        live = {i for i, s in observed.attempts.items() if s.local and s.sight in ("live", "hung")}
        begun = {a.stage.id for a in actions if isinstance(a, Launch) and self._runs_local(a.stage)}
        self._together.note_busy(self.run.run, [i for i in live | begun if not is_service(i)])

    def _note_beginning(self, records: Mapping[str, StageRecord], observed: Observed) -> None:
        """What had ended when this call began is history: it neither counts nor fails it."""
        if self._ended_before is not None:
            return
        self._done_before = frozenset(i for i, r in records.items() if r.result is not None)
        self._ended_before = self._together.ended_before if self._together else {}
        for stage_id in self._own:
            record = records.get(stage_id)
            if record is None or not record.attempts:
                self._ended_before.setdefault(stage_id, 0)
                continue
            last, seen = record.attempts[-1], observed.attempts.get(stage_id)
            lives = last.outcome is None and seen is not None and seen.sight != "dead"
            self._ended_before.setdefault(stage_id, last.number - 1 if lives else last.number)
            if last.outcome is not None and last.outcome.failure == "cancelled":
                # It was another's work that somebody has ended, not this call's.
                self._ended_before[stage_id] = last.number

    # ------------------------------------------------------------ acting

    def _act(self, actions: tuple[Action, ...], records: Mapping[str, StageRecord]) -> None:
        with one_by_one() as each:
            with each():
                self._actor.launch([a for a in actions if isinstance(a, Launch)], records)
            for action in actions:
                with each():
                    if isinstance(action, CloseAttempt):
                        attempt = self._observer.open[action.stage.id]
                        self._actor.close(self._rooms.minded(action), attempt)
                    elif isinstance(action, Release):
                        limit = self._settings.retries.launch_failure
                        self._actor.release(action, self._observer.open[action.stage.id], limit)

    def _hear_cancel(self) -> None:
        """Whether somebody has cancelled this run, or stages of it, with `refiner cancel`."""
        asked = self.workspace.cancel_asked(self.run.run)
        if asked is None:
            return
        reason = f"cancelled by {asked.get('by', 'somebody')}"
        wish = StopWish(reason, "cancelled", self._settings.grace_s, everybody=True)
        names = asked.get("stages") or list(self.plan.by_name)
        if not asked.get("stages") and not self._cancelled:
            # Who ends a call means its own work; another call goes on with what they share.
            self._spared = wanted_by_others(self.workspace, {self.run.run})
        wanted = [s for s in self.plan.stages if s.name in names or s.id in names]
        new = [s for s in wanted if s.id not in self._cancelled]
        self._cancelled |= {s.id: wish for s in new}
        if new:
            self._stop_at = self._clock()
            names = [s.name for s in new]
            self._diary.note({"event": "cancel", "reason": reason, "stages": names})

    def _stop_jobs(self, observed: Observed) -> None:
        """Ask live jobs to end that this call does not want any more."""
        if self._stop is None and not self._cancelled:
            return
        for stage in self.plan.stages:
            seen, attempt = observed.attempts.get(stage.id), self._observer.open.get(stage.id)
            wish = self._cancelled.get(stage.id) or self._stop
            if wish is None or seen is None or attempt is None:
                continue
            if stage.id in self._spared and seen.sight == "live":
                self._actor.left_alone[stage.id] = f"run {self._spared[stage.id]}"
                continue
            if is_service(stage.id) and not self._may_end(stage, observed):
                continue
            if seen.sight in ("live", "hung"):
                self._actor.stop(stage, attempt, seen, wish)

    def _may_end(self, service: PlannedStage, observed: Observed) -> bool:
        """Whether nobody needs a server any more: not the jobs that this call ends, which may
        still wait for answers while they save, nor anybody else."""
        ending = (s for s in self.plan.stages if self._stop is not None or s.id in self._cancelled)
        asking = (s.id for s in ending if service.name in s.after)
        if any(i in observed.attempts and observed.attempts[i].sight != "dead" for i in asking):
            return False
        ours = {self.run.run, *(s.id for s in (*self.plan.given, *self.plan.stages))}
        if other := held_by_others(self.workspace, service.id, ours):
            self._actor.left_alone[service.id] = other
        return not other

    # ------------------------------------------------------------ showing

    def _show(self, actions: tuple[Action, ...], records: Mapping[str, StageRecord]) -> bool:
        views: dict[str, StageView] = {}
        for action in actions:
            stage = action.stage
            view = view_of(
                action,
                records.get(stage.id),
                self.workspace,
                owner=self.owner,
                ended_before=(self._ended_before or {}).get(stage.id, 0),
                done_before=stage.id in self._done_before,
            )
            if stage.id in self._actor.left_alone and not view.terminal:
                whose = self._actor.left_alone[stage.id]
                message = f"goes on: it belongs to {whose}, which still runs"
                if is_service(stage.id):
                    view = replace(view, state="done", message=f"goes on: {whose} needs it")
                else:
                    view = replace(view, state="interrupted", message=message, exit_code=6)
            views[stage.name] = view
        return self._publish(views)

    def _publish(self, views: dict[str, StageView]) -> bool:
        """Tell what is news of the views; whether all of them are final."""
        with self._lock:
            before, self._views = self._views, views
        news = [v for n, v in views.items() if news_of(v) != news_of(before.get(n))]
        for view in news:
            self._diary.note(stage_event(view))
        return all(v.terminal for v in views.values())
