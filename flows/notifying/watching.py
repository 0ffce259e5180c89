"""Watchers of runs and sweeps: pauses, a trial that fails, limits, the end become messages.

In: views, again and again, as a terminal gets them. Out: messages. A watcher never raises and never
waits, except in ``close``, and there only for so long: telling somebody is no part of the work. A
trial of a sweep sends no message of its own: the first one that fails is told of, with the others
at the end, however many there are.
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
from flows.notifying.messages import Message, Pauses, Sight, Topic
from flows.notifying.sender import Sender
from flows.running.console import trials_text
from flows.running.showing import Hears
from infra.host.processes import ProcessId, host_name
from infra.orchestrator.reconcile import paused_after
from infra.store.orchestrators import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord, SweepRecord
from refiner_core.contract.sections.steering import alarms_of
from refiner_core.contract.types import StageView

log = logging.getLogger(__name__)


class Watching(Hears):
    """Watcher of a run or a sweep.

    Parameters
    ----------
    topic, notify, workspace
        What it is about, what is told of, and where it lies.
    sender
        Sends messages.
    before, resumed
        Who worked on it last: what had ended well is no news when it is taken up again.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        topic: Topic,
        notify: NotifyConfig,
        workspace: Workspace,
        sender: Sender,
        before: Orchestrator,
        resumed: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic, self._workspace, self._sender = topic, workspace, sender
        self._was_over = before.standing == "ended" and before.exit_code == 0
        self._resumed, self._worked = resumed, False
        self._clock, self._began = clock, clock()
        self._pauses = Pauses(60.0 * notify.pause_min)
        self._asked = ""
        self._works = True
        self._safely(lambda: sender.begin(words.gone(topic, str(ProcessId.of()))))

    def asked_to_stop(self, why: str) -> None:
        """Somebody wants it to end."""
        self._asked = why

    def show(self, views: Mapping[str, StageView]) -> None:
        """Hear how all stages are now."""
        self._safely(lambda: self._look(views))

    def over(self, views: Mapping[str, StageView]) -> None:
        """Nothing more will happen."""
        self._safely(lambda: self._end(views))
        self._safely(self._sender.end)

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error; a second Ctrl-C is one."""
        if isinstance(error, KeyboardInterrupt):
            why = "it was left by Ctrl-C; jobs that it had submitted may go on"
            self._tell(words.stopped(self.topic, why))
        else:
            self._tell(words.broke(self.topic, error))
        self._safely(self._sender.end)

    def close(self) -> None:
        """Wait a while for what is on its way; Ctrl-C leaves it to the sender."""
        with contextlib.suppress(KeyboardInterrupt):  # the run is over, and has its exit code
            self._safely(self._sender.close)

    @abstractmethod
    def _look(self, views: Mapping[str, StageView]) -> None:
        """See what is worth a word now."""

    @abstractmethod
    def _end(self, views: Mapping[str, StageView]) -> None:
        """Tell how all of it has ended."""

    def _watch_pauses(self, sights: Mapping[str, Sight]) -> None:
        now = self._clock() - self._began
        for pause in self._pauses.look(sights, now, quiet=self._sender.quiet):
            self._tell(words.paused(self.topic, *pause))

    def _why_stopped(self) -> str:
        asked = self._workspace.cancel_asked(self.topic.call)
        return self._asked or (f"cancelled by {asked.get('by', 'somebody')}" if asked else "")

    def _tell(self, message: Message) -> None:
        self._safely(lambda: self._sender.tell(message))

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug here must not end a run; it is said once."""
        try:
            action()
        except Exception as error:
            if self._works:
                log.warning("telling of %s does not work", self.topic.name, exc_info=error)
            self._works = False


