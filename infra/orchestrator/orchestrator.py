"""The loop: observe, decide, act, and publish the state of every stage.

In: members (runs with their plans, from a source), a workspace, a router of dispatchers.
Out: a :class:`StageView` per stage of each member, and an event log beside each run's record. A run
has one member, a night one per checkpoint, a sweep one per trial. All are one plan, the union of
theirs, with one observation, decision and launch per round. The process may die at any point; the
next one on the same runs continues from the records.

An error belongs to the members whose stages it came from. An outage (a file system or scheduler
that does not answer) pauses them until it is over; any other error ends them. The others continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from infra.disk.manager import DiskManager
from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router
from infra.jobs.dispatcher import AttemptRef, OpenAttempt
from infra.jobs.failures import is_outage
from infra.orchestrator.executor import Executor, cancelled_of, left_to, observed_by
from infra.orchestrator.members import Member, MemberSource
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import (
    PAUSES,
    Action,
    AttemptStatus,
    Block,
    CallRules,
    CloseAttempt,
    Fail,
    Finish,
    Idle,
    Launch,
    Observation,
    Release,
    Serve,
    Wait,
    reconcile,
    union_of,
)
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import CollectedErrors, SpaceWaits, not_before
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import Attempt, StageRecord, all_malformed, from_json
from refiner_core.contract.services import is_service
from refiner_core.contract.types import Progress, StageView, ViewState


def view_of(
    action: Action,
    record: StageRecord | None,
    workspace: Workspace,
    owner: str,
    ended_before: int = 0,
    done_before: bool = False,
) -> StageView:
    """The view of one stage.

    ``owner`` is the calling process; ``ended_before`` the newest attempt that had ended when the
    call began (its time does not count); ``done_before`` whether the stage was done by then.
    """
    stage = action.stage
    attempts = record.attempts if record is not None else ()
    result = record.result if record is not None else None
    last = attempts[-1] if attempts else None
    if isinstance(action, Idle):
        done_before = last is None or last.number <= ended_before
    report = {} if result is None else result.report
    state, message, exit_code = _state_of(action, report, last, owner, done_before)
    if (doubt := all_malformed(report)) and state in ("done", "skipped"):
        message = f"warning: {doubt}"
    shown = result.attempt if result is not None else last.number if last is not None else 0
    beat = (workspace.read_heartbeat(stage.id, shown) if shown else None) or {}
    progress = beat.get("progress")
    seconds = 0.0  # worked by the attempts of this call, by each worker's own clock
    for attempt in (a for a in attempts if a.number > ended_before):
        found = attempt.seconds
        if found is None:
            found = (workspace.read_heartbeat(stage.id, attempt.number) or {}).get("seconds")
        seconds += float(found or 0.0)
    return StageView(
        name=stage.name,
        kind=stage.kind,
        fingerprint=stage.fingerprint,
        state=state,
        attempt=shown,
        job_id=next((a.job_id for a in attempts if a.number == shown), None),
        progress=None if progress is None else from_json(Progress, progress),
        seconds=seconds,
        message=message,
        log=str(workspace.layout.attempt(stage.id, shown).log) if shown else "",
        exit_code=exit_code,
        report=report,
    )


def views_in_outage(
    plan: Plan, views: Mapping[str, StageView], reason: str, *, leaves: bool
) -> dict[str, StageView]:
    """The last views (none: all wait) while ``reason`` prevents a round.

    The stage that it names, or else all that were running, are paused. With ``leaves``, all that
    have not ended are left.
    """
    shown = dict(views) or {
        s.name: StageView(s.name, s.kind, s.fingerprint, "waiting") for s in plan.stages
    }
    open_ = [v for v in shown.values() if not v.terminal]
    named = [v for v in open_ if plan.by_name[v.name].id in reason]
    under_way = [v for v in open_ if v.state != "waiting"] or open_[:1]
    for view in open_ if leaves else named or under_way:
        message = f"{PAUSES} system outage, until it is over: {reason}"
        shown[view.name] = replace(view, state="paused", message=message)
        if leaves:
            message = f"left; its state could not be read: {reason}"
            shown[view.name] = replace(view, state="interrupted", message=message, exit_code=6)
    return shown


def _state_of(
    action: Action, report: Mapping[str, Any], last: Attempt | None, owner: str, done_before: bool
) -> tuple[ViewState, str, int]:
    """State, message and exit code."""
    over: ViewState = "skipped" if done_before else "done"
    match action:
        case Finish():
            return over, str(report.get("remark", "")), 0
        case Idle():
            return over, "not needed now; it ends by itself" if action.live else "", 0
        case Fail():
            return action.state, action.outcome.message, action.outcome.exit_code or 1
        case Block():
            return action.state, f"needs {action.by}", 6 if action.state == "interrupted" else 1
        case Wait(short=True):
            return "paused", action.reason, 0
        case Release() | Wait(queued=True):
            return "queued", action.reason, 0
        case Wait(attempt=0):
            return "waiting", action.reason, 0
        case Launch():
            before = last.outcome.message if last is not None and last.outcome else ""
            after = f" again: {first_line(before)}" if before else ""
            return "waiting", f"is being submitted{after}", 0
        case CloseAttempt() if action.outcome.failure == "disk_full":
            return "paused", action.outcome.message, 0  # its outcome is not written yet
    message = action.outcome.message if isinstance(action, CloseAttempt) else ""
    if isinstance(action, Wait) and action.unseen:
        message = action.reason
    return "running" if last is not None and last.owner == owner else "reattached", message, 0


log = logging.getLogger(__name__)
T = TypeVar("T")
#: Limit on the share of a core for observing and publishing; beyond it, rounds become rarer.
_LOOK_SHARE = 0.04
_LONGEST_S = 30.0


class Orchestrator:
    """Works on members until each stage of each is in a terminal state.

    Parameters
    ----------
    source
        Gives the members, and is notified when each has ended.
    workspace, router
        Where members are recorded, and where jobs run.
    config
        The settings that the members share: ``dispatch`` and ``disk``.
    disk_manager
        Tracks and frees disk space.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        source: MemberSource,
        workspace: Workspace,
        router: Router,
        config: RecipeConfig,
        *,
        disk_manager: DiskManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source, self.workspace, self.router = source, workspace, router
        self.owner = str(ProcessId.of())
        self.members: list[Member] = []
        source.request_stop = self.request_stop
        self._settings, self._clock = config.dispatch, clock
        self._observer = Observer(workspace, router, self._settings, clock=clock)
        self._disk_manager = disk_manager
        self._space_waits = SpaceWaits(
            workspace, self._disk_manager, config.disk, clock, self._note_of_space
        )
        # The member that starts a stage and logs its events: the first one that has it.
        self._homes: dict[str, Member] = {}
        self._actor = Executor(
            *(workspace, router, self.owner, self.members, self._homes, self._space_waits),
            *(self._settings.grace_s, clock),
        )
        self._ready_at: dict[AttemptRef, float] = {}  # when the next attempt may start
        self._records: dict[str, StageRecord] = {}
        self._seen: dict[str, AttemptStatus] = {}
        self._open: dict[str, OpenAttempt] = {}
        self._ready: frozenset[tuple[str, int]] = frozenset()
        #: Stage id -> the newest attempt that had ended when its first member began.
        self._ended_before: dict[str, int] = {}
        self._look_s = 0.0
        self._error: BaseException | None = None
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="orchestrator", daemon=True)

    # ------------------------------------------------------------ for the caller

    def start(self) -> None:
        """Begin, then work in a thread; errors as in :meth:`begin`."""
        self.begin()
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; True once nothing is left to do."""
        # Not `Thread.join`: after a Ctrl-C in it, Python considers the thread ended (bpo-45274).
        return self._ended.wait(seconds)

    def join(self) -> dict[str, StageView]:
        """Wait until nothing is left to do, and return the last views.

        Raises
        ------
        Exception
            The error that ended the thread.
        """
        while not self.wait(1.0):
            pass
        if self._error is not None:
            raise self._error
        return self.views()

    def begin(self) -> None:
        """Record the calls and observe, for callers of :meth:`work` or :meth:`step`.

        Raises
        ------
        NoSpaceError
            Not even a run's record fits on the disk.
        WorkspaceError
            The code of a run is gone or differs from its digest.
        """
        self.source.begin()
        self.members += self.source.admit(self._actor.stopping)
        self._round(act=False)

    def work(self, wait: Callable[[float], None]) -> None:
        """Make rounds until nothing is left to do; ``wait`` sleeps in between."""
        try:
            while not self.step():
                wait(self.wake_after())
        except BaseException as error:
            for member in self.members:
                member.give_up(error)
            self.source.end(error)
            raise

    def step(self) -> bool:
        """One round: observe, decide, act. True when nothing is left to do."""
        self._round()
        self.members += self.source.admit(self._actor.stopping)  # those that may begin
        over = not self.members and not self.source.more
        if over:
            self.source.end(None)
        return over

    def wake_after(self) -> float:
        """Seconds until the next round is due."""
        if self.source.at_once:
            return 0.0
        pauses = [m.outage.pause_s for m in self.members] if not self._actor.stopping else []
        look_s = min(self._look_s / _LOOK_SHARE, _LONGEST_S)
        return max(self._settings.poll_s, look_s, min(pauses, default=0.0))

    def views(self) -> dict[str, StageView]:
        """All stages by name, in the plan's order; those of one of several members with its name as
        a prefix: ``ARM/seed1/grpo``."""
        found: dict[str, StageView] = {}
        for member in self.source.shown:
            for name, view in member.views().items():
                key = f"{member.name}/{name}" if member.name else name
                found[key] = replace(view, name=key) if member.name else view
        return found

    def request_stop(
        self,
        reason: str,
        failure: Literal["interrupted", "cancelled"] = "interrupted",
        spared: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing more and ask the running jobs to save and end. Returns at once.

        Jobs of another running call are left alone, and so are those of ``spared`` stages
        (id -> the run that continues them): a cancelled job is not started again.
        """
        self._actor.request(reason, failure, spared or {})
        self._wake.set()

    def next_save_bytes(self) -> int:
        """Size of the largest save that runs now or comes next; 0 when nothing runs."""
        return max((self._disk_manager.need_of(i) for i in list(self._open)), default=0)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        def wait(seconds: float) -> None:
            self._wake.wait(seconds)
            self._wake.clear()

        try:
            self.work(wait)
        except BaseException as error:  # it surfaces in join()
            log.debug("the orchestrator ends with an error", exc_info=error)
            self._error = error
        self._ended.set()

    def _round(self, act: bool = True) -> None:
        """Observe, decide, act and publish once for all members that no outage pauses."""
        stops = self._actor.stopping
        due = [m for m in self.members if stops or not m.outage.pause_s]
        trouble = CollectedErrors[Member]()
        began, self._look_s = time.thread_time(), 0.0
        for member in due:
            with trouble.at(member):
                self._actor.read_requests(member)
        with trouble.at(*due):
            self._look(due, trouble)
        sound = [m for m in due if m not in trouble]
        self._homes.clear()
        self._homes.update({i: m for m in reversed(self.members) for i in m.ids})
        self._homes.update({i: m for m in reversed(sound) for i in m.stages})
        actions: dict[str, Action] = {}
        with trouble.at(*sound):
            actions = self._decide(sound, trouble)
            self._look_s = time.thread_time() - began
            if act:
                self._act(actions, sound, trouble)
            errors = CollectedErrors[str]()
            self._actor.stop_jobs(due, self._seen, self._open, errors)
            _add_by_stage(errors, due, trouble)
        began = time.thread_time()
        shown: dict[tuple[str, bool], StageView] = {}
        for member in due:
            if member not in trouble and actions:
                with trouble.at(member):
                    member.outage.is_over()
                    self._show(member, actions, shown)
            if member in trouble:
                self._wait_out(member, trouble[member])
        self._look_s += time.thread_time() - began

    def _look(self, due: Collection[Member], trouble: CollectedErrors[Member]) -> None:
        errors = CollectedErrors[str]()
        ids = list(dict.fromkeys(i for m in due for i in (*m.given, *m.stages)))
        records, observed = self._observer.observe(ids, errors)
        self._ready = observed.ready
        looked = set(ids).difference(errors)
        self._records = _but(self._records, looked) | records
        self._seen = {**_but(self._seen, looked), **observed.attempts}
        self._open = _but(self._open, looked) | self._observer.open
        self._actor.keep_ends(self._observer.statuses)
        _add_by_stage(errors, due, trouble)
        for member in due:
            if member not in trouble:
                self._note_beginning(member)

    def _note_beginning(self, member: Member) -> None:
        """Note what had ended when a member began: history, which neither counts for it nor fails
        it. Shared stages began with the first of their members."""
        if member.done_before is not None:
            return
        known = {i: r for i in member.ids if (r := self._records.get(i)) is not None}
        member.done_before = frozenset(i for i, r in known.items() if r.result is not None)
        for stage_id in member.ids:
            if (record := known.get(stage_id)) is None or not record.attempts:
                self._ended_before.setdefault(stage_id, 0)
                continue
            last, seen = record.attempts[-1], self._seen.get(stage_id)
            lives = last.outcome is None and seen is not None and seen.liveness != "dead"
            self._ended_before.setdefault(stage_id, last.number - 1 if lives else last.number)
            if last.outcome is not None and last.outcome.failure == "cancelled":
                # Another call's work, cancelled by a user; not this call's.
                self._ended_before[stage_id] = last.number

    def _decide(
        self, sound: Collection[Member], trouble: CollectedErrors[Member]
    ) -> dict[str, Action]:
        done = {i for i, r in self._records.items() if r.result is not None}
        checkpoints: set[tuple[str, int]] = set()
        for member in sound:
            with trouble.at(member):
                member.holds.keep(done)
                checkpoints |= member.holds.there(done)
        ours = {i: r for i, r in self._records.items() if i in self._homes}
        observed = Observation(
            self._seen,
            short=self._space_waits.short(ours),
            checkpoints=frozenset(checkpoints),
            ready=self._ready,
            gpus=self.router.gpus.available() if self._asks_for_gpus(sound) else None,
        )
        now, began = self._clock(), self._ended_before
        pauses = not_before(self._records, began, self._ready_at, self._settings.backoff_s, now)
        policy = CallRules(
            max_parallel=self._settings.max_parallel,
            retries=self._settings.retries,
            stopping=self._actor.stopping,
            cancelled=frozenset(cancelled_of(self.members)),
            ended_before=self._ended_before,
            refused=self._actor.refused,
            now=now,
            not_before=pauses,
            gave_up=self._space_waits.gave_up(),
            runs_local=self._runs_local,
        )
        stages, given = union_of((m.stages, m.given) for m in sound)
        return reconcile(stages, given, self._records, observed, policy)

    def _runs_local(self, stage: PlannedStage) -> bool:
        return self.router.executor_for(stage) == "local"

    def _asks_for_gpus(self, sound: Collection[Member]) -> bool:
        stages = (s for m in sound for s in m.stages.values() if s.resources.gpus)
        return any(map(self._runs_local, stages))

    def _note_of_space(self, event: Mapping[str, Any]) -> None:
        for member in self.members:
            if event.get("stage_id") in member.ids:
                member.note(event)

    # ------------------------------------------------------------ acting

    def _act(
        self,
        actions: Mapping[str, Action],
        sound: Collection[Member],
        trouble: CollectedErrors[Member],
    ) -> None:
        errors = CollectedErrors[str]()
        wanted = {i for i, a in actions.items() if isinstance(a, Serve) and a.wanted}
        for member in sound:
            with trouble.at(member):
                member.leases.keep(sorted(wanted.intersection(member.stages)))
        fit = {i for m in sound if m not in trouble for i in m.stages}
        launches = [a for a in actions.values() if isinstance(a, Launch) and a.stage.id in fit]
        waits = [a for a in actions.values() if isinstance(a, Wait) and a.stage.id in fit]
        kept = {a.stage.id: a.gpus for a in waits if a.gpus}
        self._actor.launch(launches, self._records, errors, kept)
        for stage_id, action in actions.items():
            with errors.at(stage_id):
                if isinstance(action, CloseAttempt):
                    self._actor.close(self._space_waits.minded(action), self._open[stage_id])
                elif isinstance(action, Release):
                    limit = self._settings.retries.launch_failure
                    self._actor.release(action, self._open[stage_id], limit)
        _add_by_stage(errors, sound, trouble)

    # ------------------------------------------------------------ showing

    def _show(
        self,
        member: Member,
        actions: Mapping[str, Action],
        shown: dict[tuple[str, bool], StageView],
    ) -> None:
        before, views = member.views(), dict[str, StageView]()
        # Servers last: for a member, one is over when the member's stages that use it are.
        for stage in sorted(member.plan.stages, key=lambda s: is_service(s.id)):
            old = before.get(stage.name)
            if old is not None and old.state in ("done", "skipped") and not is_service(stage.id):
                views[stage.name] = old
                continue
            action, key = actions[stage.id], (stage.id, stage.id in (member.done_before or ()))
            if is_service(stage.id) and self._has_asked(member, stage, views):
                rest = Idle(action.stage, live=isinstance(action, Serve))
                view = self._view(rest, done_before=False)
            else:
                if key not in shown:
                    shown[key] = self._view(action, done_before=key[1])
                view = shown[key]
            view = replace(view, name=stage.name)
            views[stage.name] = observed_by(member, stage, view, self.members)
        if member.publish({stage.name: views[stage.name] for stage in member.plan.stages}):
            member.end()
            self._remove(member, None)

    def _has_asked(
        self, member: Member, service: PlannedStage, views: Mapping[str, StageView]
    ) -> bool:
        """Tell whether a member needs a server no longer, whether or not others do."""
        if self._actor.stopping or service.id in member.cancelled:
            return False
        asking = [views[s.name] for s in member.plan.stages if service.name in s.after]
        return all(v.terminal and v.message != f"needs {service.name}" for v in asking)

    def _view(self, action: Action, *, done_before: bool) -> StageView:
        stage_id = action.stage.id
        before = self._ended_before.get(stage_id, 0)
        record = self._records.get(stage_id)
        view = view_of(action, record, self.workspace, self.owner, before, done_before)
        if stage_id not in self._actor.left_alone or view.terminal:
            return view
        return left_to(view, self._actor.left_alone[stage_id])

    def _wait_out(self, member: Member, error: Exception) -> None:
        """Show that nothing can be done for a member now. A member that was asked to end gets the
        grace of its jobs to save, then is left; its known jobs are asked."""
        if not is_outage(error):
            member.give_up(error)
            self._remove(member, error)
            return
        member.outage.met(error)
        reason = member.outage.reason
        asked = self._actor.stopping or member.cancelled.keys() >= member.stages.keys()
        waited_s = self._clock() - max(self._actor.since, member.outage.since)
        leaves = asked and waited_s > self._settings.grace_s
        if leaves:
            member.give_up(Interrupted(reason, fix="run the same command again"))
        if member.publish(views_in_outage(member.plan, member.views(), reason, leaves=leaves)):
            self._remove(member, None)

    def _remove(self, member: Member, error: Exception | None) -> None:
        if member in self.members:
            self.members.remove(member)
        gone = member.ids.difference(*(m.ids for m in self.members))
        self._observer.forget(gone)
        self._records, self._seen = _but(self._records, gone), _but(self._seen, gone)
        self._open = _but(self._open, gone)
        self.source.ended(member, error)


def _add_by_stage(
    errors: Mapping[str, Exception], members: Iterable[Member], trouble: CollectedErrors[Member]
) -> None:
    """Add the errors of stages to the trouble of the members that have them."""
    for member in members if errors else ():
        found = next((e for i, e in errors.items() if i in member.ids), None)
        if found is not None:
            trouble.setdefault(member, found)


def _but(values: Mapping[str, T], ids: Collection[str]) -> dict[str, T]:
    return {i: value for i, value in values.items() if i not in ids}
