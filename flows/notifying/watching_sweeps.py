"""Sees what is worth a message in how a sweep goes: a trial that fails, limits, pauses, the end.

In: a sweep at work, looked at again and again. Out: messages of the sweep's own. A trial sends
none: the first one that fails is told of, with the others at the end, however many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flows.notifying import words
from flows.notifying.hears import Hears, Nobody
from flows.notifying.watching import Watching, common_of, sight_of
from flows.notifying.words import Topic
from infra.host.processes import host_name
from infra.store.layout import sweep_call
from infra.store.orchestrators import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.alarms import alarms_of
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.sweep_records import SweepRecord
from refiner_core.contract.views import StageView

#: A trial that fails when the sweep is about to end is told of with its end.
_TRIAL_WAIT_S = 5.0


class SweepAtWork(Protocol):
    """What is asked of a sweep at work: :class:`flows.sweeping.admission.Admission` is one."""

    held: str

    def standing(self) -> Mapping[str, Any]:
        """How every trial stands: ``state`` in a word, and the ``reason``."""
        ...

    def working(self) -> Mapping[str, Mapping[str, StageView]]:
        """The stages of the trials at work."""
        ...


class SweepWatching(Watching):
    """Watches one sweep."""

    def __init__(self, sweep: SweepAtWork, *, resumed: bool, **common: Any) -> None:
        super().__init__(**common)
        self._sweep, self._resumed, self._worked = sweep, resumed, False
        self._told_held = self._told_trial = False
        self._failed_at: float | None = None
        self._was_wrong: frozenset[str] | None = None

    def _look(self, _: Mapping[str, StageView]) -> None:
        trials = self._sweep.standing()
        working = self._sweep.working()
        self._worked = self._worked or bool(working)
        self._watch_pauses(
            {
                f"{t} {name}": sight_of(v)
                for t, found in working.items()
                for name, v in found.items()
            }
        )
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
            counts = counted(trials)
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
            self._tell(words.sweep_ended(self.topic, {**wrong, **halted}, counted(trials)))
        elif self._worked or (self._resumed and not self._was_over):
            self._tell(words.sweep_ended(self.topic, {}, counted(trials)))


def counted(trials: Mapping[str, Any]) -> str:
    """``7 trials done, 1 failed``."""
    found = Counter(word.state for word in trials.values())
    return f"{len(trials)} trials: " + ", ".join(f"{n} {state}" for state, n in found.items())


def hears_of_sweep(
    sweep: SweepAtWork,
    record: SweepRecord,
    notify: NotifyConfig,
    workspace: Workspace,
    before: Orchestrator,
    *,
    resumed: bool,
    say: Callable[[str], None],
) -> Hears:
    """Who tells somebody of a sweep that this process has just taken up; nobody, where no channel
    is named."""
    if not alarms_of(notify):
        return Nobody()
    topic = Topic(sweep_call(record.name), record.recipe, str(workspace.root), host_name())
    common = common_of(topic, notify, workspace, record.started_at, before, say)
    return SweepWatching(sweep, resumed=resumed, **common)