class RunWatching(Watching):
    """Watches one run."""

    def __init__(self, plan: Plan, **common: Any) -> None:
        super().__init__(**common)
        self._plan = plan

    def _look(self, views: Mapping[str, StageView]) -> None:
        self._worked = self._worked or not all(view.terminal for view in views.values())
        self._watch_pauses({name: sight_of(view) for name, view in views.items()})

    def _end(self, views: Mapping[str, StageView]) -> None:
        states = {view.state for view in views.values()}
        if states <= {"done", "skipped"}:
            is_new = self._worked or not self._was_over
            if is_new and (self._resumed or "done" in states):
                self._tell(words.finished(self.topic, views, self._numbers()))
        elif "failed" not in states and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, why))
        else:
            causes = {v.name: self._cause(v) for v in views.values() if _ended_badly(v)}
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
        except (OSError, RefinerError) as error:  # that it has failed is known all the same
            log.warning("why %s has failed cannot be read: %s", view.name, error)
            return "failed"
        last = record.attempts[-1] if record is not None and record.attempts else None
        return last.outcome.failure if last is not None and last.outcome is not None else "failed"


def _ended_badly(view: StageView) -> bool:
    return view.state == "failed" or (
        view.state == "interrupted" and not view.message.startswith("needs ")
    )


def sight_of(view: StageView) -> Sight:
    """Sight of a stage: why it stands still, if it does, and how far it has come."""
    done = view.progress.done if view.progress is not None else 0
    cause = ""
    if view.state == "paused":
        cause = paused_after(view.message) or "disk_full"
    elif view.state == "waiting":
        cause = paused_after(view.message)
    return Sight(cause, view.message, done, view.terminal)


def hears_of(
    watch: Callable[..., Watching],
    call: str,
    record: RunRecord | SweepRecord,
    notify: NotifyConfig,
    workspace: Workspace,
    before: Orchestrator,
    *,
    resumed: bool,
    say: Callable[[str], None],
) -> Hears:
    """A watcher of a call that this process has just taken up; one that tells nobody where no
    channel is named."""
    if not alarms_of(notify):
        return Hears()
    return watch(
        topic=Topic(call, record.recipe, str(workspace.root), host_name()),
        notify=notify,
        workspace=workspace,
        sender=Sender(notify, record.started_at, workspace.layout.run(call).events, say),
        before=before,
        resumed=resumed,
    )


#: A trial that fails when the sweep is about to end is told of with its end.
_TRIAL_WAIT_S = 5.0


class SweepWatching(Watching):
    """Watches one sweep, a :class:`flows.sweeping.admission.Admission`."""

    def __init__(self, sweep: Any, **common: Any) -> None:
        super().__init__(**common)
        self._sweep = sweep
        self._told_held = self._told_trial = False
        self._failed_at: float | None = None
        self._was_wrong: frozenset[str] | None = None

    def _look(self, views: Mapping[str, StageView]) -> None:
        trials = self._sweep.standing()
        self._worked = self._worked or bool(views)
        # ARM/seed1/grpo is a stage of the trial ARM/seed1.
        sights = {" ".join(n.rsplit("/", 1)): sight_of(view) for n, view in views.items()}
        self._watch_pauses(sights)
        if self._sweep.held:
            self._tell_held()
        self._watch_trials(trials)

    def _tell_held(self) -> None:
        if not self._told_held:
            self._tell(words.held(self.topic, self._sweep.held))
        self._told_held = True

    def _watch_trials(self, trials: Mapping[str, Any]) -> None:
        """Tell of the first one that fails while this call works on it."""
        wrong = frozenset(name for name, word in trials.items() if word.state == "failed")
        if self._was_wrong is None:
            self._was_wrong = wrong
        new = [name for name in trials if name in wrong - self._was_wrong]
        if not new or self._told_trial:
            return
        now = self._clock()
        self._failed_at = now if self._failed_at is None else self._failed_at
        if now - self._failed_at >= _TRIAL_WAIT_S:
            first, self._told_trial = new[0], True
            counts = trials_text(trials)
            self._tell(words.trial_failed(self.topic, first, trials[first].reason, counts))

    def _end(self, _: Mapping[str, StageView]) -> None:
        trials = self._sweep.standing()
        wrong = {n: w.reason for n, w in trials.items() if w.state == "failed"}
        halted = {n: w.reason for n, w in trials.items() if w.state == "interrupted"}
        if not wrong and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, why))
        elif self._sweep.held and not wrong:
            self._tell_held()
        elif wrong or halted:
            self._tell(words.sweep_ended(self.topic, {**wrong, **halted}, trials_text(trials)))
        elif self._worked or (self._resumed and not self._was_over):
            self._tell(words.sweep_ended(self.topic, {}, trials_text(trials)))
