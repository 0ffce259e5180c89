"""Works on all trials of a sweep in one process: one campaign each, stepped in one thread.

In: a planned sweep, trials that can be begun, a budget. Out: how each trial ended, told as it
happens: to the sweep's event log, and to whoever shows it. Trials begin in the plan's order, as
many at a time as may; what is all done is not begun at all. One trial goes ahead alone until it has
shown what training takes (:mod:`flows.sweeping.canary`). A trial that fails stops no other; a
shared stage that fails stops those that need it. The process may die at any point: the next one
goes on from what is recorded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flows.sweeping.canary import Canary, failed_by_its_arm, measured_canary
from flows.sweeping.limits import Budget
from flows.sweeping.live import LivePage
from flows.sweeping.trials import Live, Trials
from flows.sweeping.words import OVER, TrialWord, how, word_of_error, word_of_views
from infra.campaign.diary import Diary
from infra.campaign.outage import Outage, one_by_one, with_patience
from infra.campaign.timeline import first_line
from infra.campaign.together import SharedRouter
from infra.host.processes import ProcessId
from infra.host.waiting import wait_for
from infra.jobs.failures import is_outage
from infra.store.layout import sweep_call
from infra.store.orchestrators import wanted_by_others
from infra.store.workspace import Workspace
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.services import is_service
from refiner_core.contract.views import StageView
from sweeps.forecast import SweepForecast
from sweeps.history import CanaryMeasure
from sweeps.values import SweepPlan, Trial

log = logging.getLogger(__name__)
#: Looking and showing may cost this share of a core, all trials together.
_LOOK_SHARE = 0.04
_LONGEST_S = 30.0
#: Trials that are begun in one round, so that those at work are not left alone for long.
_AT_ONCE = 8
#: How a trial that could not be begun for want of room, or of anything else, is tried again.
_AGAIN_S = 5.0


@dataclass
class Outlook:
    """What is expected of the sweep, and who hears when that changes.

    Parameters
    ----------
    canary
        The trial that goes ahead; None where nobody needs to.
    forecast
        As it was shown before the sweep began.
    corrected
        Makes another forecast by what the canary has shown.
    passed
        The limits that a forecast passes, in words.
    past_canary
        Release the others whatever the canary shows.
    """

    canary: Canary | None
    forecast: SweepForecast | None
    corrected: Callable[[Sequence[CanaryMeasure]], SweepForecast]
    passed: Callable[[SweepForecast], Sequence[str]]
    past_canary: bool = False


@dataclass
class Supervisor:
    """Steps the campaigns of a sweep; a :class:`flows.running.showing.Runnable`.

    Parameters
    ----------
    plan, workspace, router
        What should be, where it is recorded, where jobs run.
    trials
        Begins trials.
    budget
        Says whether another one may begin.
    outlook
        The canary and the forecast.
    concurrency
        Trials at a time.
    poll_s
        Seconds between rounds, at least.
    tell
        Hears what people should know.
    page
        Keeps the report fresh while trials are at work.
    """

    plan: SweepPlan
    workspace: Workspace
    router: SharedRouter
    trials: Trials
    budget: Budget
    outlook: Outlook
    concurrency: int
    poll_s: float
    tell: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    page: LivePage | None = None
    live: dict[str, Live] = field(default_factory=dict)
    words: dict[str, TrialWord] = field(default_factory=dict)
    held: str = ""
    _waiting: list[Trial] = field(default_factory=list)
    _begun: set[str] = field(default_factory=set)
    _done: set[str] = field(default_factory=set)
    _stop: tuple[str, Literal["interrupted", "cancelled"]] | None = None
    _spared: Mapping[str, str] = field(default_factory=dict)
    _ahead: Canary | None = None
    _not_before: float = 0.0
    _look_s: float = 0.0
    _more: bool = False
    _error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        call = sweep_call(self.plan.sweep.name)
        self._diary = Diary(self.workspace, call, str(ProcessId.of()))
        self._outage = Outage(self.poll_s, lambda: self.clock(), self.note)

    # ------------------------------------------------------------ for the caller

    def start(self) -> None:
        """Begin, in a thread."""
        self.begin()
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def begin(self) -> None:
        """Say who works on the sweep, and sort out what is done; for who calls :meth:`step`."""
        self._diary.write_orchestrator("running", None)
        self._ahead = self.outlook.canary
        if self.outlook.forecast is not None:
            self.budget.expect(self.outlook.forecast)
        for trial in self.plan.trials:
            with_patience(lambda trial=trial: self._sort_out(trial))  # type: ignore[misc]

    def _sort_out(self, trial: Trial) -> None:
        self._begun |= {s.id for s in trial.plan.stages if self._is_begun(s.id)}
        if all(self._is_done(s.id) for s in trial.plan.stages if not is_service(s.id)):
            self._say(trial, TrialWord("done", run=self.trials.ensure_run(trial)))
        else:
            self._waiting.append(trial)
            self.words[trial.name] = TrialWord()

    def step(self) -> bool:
        """One round over all trials. True when nothing is left to do. What a file system does not
        answer is asked again by the next round."""
        began, self._more = time.thread_time(), False
        try:
            with one_by_one() as each:
                with each():
                    self._hear_cancel()
                self.router.refresh()
                look_s = time.thread_time() - began
                for name in list(self.live):
                    look_s += self._step(self.live[name])
                self._look_s = look_s
                with each():
                    self.router.flush()
                with each():
                    self._watch_canary()
                    self._more = self._begin_more()
            self._outage.is_over()
        except Exception as error:
            self._outage.met(error)
            self._not_before = self.clock() + self._outage.pause_s
        over = not self.live and (not self._waiting or self._stop is not None or bool(self.held))
        if over:
            self._hold_the_rest()
            self._diary.write_orchestrator("ended", self.exit_code)
        return over

    def wake_after(self) -> float:
        """Seconds until the next round is due."""
        if self._more:
            return 0.0
        return max(self.poll_s, min(self._look_s / _LOOK_SHARE, _LONGEST_S))

    def views(self) -> dict[str, StageView]:
        """The stages of the trials at work: ``ARM/seed1/grpo``."""
        return {
            f"{trial}/{name}": replace(view, name=f"{trial}/{name}")
            for trial, views in self.working().items()
            for name, view in views.items()
        }

    def standing(self) -> dict[str, TrialWord]:
        """How every trial stands."""
        with self._lock:
            return dict(self.words)

    def working(self) -> dict[str, dict[str, StageView]]:
        """The stages of the trials at work."""
        return {name: live.campaign.views() for name, live in list(self.live.items())}

    def request_stop(
        self, reason: str, failure: Literal["interrupted", "cancelled"] = "interrupted"
    ) -> None:
        """Begin nothing more and ask what runs to save and end. Returns at once."""
        if self._stop is None:
            self._stop = (reason, failure)
        self._wake.set()

    def join(self) -> dict[str, StageView]:
        """Wait for the end; the last views.

        Raises
        ------
        Exception
            Whatever ended the thread.
        """
        wait_for(self._ended)
        if self._error is not None:
            raise self._error
        return self.views()

    @property
    def exit_code(self) -> int:
        """0: all is done. 1: a trial has failed. Else that of the first trial that can go on."""
        words = list(self.words.values())
        if any(w.state == "failed" for w in words):
            return 1
        codes = [
            w.exit_code for w in words if w.state == "interrupted" and w.exit_code not in (0, 6)
        ]
        if codes:
            return codes[0]
        return 0 if all(w.state == "done" for w in words) else 6

    def next_save_bytes(self) -> int:
        """What the largest save that runs now will need."""
        return max(
            (live.campaign.next_save_bytes() for live in list(self.live.values())), default=0
        )

    def note(self, event: Mapping[str, Any]) -> None:
        """One line in the sweep's event log. One writer: this process."""
        self._diary.note(event)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self.step():
                if self.page is not None and self.live:
                    self.page.tick()
                self._wake.wait(self.wake_after())
                self._wake.clear()
            if self.page is not None:
                self.page.end()
        except BaseException as error:  # it surfaces in join()
            log.debug("the sweep ends with an error", exc_info=error)
            self._error = error
            self._diary.write_orchestrator("ended", getattr(error, "exit_code", 70))
            if self.page is not None:
                self.page.close()
        self._ended.set()

    def _hear_cancel(self) -> None:
        call = sweep_call(self.plan.sweep.name)
        if self._stop is None and (asked := self.workspace.cancel_asked(call)) is not None:
            by = asked.get("by", "somebody")
            if asked["stages"]:  # trials: none of them is to begin
                if not self.held:
                    self._hold(f"suspended by {by}; `refiner resume` goes on")
                return
            reason = f"cancelled by {by}"
            self.note({"event": "cancel", "reason": reason})
            ours = {live.run.run for live in self.live.values()}
            self._spared = wanted_by_others(self.workspace, ours)
            self.request_stop(reason, "cancelled")

    def _step(self, live: Live) -> float:
        """One round of a trial; what looking at it has cost."""
        campaign = live.campaign
        try:
            if self._stop is not None:
                campaign.request_stop(*self._stop, self._spared)
            over = campaign.step()
        except Exception as error:  # one trial's trouble is told with it, and stops no other
            campaign.give_up(error)
            self._end_of(live, word_of_error(error, live.run.run))
            return 0.0
        if over:
            self._end_of(live, word_of_views(campaign.views(), live.run.run))
        return campaign.look_s

    def _end_of(self, live: Live, word: TrialWord) -> None:
        self.trials.together.note_busy(live.run.run, ())
        del self.live[live.trial.name]
        self._not_before = 0.0
        self._say(live.trial, word)

    # ------------------------------------------------------------ beginning

    def _begin_more(self) -> bool:
        """Begin what may begin. True if more may begin at once."""
        if self._stop is not None or self.held or self.clock() < self._not_before:
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
        live = [x.trial for x in self.live.values()]
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
            live = self.trials.begin(trial, canary=ahead)
        except Exception as error:
            if not is_outage(error):  # as in `_step`
                self._say(trial, word_of_error(error, ""))
                return
            self._waiting.insert(0, trial)
            self._not_before = self.clock() + _AGAIN_S
            why = error.what if isinstance(error, RefinerError) else str(error)
            if trial.name not in self.words or self.words[trial.name].reason != why:
                self._say(trial, TrialWord("waiting", why))
            return
        self.live[trial.name] = live
        self._begun |= {s.id for s in trial.plan.stages}
        self._say(trial, TrialWord("running", run=live.run.run))

    def _hold(self, why: str) -> None:
        """Begin nothing more. What runs goes on."""
        self.held = why
        self.note({"event": "hold", "reason": why})

    def _hold_the_rest(self) -> None:
        if self.held:
            for trial in self._waiting:
                self._say(trial, TrialWord("held", self.held))

    # ------------------------------------------------------------ the canary

    def _watch_canary(self) -> None:
        """Release the others once it has shown what there is to see, or hold them."""
        if self._ahead is None or self._stop is not None:
            return
        ahead, word = self._ahead, self.words.get(self._ahead.trial.name, TrialWord())
        measured = measured_canary(self.workspace, ahead.stage)
        if measured is not None:
            self._release(measured)
        elif word.state in OVER and word.state != "done":
            if self.outlook.past_canary or failed_by_its_arm(self.workspace, ahead):
                self._ahead = None
                self.note({"event": "canary", "trial": ahead.trial.name, "passed": False})
            else:
                self._ahead = None
                self._hold(
                    f"{ahead.trial.name}, which went ahead, has {how(word)}: "
                    f"{first_line(word.reason, 300).rstrip('.')}; nothing else was begun "
                    "(--past-canary goes on without it)"
                )

    def _release(self, measured: CanaryMeasure) -> None:
        assert self._ahead is not None
        name, self._ahead = self._ahead.trial.name, None
        forecast = self.outlook.corrected([measured])
        before = self.outlook.forecast
        self.budget.expect(forecast)
        self.note({"event": "canary", "trial": name, "passed": True, "stage": measured.stage})
        self.tell(canary_line(name, measured, forecast))
        known = set(self.outlook.passed(before)) if before is not None else set()
        fields = {text.partition(" ")[0] for text in known}
        new = [t for t in self.outlook.passed(forecast) if t.partition(" ")[0] not in fields]
        if new and not self.outlook.past_canary and self._waiting:
            self._hold(
                f"by what {name} has shown, the sweep {'; it '.join(new)} (raise the limit, or "
                "take what fits with --past-canary)"
            )
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
        self.note(
            {
                "event": "trial",
                "trial": trial.name,
                "state": word.state,
                "reason": word.reason,
                "run": word.run,
            }
        )

    def _is_done(self, stage_id: str) -> bool:
        if stage_id not in self._done and self.workspace.layout.stage(stage_id).result.exists():
            self._done.add(stage_id)
        return stage_id in self._done

    def _is_begun(self, stage_id: str) -> bool:
        return stage_id in self._done or self.workspace.layout.stage(stage_id).spec.exists()


def canary_line(name: str, measured: CanaryMeasure, forecast: SweepForecast) -> str:
    """What the canary has shown, and what follows for the sweep."""
    from flows.sweeping.forecasting import canary_text, forecast_lines

    total = next(iter(forecast_lines(forecast)), "")
    return f"{name} has shown what training takes: {canary_text(measured)}\n{total}"
