"""Admission of the trials of a sweep: those that may begin now, and how each stands.

In: a planned sweep, trials that can be begun, a budget. Out: members for an orchestrator, as they
may begin, and how each trial ended, told as it happens: to the sweep's event log, and to whoever
shows it. Trials begin in the plan's order, as many at a time as may; what is all done is not begun
at all. One trial goes ahead alone until it has shown what training takes
(:mod:`flows.sweeping.trials`). A trial that fails stops no other; a shared stage that fails stops
those that need it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flows.sweeping.budget import Budget
from flows.sweeping.forecasting import canary_text, forecast_lines
from flows.sweeping.live import LivePage
from flows.sweeping.trials import (
    OVER,
    Canary,
    Trials,
    TrialWord,
    failed_by_its_arm,
    measured_canary,
    word_of_error,
    word_of_views,
)
from infra.jobs.failures import is_outage
from infra.orchestrator.members import Diary, Member, Source
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import Outage, with_patience
from infra.store.layout import sweep_call
from infra.store.orchestrators import wanted_by_others
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.records import picked
from refiner_core.contract.services import is_service
from sweeps.forecast import Passed, SweepForecast
from sweeps.history import CanaryMeasure
from sweeps.values import SweepPlan, Trial

#: Trials that are begun after one round, so that those at work are not left alone for long.
_AT_ONCE = 8
#: How a trial that could not be begun for want of room, or of anything else, is tried again.
_AGAIN_S = 5.0


@dataclass
class Outlook:
    """Expectations of the sweep, and who hears when they change.

    Parameters
    ----------
    canary
        The trial that goes ahead; None where nobody needs to.
    forecast
        As it was shown before the sweep began.
    corrected
        Makes another forecast by what the canary has shown.
    passed
        The limits that a forecast passes.
    past_canary
        Release the others whatever the canary shows.
    """

    canary: Canary | None
    forecast: SweepForecast | None
    corrected: Callable[[Sequence[CanaryMeasure]], SweepForecast]
    passed: Callable[[SweepForecast], Sequence[Passed]]
    past_canary: bool = False


@dataclass
class Admission(Source):
    """Admits the trials of a sweep.

    Parameters
    ----------
    plan, workspace
        What should be, and where it is recorded.
    trials
        Begins trials.
    budget
        Says whether another one may begin.
    outlook
        The canary and the forecast.
    concurrency
        Trials at a time.
    poll_s
        Seconds after an outage until it is tried again, at first.
    tell
        Hears what people should know.
    page
        Keeps the report fresh while trials are at work.
    """

    plan: SweepPlan
    workspace: Workspace
    trials: Trials
    budget: Budget
    outlook: Outlook
    concurrency: int
    poll_s: float
    tell: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    page: LivePage | None = None
    request_stop: Callable[..., None] = field(init=False)
    live: dict[str, Member] = field(default_factory=dict)
    words: dict[str, TrialWord] = field(default_factory=dict)
    held: str = ""
    more: bool = True
    at_once: bool = False
    _waiting: list[Trial] = field(default_factory=list)
    _begun: set[str] = field(default_factory=set)
    _stopping: bool = False
    _ahead: Canary | None = None
    _not_before: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._trials = {t.name: t for t in self.plan.trials}
        call = sweep_call(self.plan.sweep.name)
        self._diary = Diary(self.workspace, call)
        self._outage = Outage(self.poll_s, lambda: self.clock(), self.note)

    # ------------------------------------------------------------ for the orchestrator

    @property
    def shown(self) -> tuple[Member, ...]:
        """The trials at work."""
        return tuple(self.live.values())

    def begin(self) -> None:
        """Say who works on the sweep, and sort out what is done."""
        self._diary.write_orchestrator("running", None)
        self._ahead = self.outlook.canary
        if self.outlook.forecast is not None:
            self.budget.expect(self.outlook.forecast)
        for trial in self.plan.trials:
            with_patience(lambda trial=trial: self._sort_out(trial))  # type: ignore[misc]

    def _sort_out(self, trial: Trial) -> None:
        stages, layout, is_done = trial.plan.stages, self.workspace.layout, self.budget.use.is_done
        self._begun |= {s.id for s in stages if is_done(s.id) or layout.stage(s.id).spec.exists()}
        if all(is_done(s.id) for s in stages if not is_service(s.id)):
            self._say(trial, TrialWord("done", run=self.trials.ensure_run(trial)))
        else:
            self._waiting.append(trial)
            self.words[trial.name] = TrialWord()

    def admit(self, stopping: bool) -> list[Member]:
        """Trials that begin now. What a file system does not answer is asked again later."""
        self._stopping, self.at_once = stopping, False
        before = dict(self.live)
        if not self._outage.pause_s:
            try:
                self._hear_cancel()
                self._watch_canary()
                self.at_once = self._begin_more()
                self._outage.is_over()
            except Exception as error:
                self._outage.met(error)
        if self.page is not None and self.live:
            self.page.tick()
        self.more = bool(self._waiting) and not self._stopping and not self.held
        return [member for name, member in self.live.items() if name not in before]

    def ended(self, member: Member, error: Exception | None) -> None:
        """Say how a trial has ended."""
        trial = self._trials[member.name]
        del self.live[member.name]
        self._not_before = 0.0
        run = member.run.run
        # One trial's trouble is told with it, and stops no other.
        word = word_of_error(error, run) if error else word_of_views(member.views(), run)
        self._say(trial, word)

    def end(self, error: BaseException | None) -> None:
        """Say that nobody works on the sweep any more."""
        for trial in self._waiting if self.held and error is None else ():
            self._say(trial, TrialWord("held", self.held))
        code = self.exit_code if error is None else getattr(error, "exit_code", 70)
        self._diary.write_orchestrator("ended", code)
        if self.page is not None:
            (self.page.end if error is None else self.page.close)()

    def note(self, event: Mapping[str, Any]) -> None:
        """One line in the sweep's event log. One writer: this process."""
        self._diary.note(event)

    # ------------------------------------------------------------ for who shows it

    def standing(self) -> dict[str, TrialWord]:
        """Standing of every trial."""
        with self._lock:
            return dict(self.words)

    @property
    def exit_code(self) -> int:
        """0: all is done. 1: a trial has failed. Else that of the first trial that can go on."""
        words = self.words.values()
        if any(w.state == "failed" for w in words):
            return 1
        codes = (w.exit_code for w in words if w.state == "interrupted")
        otherwise = 0 if all(w.state == "done" for w in words) else 6
        return next((code for code in codes if code not in (0, 6)), otherwise)

    # ------------------------------------------------------------ ending

    def _hear_cancel(self) -> None:
        call = sweep_call(self.plan.sweep.name)
        if self._stopping or (asked := self.workspace.cancel_asked(call)) is None:
            return
        by = asked.get("by", "somebody")
        if asked["stages"]:  # trials: none of them is to begin
            if not self.held:
                self._hold(f"suspended by {by}; `refiner resume` goes on")
            return
        reason = f"cancelled by {by}"
        self.note({"event": "cancel", "reason": reason})
        ours = {member.run.run for member in self.shown}
        self._stopping = True
        self.request_stop(reason, "cancelled", wanted_by_others(self.workspace, ours))

    # ------------------------------------------------------------ beginning

    def _begin_more(self) -> bool:
        """Begin what may begin. True if more may begin at once."""
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
        if not self._waiting or len(self.live) >= self.concurrency:
            return None
        trial = self._waiting[0]
        if self._ahead is not None:
            trial = self._ahead.trial
            if not any(t is trial for t in self._waiting):
                return None
        live = [self._trials[name] for name in self.live]
        why = self.budget.why_held(trial, self._begun, live)
        if why and not self.live:
            self._hold(why)
        elif why:
            self._not_before = self.clock() + _AGAIN_S  # or when one of those at work has ended
        return None if why else trial

    def _begin(self, trial: Trial) -> None:
        self._waiting.remove(trial)
        ahead = self._ahead is not None and self._ahead.trial is trial
        try:
            member = self.trials.begin(trial, canary=ahead)
        except Exception as error:
            if not is_outage(error):
                self._say(trial, word_of_error(error, ""))
                return
            self._waiting.insert(0, trial)
            self._not_before = self.clock() + _AGAIN_S
            why = error.what if isinstance(error, RefinerError) else str(error)
            if trial.name not in self.words or self.words[trial.name].reason != why:
                self._say(trial, TrialWord("waiting", why))
            return
        self.live[trial.name] = member
        self._begun.update(s.id for s in trial.plan.stages)
        self._say(trial, TrialWord("running", run=member.run.run))

    def _hold(self, why: str) -> None:
        """Begin nothing more. What runs goes on."""
        self.held = why
        self.note({"event": "hold", "reason": why})

    # ------------------------------------------------------------ the canary

    def _watch_canary(self) -> None:
        """Release the others once it has shown what there is to see, or hold them."""
        if self._ahead is None or self._stopping:
            return
        ahead, word = self._ahead, self.words.get(self._ahead.trial.name, TrialWord())
        measured = measured_canary(self.workspace, ahead.stage)
        if measured is not None:
            self._ahead = None
            self._release(ahead.trial.name, measured)
        elif word.state in OVER and word.state != "done":
            self._ahead = None
            if self.outlook.past_canary or failed_by_its_arm(self.workspace, ahead):
                self.note({"event": "canary", "trial": ahead.trial.name, "passed": False})
            else:
                how = "failed" if word.state == "failed" else "been stopped"
                self._hold(
                    f"{ahead.trial.name}, which went ahead, has {how}: "
                    f"{first_line(word.reason, 300).rstrip('.')}; nothing else was begun "
                    "(--past-canary goes on without it)"
                )

    def _release(self, name: str, measured: CanaryMeasure) -> None:
        forecast = self.outlook.corrected([measured])
        before = self.outlook.forecast
        self.budget.expect(forecast)
        self.note({"event": "canary", "trial": name, "passed": True, "stage": measured.stage})
        total = next(iter(forecast_lines(forecast)), "")
        self.tell(f"{name} has shown what training takes: {canary_text(measured)}\n{total}")
        known = {p.field for p in self.outlook.passed(before)} if before else set()
        new = [p.text for p in self.outlook.passed(forecast) if p.field not in known]
        if new and not self.outlook.past_canary and self._waiting:
            self._hold(
                f"by what {name} has shown, the sweep {'; it '.join(new)} (raise the limit, or "
                "take what fits with --past-canary)"
            )
            self._stopping = True
            self.request_stop("the sweep is held: its forecast passes a limit")

    # ------------------------------------------------------------ telling

    def _say(self, trial: Trial, word: TrialWord) -> None:
        """Note how a trial stands, and tell it if that is news."""
        told = self.trials.told.get(trial.name) or {}
        before = self.words.get(trial.name)
        with self._lock:
            self.words[trial.name] = word
        if before is None and told.get("state") == word.state == "done":
            return  # it was said in an earlier call
        how = picked(word, "state", "reason", "run")
        self.note({"event": "trial", "trial": trial.name, **how})
