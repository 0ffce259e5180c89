"""Admission of the trials of a sweep: which may begin now, and the state of each.

In: a planned sweep, and a budget. Out: members for an orchestrator, as they may begin, and the end
of each trial, in the sweep's event log and to listeners. Trials begin in the plan's order, up to
the limit at a time; those that are done do not begin. A trial that was begun before continues as
its run, with its pinned code; one that has failed, or whose stages have changed, becomes a new run
with the current code, which is pinned once. A failed trial stops no other; a failed shared stage
stops the trials that need it.

The first trial (the canary) runs alone until its last training stage has done two real steps and
one save: that is a :class:`~sweeps.forecast.CanaryMeasure`. If any trial has come that far before
(in an earlier call, with another seed), no canary is needed: its measurement is history.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from flows.running.calls import CodeSnapshot, pin_code, record_run
from flows.sweeping.budget import Budget
from flows.sweeping.forecasting import canary_text, forecast_lines
from flows.sweeping.status import last_words
from infra.host.files import link
from infra.jobs.failures import is_outage
from infra.orchestrator.members import EventLog, Member, MemberSource
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import Outage, with_patience
from infra.store import atomic
from infra.store.checkpoints import MARKER
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of, wanted_by_others
from infra.store.sweep_records import note_trial, trial_run
from infra.store.traces import MetricsLine, read_metrics
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError, RefinerError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RunRecord, picked
from refiner_core.contract.services import is_service
from refiner_core.contract.types import StageView
from refiner_core.report.sweep.sweep_report import TrialState
from sweeps.forecast import CanaryMeasure, ExceededLimit, SweepForecast
from sweeps.values import SweepPlan, Trial

log = logging.getLogger(__name__)
#: Trials that begin after one round, so that the running ones are not left alone for long.
_AT_ONCE = 8
#: Retry of a trial that could not begin for lack of space or another reason.
_AGAIN_S = 5.0
#: Default number of concurrent trials: on a cluster the queue decides how many run.
_MANY = 256


#: States of trials that are no longer worked on.
_OVER: tuple[TrialState, ...] = ("done", "failed", "interrupted", "held")


@dataclass(frozen=True)
class TrialVerdict:
    """State of a trial, its reason, and the exit code that a run would have."""

    state: TrialState = "waiting"
    reason: str = ""
    run: str = ""
    exit_code: int = 0


def _word_of_views(views: Mapping[str, StageView], run: str) -> TrialVerdict:
    """End of a trial, from its stages."""
    for state in ("failed", "interrupted"):
        if found := [v for v in views.values() if v.state == state]:
            # A stage that ended by itself comes before the stages that it stopped.
            view = min(found, key=lambda v: v.message.startswith("needs "))
            said = f"{view.name}: {view.message}" if view.message else view.name
            return TrialVerdict(state, said, run, view.exit_code or 1)
    return TrialVerdict("done", run=run)


def _word_of_error(error: Exception, run: str) -> TrialVerdict:
    """End of a trial through an error."""
    if isinstance(error, RefinerError):
        state: TrialState = "interrupted" if error.resumable else "failed"
        return TrialVerdict(state, str(error), run, error.exit_code)
    log.exception("a trial ends with an error", exc_info=error)
    return TrialVerdict("failed", f"{type(error).__name__}: {error}", run, 70)


#: The canary saves after this step, so that a save is measured early.
_CANARY_STEPS = 2
#: The canary, and its measured stage: the last that it trains.
Canary = tuple[Trial, PlannedStage]


def find_canary(plan: SweepPlan, workspace: Workspace) -> Canary | None:
    """The first trial with training to do; None if nothing is trained, or if a similar training
    stage has been measured in this sweep."""
    first: Canary | None = None
    looked: set[str] = set()
    for trial in plan.trials:
        stage = next((s for s in reversed(trial.plan.stages) if s.kind in TRAINED), None)
        if stage is None or stage.id in looked:
            continue
        first = first or (trial, stage)
        done = workspace.layout.stage(stage.id).result.exists()
        if done or _measured_canary(workspace, stage) is not None:
            return None
        looked.add(stage.id)
    return first


def _failed_by_its_arm(workspace: Workspace, stage: PlannedStage) -> bool:
    """True if a stage's training failed because of its arm: a loss that is not finite is a result,
    and says nothing about the other arms."""
    record = workspace.read_record(stage.id)
    last = record.attempts[-1].outcome if record is not None and record.attempts else None
    return last is not None and last.failure in ("not_finite", "unhealthy")


def _measured_canary(workspace: Workspace, stage: PlannedStage) -> CanaryMeasure | None:
    """Measure the first steps of a training stage; None before two steps and a save.

    A shorter stage is measured when it is done. An external trainer (``command``) is measured by
    its progress; its saves are unknown.
    """
    numbers = workspace.layout.stage(stage.id).attempt_numbers()
    if not numbers:
        return None
    if stage.kind == "command":
        return _of_another_trainer(workspace, stage.id, numbers[-1])
    done = workspace.layout.stage(stage.id).result.exists()
    path = workspace.layout.attempt(stage.id, numbers[-1]).metrics
    lines = read_metrics(path) if path.exists() else []
    steps = len({line.step for line in lines})
    saves = workspace.layout.stage(stage.id).checkpoints.glob(f"step-*/{MARKER}")
    markers = filter(None, map(atomic.read_json, saves))
    save = min(markers, key=lambda m: int(m.get("step") or 0), default=dict[str, Any]())
    if not done and (steps < _CANARY_STEPS or not save):
        return None
    seconds, save_s, start_s = _values(lines, "time/step_s"), save.get("seconds"), None
    first = seconds[: int(save.get("step") or 0)]
    if first and (elapsed_s := save.get("elapsed_s")) is not None:
        start_s = max(0.0, elapsed_s - sum(first) - (save_s or 0.0))
    settled = seconds[1:] or seconds  # the first step compiles kernels and fills caches
    return CanaryMeasure(
        *(stage.id, steps, _mean(settled), save_s, start_s),
        judge_calls_per_step=_mean(_values(lines, "judge/calls")),
    )


def _values(lines: list[MetricsLine], name: str) -> list[float]:
    return [v for line in lines if (v := line.metrics.get(name)) is not None]


def _mean(values: list[float]) -> float | None:
    return mean(values) if values else None


def _of_another_trainer(workspace: Workspace, stage_id: str, number: int) -> CanaryMeasure | None:
    beat = workspace.read_heartbeat(stage_id, number) or {}
    steps = int((beat.get("progress") or {}).get("done") or 0)
    if workspace.layout.stage(stage_id).result.exists():
        return CanaryMeasure(stage_id, steps, None)
    if steps < _CANARY_STEPS:
        return None
    passed = float(beat.get("moved_at_s") or 0.0)
    return CanaryMeasure(stage_id, steps, passed / steps if passed else None)


@dataclass
class Admission(MemberSource):
    """Admits the trials of a sweep.

    Parameters
    ----------
    plan, workspace
        The sweep, and where it is recorded.
    budget
        Decides whether another trial may begin.
    poll_s
        Seconds until the first retry after an outage.
    corrected, passed
        Make a forecast from the canary's measurement; the limits that a forecast exceeds.
    canary
        The canary and its measured stage; None if no canary is needed.
    forecast
        The forecast shown before the sweep began.
    past_canary
        Release the other trials whatever the canary shows.
    take_over
        Also take up runs that a process on another host claims.
    pin
        Makes the snapshot of the code.
    tell
        Receives messages for people.
    """

    plan: SweepPlan
    workspace: Workspace
    budget: Budget
    poll_s: float
    corrected: Callable[[Sequence[CanaryMeasure]], SweepForecast]
    passed: Callable[[SweepForecast], Sequence[ExceededLimit]]
    canary: Canary | None = None
    forecast: SweepForecast | None = None
    past_canary: bool = False
    take_over: bool = False
    pin: Callable[[Workspace], CodeSnapshot] = pin_code
    tell: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    request_stop: Callable[..., None] = field(init=False)
    live: dict[str, Member] = field(default_factory=dict)
    words: dict[str, TrialVerdict] = field(default_factory=dict)
    held: str = ""
    more: bool = True
    at_once: bool = False
    _waiting: list[Trial] = field(default_factory=list)
    _begun: set[str] = field(default_factory=set)
    _stopping: bool = False
    _not_before: float = 0.0
    _pinned: CodeSnapshot | None = None
    _diff: Path = Path()
    _not_begun: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._trials = {t.name: t for t in self.plan.trials}
        self._name = self.plan.sweep.name
        self._most = _concurrency(self.plan)
        self._told = last_words(self.workspace, self._name)
        self._event_log = EventLog(self.workspace, sweep_call(self._name))
        self._outage = Outage(self.poll_s, lambda: self.clock(), self.note)

    # ------------------------------------------------------------ for the orchestrator

    @property
    def shown(self) -> tuple[Member, ...]:
        """The running trials."""
        return tuple(self.live.values())

    def begin(self) -> None:
        """Record the orchestrator of the sweep, and find the trials that are done."""
        self._event_log.write_orchestrator("running", None)
        if self.forecast is not None:
            self.budget.expect(self.forecast)
        for trial in self.plan.trials:
            with_patience(lambda trial=trial: self._sort_out(trial))  # type: ignore[misc]

    def _sort_out(self, trial: Trial) -> None:
        stages, layout, is_done = trial.plan.stages, self.workspace.layout, self.budget.use.is_done
        self._begun |= {s.id for s in stages if is_done(s.id) or layout.stage(s.id).spec.exists()}
        if all(is_done(s.id) for s in stages if not is_service(s.id)):
            run = self._recorded(trial) or self._new_run(trial, self._plan(trial, False))
            self._print_line(trial, TrialVerdict("done", run=run.run))
        else:
            self._waiting.append(trial)
            self.words[trial.name] = TrialVerdict()

    def admit(self, stopping: bool) -> list[Member]:
        """Trials that begin now. Whatever the file system does not answer is retried later."""
        self._stopping, self.at_once = stopping, False
        before = dict(self.live)
        if not self._outage.pause_s:
            try:
                self._handle_cancel()
                self._watch_canary()
                self.at_once = self._begin_more()
                self._outage.is_over()
            except Exception as error:
                self._outage.met(error)
        self.more = bool(self._waiting) and not self._stopping and not self.held
        return [member for name, member in self.live.items() if name not in before]

    def ended(self, member: Member, error: Exception | None) -> None:
        """Record how a trial has ended."""
        trial = self._trials[member.name]
        del self.live[member.name]
        self._not_before = 0.0
        run = member.run.run
        # An error of one trial is reported with it, and stops no other.
        word = _word_of_error(error, run) if error else _word_of_views(member.views(), run)
        self._print_line(trial, word)

    def end(self, error: BaseException | None) -> None:
        """Record that the sweep has no orchestrator any more."""
        for trial in self._waiting if self.held and error is None else ():
            self._print_line(trial, TrialVerdict("held", self.held))
        code = self.exit_code if error is None else getattr(error, "exit_code", 70)
        self._event_log.write_orchestrator("ended", code)

    def note(self, event: Mapping[str, Any]) -> None:
        """Write a line to the sweep's event log. One writer: this process."""
        self._event_log.note(event)

    # ------------------------------------------------------------ for displays

    def standing(self) -> dict[str, TrialVerdict]:
        """State of every trial."""
        return dict(self.words)

    @property
    def exit_code(self) -> int:
        """0: all is done. 1: a trial has failed. Else that of the first trial that can continue."""
        words = self.words.values()
        if any(w.state == "failed" for w in words):
            return 1
        codes = (w.exit_code for w in words if w.state == "interrupted")
        otherwise = 0 if all(w.state == "done" for w in words) else 6
        return next((code for code in codes if code not in (0, 6)), otherwise)

    # ------------------------------------------------------------ ending

    def _handle_cancel(self) -> None:
        asked = self.workspace.cancel_asked(sweep_call(self._name))
        if self._stopping or asked is None:
            return
        by = asked.get("by", "somebody")
        if asked["stages"]:  # trials that may not begin
            if not self.held:
                self._hold(f"suspended by {by}; `refiner resume` continues")
            return
        reason = f"cancelled by {by}"
        self.note({"event": "cancel", "reason": reason})
        ours = {member.run.run for member in self.shown}
        self._stopping = True
        self.request_stop(reason, "cancelled", wanted_by_others(self.workspace, ours))

    # ------------------------------------------------------------ beginning

    def _begin_more(self) -> bool:
        """Begin as many trials as allowed. True if more may begin at once."""
        if self._stopping or self.held or self.clock() < self._not_before:
            return False
        for _ in range(_AT_ONCE):
            trial = self._next()
            if trial is None:
                return False
            self._begin(trial)
        return True

    def _next(self) -> Trial | None:
        """The next trial that may begin now."""
        if not self._waiting or len(self.live) >= self._most:
            return None
        trial = self.canary[0] if self.canary else self._waiting[0]
        if self.canary and self.words[trial.name].state != "waiting":
            return None
        live = [self._trials[name] for name in self.live]
        why = self.budget.why_waiting(trial, self._begun, live)
        if why and not self.live:
            self._hold(why)
        elif why:
            self._not_before = self.clock() + _AGAIN_S  # or when a running trial has ended
        return None if why else trial

    def _begin(self, trial: Trial) -> None:
        self._waiting.remove(trial)
        try:
            member = self._member(trial, bool(self.canary))
        except Exception as error:
            if not is_outage(error):
                self._print_line(trial, _word_of_error(error, ""))
                return
            self._waiting.insert(0, trial)
            self._not_before = self.clock() + _AGAIN_S
            why = error.what if isinstance(error, RefinerError) else str(error)
            if trial.name not in self.words or self.words[trial.name].reason != why:
                self._print_line(trial, TrialVerdict("waiting", why))
            return
        self.live[trial.name] = member
        self._begun.update(s.id for s in trial.plan.stages)
        self._print_line(trial, TrialVerdict("running", run=member.run.run))

    def _hold(self, why: str) -> None:
        """Begin no more trials. Running ones continue."""
        self.held = why
        self.note({"event": "hold", "reason": why})

    # ------------------------------------------------------------ trials as runs

    def _member(self, trial: Trial, canary: bool) -> Member:
        """Record the trial as a run, or take its run up."""
        plan = self._plan(trial, canary)
        run = self._recorded(trial)
        if run is None or not self._goes_on(trial, run):
            run = self._new_run(trial, plan)
        member = Member(plan, run, self.workspace, trial.name, self.clock)
        self._take_up(member)
        self.workspace.withdraw_cancel(run.run)
        try:
            member.begin()
        except Exception as error:  # else it would seem to be running until the sweep ends
            member.give_up(error)
            self._not_begun.add(run.run)
            raise
        self._not_begun.discard(run.run)
        return member

    def _take_up(self, member: Member) -> None:
        run_id = member.run.run
        who = orchestrator_of(self.workspace, run_id)
        if run_id in self._not_begun and who.standing == "running" and who.pid == os.getpid():
            return  # in an outage; giving up could not be recorded either
        try:
            member.take_up(regardless=self.take_over)
        except ConfigurationError as error:
            error.exit_code, error.resumable = 6, True
            raise

    def _plan(self, trial: Trial, canary: bool) -> Plan:
        changes: dict[str, Any] = {"tracking.group": self._name}
        if canary:
            changes |= {f"{kind}.first_save": _CANARY_STEPS for kind in STAGES}
        return replace(trial.plan, config=replace_fields(trial.plan.config, changes))

    def _recorded(self, trial: Trial) -> RunRecord | None:
        """The trial's run, if it exists and has the trial's current stages."""
        run_id = trial_run(self.workspace, self._name, trial.name)
        try:
            run = None if run_id is None else self.workspace.read_run(run_id)
        except ConfigurationError:  # it was deleted
            return None
        wanted = {s.name: s.id for s in trial.plan.stages}
        return run if run is not None and dict(run.stages) == wanted else None

    def _goes_on(self, trial: Trial, run: RunRecord) -> bool:
        """True if a trial continues as its earlier run: it has not failed, and its code exists."""
        failed = self._told.get(trial.name, {}).get("state") == "failed"
        return not failed and (not run.code or (self.workspace.layout.code / run.code).is_dir())

    def _new_run(self, trial: Trial, plan: Plan) -> RunRecord:
        pinned = self._pinned = self._pinned or self.pin(self.workspace)
        more = {"sweep": {"name": self._name, "arm": trial.arm, "seed": trial.seed}}
        once = replace(pinned, diff="")  # all trials share one file
        recipe = self.plan.sweep.recipe
        run = record_run(plan, self.workspace, recipe, trial.overrides, once, **more)
        if pinned.diff:
            path = self.workspace.layout.run(run.run).diff
            if not link(self._diff, path):  # the first one, or there are no hard links here
                atomic.write_text(path, pinned.diff)
                self._diff = path
        self.workspace.write_run(run)
        note_trial(self.workspace, self._name, trial.name, run.run)
        return run

    # ------------------------------------------------------------ the canary

    def _watch_canary(self) -> None:
        """Release the other trials once the canary has been measured, or hold them."""
        if self.canary is None or self._stopping:
            return
        (trial, stage), measured = self.canary, _measured_canary(self.workspace, self.canary[1])
        word = self.words.get(trial.name, TrialVerdict())
        if measured is not None:
            self.canary = None
            self._release(trial.name, measured)
        elif word.state in _OVER and word.state != "done":
            self.canary = None
            if self.past_canary or _failed_by_its_arm(self.workspace, stage):
                self.note({"event": "canary", "trial": trial.name, "passed": False})
            else:
                how = "failed" if word.state == "failed" else "been stopped"
                self._hold(
                    f"the canary {trial.name} has {how}: "
                    f"{first_line(word.reason, 300).rstrip('.')}; no other trial was begun "
                    "(--past-canary continues without it)"
                )

    def _release(self, name: str, measured: CanaryMeasure) -> None:
        forecast = self.corrected([measured])
        self.budget.expect(forecast)
        self.note({"event": "canary", "trial": name, "passed": True, "stage": measured.stage})
        total = next(iter(forecast_lines(forecast)), "")
        self.tell(f"{name} has measured the cost of training: {canary_text(measured)}\n{total}")
        known = {p.field for p in self.passed(self.forecast)} if self.forecast else set()
        new = [p.text for p in self.passed(forecast) if p.field not in known]
        if new and not self.past_canary and self._waiting:
            self._hold(
                f"by the measurement of {name}, the sweep {'; it '.join(new)} (raise the limit, or "
                "run what fits with --past-canary)"
            )
            self._stopping = True
            self.request_stop("the sweep is held: its forecast exceeds a limit")

    # ------------------------------------------------------------ telling

    def _print_line(self, trial: Trial, word: TrialVerdict) -> None:
        """Record a trial's state, and report it if it is new."""
        told = self._told.get(trial.name, {})
        before = self.words.get(trial.name)
        self.words[trial.name] = word
        if before is None and told.get("state") == word.state == "done":
            return  # it was reported in an earlier call
        how = picked(word, "state", "reason", "run")
        self.note({"event": "trial", "trial": trial.name, **how})


def _concurrency(plan: SweepPlan) -> int:
    """Trials at a time: the sweep's own limit, else the slots of this machine, or what a cluster's
    queue accepts."""
    dispatch = plan.config.dispatch
    if plan.sweep.limits.concurrency is not None:
        return plan.sweep.limits.concurrency
    return dispatch.max_parallel if dispatch.executor == "local" else _MANY
