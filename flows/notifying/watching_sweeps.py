"""Sees what is worth a message in how a sweep goes: a trial that fails, limits, pauses, the end.

In: a supervisor, looked at again and again. Out: messages of the sweep's own. A trial sends none:
the first one that fails is told of, with the others at the end, however many there are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flows.notifying import words
from flows.notifying.hears import Hears, Nobody
from flows.notifying.pauses import Sight
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


class Standing(Protocol):
    """How a trial stands: :class:`flows.sweeping.words.TrialWord` is one."""

    @property
    def state(self) -> str:
        """In a word."""
        ...

    @property
    def reason(self) -> str:
        """Why."""
        ...

    @property
    def run(self) -> str:
        """Its run."""
        ...


class Supervised(Protocol):
    """What is asked of a supervisor: :class:`flows.sweeping.supervisor.Supervisor` is one."""

    held: str

    def standing(self) -> Mapping[str, Standing]:
        """How every trial stands."""
        ...

    def working(self) -> Mapping[str, Mapping[str, StageView]]:
        """The stages of the trials at work."""
        ...


class SweepWatching(Watching):
    """Watches one sweep; a :class:`~flows.notifying.hears.Hears`."""

    def __init__(
        self, supervisor: Supervised, workspace: Workspace, *, resumed: bool, **common: Any
    ) -> None:
        super().__init__(**common)
        self._supervisor, self._workspace, self._resumed = supervisor, workspace, resumed
        self._stages: dict[str, str] = {}  # "TRIAL STAGE" -> trial
        self._failed_at: float | None = None
        self._was_wrong: frozenset[str] | None = None

    def _look(self, views: Mapping[str, StageView]) -> None:
        trials = self._supervisor.standing()
        self._watch_pauses(self._sights(trials))
        if self._supervisor.held:
            key = f"held-{self.turn}"
            self._tell(words.held(self.topic, key, self._supervisor.held))
        self._watch_trials(trials)

    def _sights(self, trials: Mapping[str, Standing]) -> dict[str, Sight]:
        sights = {}
        for trial, views in self._supervisor.working().items():
            for name, view in views.items():
                self._stages[f"{trial} {name}"] = trial
                sights[f"{trial} {name}"] = sight_of(view)
        for name, trial in self._stages.items():
            if name not in sights:
                over = trials[trial].state == "done"
                sights[name] = Sight(over=over, ended=True)
        return sights

    def _watch_trials(self, trials: Mapping[str, Standing]) -> None:
        """Tell of the first one that fails while this call works on it."""
        wrong = frozenset(name for name, word in trials.items() if word.state == "failed")
        if self._was_wrong is None:
            self._was_wrong = wrong
        new = [name for name in trials if name in wrong - self._was_wrong]
        if not new:
            return
        now = self._clock()
        self._failed_at = now if self._failed_at is None else self._failed_at
        if now - self._failed_at >= _TRIAL_WAIT_S:
            self._tell_of_trial(new[0], trials)

    def _tell_of_trial(self, name: str, trials: Mapping[str, Standing]) -> None:
        key = f"trial-failed-{self.turn}"
        reason = trials[name].reason
        self._tell(words.trial_failed(self.topic, key, name, reason, counted(trials)))

    def _end(self, views: Mapping[str, StageView]) -> None:
        trials = self._supervisor.standing()
        self._watch_pauses(self._sights(trials))
        wrong = {n: w.reason for n, w in trials.items() if w.state == "failed"}
        halted = {n: w.reason for n, w in trials.items() if w.state == "interrupted"}
        key = f"ended-{self.turn}"
        if not wrong and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, f"stopped-{self.turn}", why))
        elif self._supervisor.held and not wrong:
            self._tell(words.held(self.topic, f"held-{self.turn}", self._supervisor.held))
        elif wrong or halted:
            message = words.sweep_ended(self.topic, key, {**wrong, **halted}, counted(trials))
            self._tell(message)
        else:
            key = f"finished-{_digest(trials)}"
            message = words.sweep_ended(self.topic, key, {}, counted(trials))
            self._tell(message, silent=not (self._stages or self._resumed))

    def _why_stopped(self) -> str:
        asked = self._workspace.cancel_asked(self.topic.call)
        return self._asked or (f"cancelled by {asked.get('by', 'somebody')}" if asked else "")


def counted(trials: Mapping[str, Standing]) -> str:
    """``7 trials done, 1 failed``."""
    found = Counter(word.state for word in trials.values())
    return f"{len(trials)} trials: " + ", ".join(f"{n} {state}" for state, n in found.items())


def _digest(trials: Mapping[str, Standing]) -> str:
    """Names what there is: a sweep that is taken up again, and finds all done, is no news."""
    made = sorted((name, word.run) for name, word in trials.items())
    return hashlib.sha256(repr(made).encode()).hexdigest()[:12]


def hears_of_sweep(
    supervisor: Supervised,
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
    common = common_of(topic, notify, workspace, record.started_at, say)
    watching = SweepWatching(supervisor, workspace, resumed=resumed, **common)
    watching.begin(before)
    return watching
