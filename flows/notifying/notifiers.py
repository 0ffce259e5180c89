"""Watchers of runs and sweeps: pauses, a failed trial, limits, the end become messages.

In: views, repeatedly, as for a terminal. Out: messages. A watcher never raises and never waits,
except for a limited time in ``close``: notifications are no part of the work. Trials of a sweep
send no messages of their own: the first failure is reported at once, the others at the end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from flows.evaluations import evaluations_of
from flows.notifying import messages as words
from flows.notifying.messages import Message, Pauses, StageState, Topic
from flows.notifying.sender import Sender
from flows.running.console import trials_text
from flows.running.foreground import CallObserver
from infra.host.processes import ProcessId, host_name
from infra.orchestrator.reconcile import paused_after
from infra.store.orchestrators import OrchestratorProcess
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, SweepRecord
from refiner_core.contract.types import StageView

log = logging.getLogger(__name__)


class _CallNotifier(CallObserver):
    """Watcher of a run or a sweep.

    Parameters
    ----------
    call, record, notify, workspace
        The call, the selection of messages, and the workspace.
    before, resumed
        The previous orchestrator: what had ended well is not reported again after a resume.
    print_line
        Receives failures.
    sender, clock
        Sends messages; seconds, monotonic.
    """

    def __init__(
        self,
        call: str,
        record: RunRecord | SweepRecord,
        notify: NotifyConfig,
        workspace: Workspace,
        before: OrchestratorProcess,
        *,
        resumed: bool,
        print_line: Callable[[str], None],
        sender: Sender | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = Topic(call, record.recipe, str(workspace.root), host_name())
        events = workspace.layout.run(call).events
        self._sender = sender or Sender(notify, record.started_at, events, print_line)
        self._workspace = workspace
        #: Whether its end is reported; set, too, once anything has run.
        self._is_news = resumed and not (before.standing == "ended" and before.exit_code == 0)
        self._clock, self._pauses = clock, Pauses(60.0 * notify.pause_min)
        self._asked = ""
        why = f"Its orchestrator, {ProcessId.of()}, is gone (killed, or out of memory)."
        gone = words.gone(self.topic, why, "orchestrator_gone")
        self._safely(lambda: self._sender.begin(gone))

    def stop_requested(self, why: str) -> None:
        """A stop was requested."""
        self._asked = why

    def show(self, views: Mapping[str, StageView]) -> None:
        """Receive the views of all stages."""
        self._is_news |= not all(view.terminal for view in views.values())
        self._safely(lambda: self._look(views))

    def over(self, views: Mapping[str, StageView]) -> None:
        """The call has ended."""
        self._safely(lambda: self._end(views))
        self._safely(self._sender.end)

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error; a second Ctrl-C is one."""
        if isinstance(error, KeyboardInterrupt):
            why = "it was ended by Ctrl-C; submitted jobs may continue"
            self._tell(words.stopped(self.topic, why))
        else:
            why = f"{type(error).__name__}: {words.line(str(error))}"
            self._tell(words.gone(self.topic, why, "error"))
        self._safely(self._sender.end)

    def close(self) -> None:
        """Wait a while for messages in flight; Ctrl-C leaves them to the sender."""
        with contextlib.suppress(KeyboardInterrupt):  # the run is over, and has its exit code
            self._safely(self._sender.close)

    def _look(self, views: Mapping[str, StageView]) -> None:
        """Send messages for changes. ARM/seed1/grpo is a stage of the trial ARM/seed1."""
        states = {" ".join(name.rsplit("/", 1)): state_of(view) for name, view in views.items()}
        for pause in self._pauses.look(states, self._clock(), quiet=self._sender.quiet):
            self._tell(words.paused(self.topic, *pause))

    @abstractmethod
    def _end(self, views: Mapping[str, StageView]) -> None:
        """Report the end of the call."""

    def _why_stopped(self) -> str:
        asked = self._workspace.cancel_asked(self.topic.call)
        return self._asked or (f"cancelled by {asked.get('by', 'somebody')}" if asked else "")

    def _tell(self, message: Message) -> None:
        self._safely(lambda: self._sender.tell(message))

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug here must not end a run."""
        try:
            action()
        except Exception as error:
            log.warning("notifications for %s do not work", self.topic.name, exc_info=error)


class RunNotifier(_CallNotifier):
    """Watches one run."""

    def __init__(self, plan: Plan, *common: Any, **more: Any) -> None:
        super().__init__(*common, **more)
        self._plan = plan

    def _end(self, views: Mapping[str, StageView]) -> None:
        states = {view.state for view in views.values()}
        if states <= {"done", "skipped"}:
            if self._is_news:
                self._tell(words.finished(self.topic, views, self._numbers()))
        elif "failed" not in states and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, why))
        else:
            ended = (v for v in views.values() if v.state in ("failed", "interrupted"))
            causes = {v.name: self._cause(v) for v in ended if not _waited_in_vain(v)}
            self._tell(words.failed(self.topic, views, causes))

    def _numbers(self) -> list[dict[str, Any]]:
        try:
            return evaluations_of(self._plan, self._workspace)
        except (OSError, KeyError, RefinerError) as error:
            log.warning("the message has no numbers: %s", error)
            return []

    def _cause(self, view: StageView) -> str:
        """The failure class of a stage that has ended badly."""
        if view.state == "interrupted" and view.exit_code == 5:
            return "disk_full"
        try:
            record = self._workspace.read_record(self._plan.by_name[view.name].id)
        except (OSError, RefinerError) as error:  # the failure is known nevertheless
            log.warning("why %s has failed cannot be read: %s", view.name, error)
            return "failed"
        last = record.attempts[-1] if record is not None and record.attempts else None
        return last.outcome.failure if last is not None and last.outcome is not None else "failed"


def _waited_in_vain(view: StageView) -> bool:
    return view.state == "interrupted" and view.message.startswith("needs ")


def state_of(view: StageView) -> StageState:
    """State of a stage, with the cause if it is paused."""
    cause = paused_after(view.message) if view.state in ("paused", "waiting") else ""
    return StageState(cause or ("disk_full" if view.state == "paused" else ""), view.message)


class SweepNotifier(_CallNotifier):
    """Watches one sweep, a :class:`flows.sweeping.admission.Admission`."""

    def __init__(self, sweep: Any, *common: Any, **more: Any) -> None:
        super().__init__(*common, **more)
        self._sweep = sweep
        self._told_held = self._told_trial = False
        self._was_wrong: frozenset[str] | None = None

    def _look(self, views: Mapping[str, StageView]) -> None:
        super()._look(views)
        if self._sweep.held:
            self._notify_waiting()
        trials = self._sweep.standing()
        wrong = frozenset(name for name, word in trials.items() if word.state == "failed")
        self._was_wrong = wrong if self._was_wrong is None else self._was_wrong
        if (new := sorted(wrong - self._was_wrong)) and not self._told_trial:
            self._told_trial = True
            text = f"{new[0]}: {words.line(trials[new[0]].reason)}\nThe other trials continue."
            about = {"stage": new[0], "cause": "trial_failed"}
            happened = f"continues, but {new[0]} has failed"
            self._tell(self.topic.message("failed", happened, text, "status", **about))

    def _notify_waiting(self) -> None:
        if not self._told_held:
            why = words.line(self._sweep.held, 800)
            text = f"No further trial begins: {why}\nRunning trials finish."
            self._tell(self.topic.message("paused", "is held", text, "status", cause="held"))
        self._told_held = True

    def _end(self, _: Mapping[str, StageView]) -> None:
        trials = self._sweep.standing()
        bad = {n: w for n, w in trials.items() if w.state in ("failed", "interrupted")}
        failed = any(word.state == "failed" for word in bad.values())
        if not failed and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, why))
        elif self._sweep.held and not failed:
            self._notify_waiting()
        elif bad or self._is_news:
            wrong = {name: word.reason for name, word in bad.items()}
            self._tell(words.sweep_ended(self.topic, wrong, trials_text(trials)))
