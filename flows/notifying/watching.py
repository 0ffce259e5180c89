"""Sees what is worth a message in the views of a run: pauses, how the run ends.

In: views, again and again, as a terminal gets them. Out: messages.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from flows.evaluations import evaluations_of
from flows.notifying import words
from flows.notifying.hears import Hears, Nobody
from flows.notifying.pauses import Pauses, Sight
from flows.notifying.sender import Sender
from flows.notifying.words import Message, Topic
from infra.host.processes import ProcessId, host_name
from infra.orchestrator.reconcile import paused_after
from infra.store.orchestrators import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.alarms import alarms_of
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)


class Watching(Hears):
    """What runs and sweeps have in common.

    Parameters
    ----------
    topic, notify, workspace
        What it is about, what is told of, and where it lies.
    sender
        Sends messages.
    before
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic, self._workspace, self._sender = topic, workspace, sender
        self._was_over = before.standing == "ended" and before.exit_code == 0
        self._clock, self._began = clock, clock()
        self._pauses = Pauses(60.0 * notify.pause_min)
        self._asked = ""
        self._works = True
        self._safely(lambda: sender.begin(words.gone(topic, str(ProcessId.of()))))

    def asked_to_stop(self, why: str) -> None:
        """Somebody wants it to end."""
        self._asked = why

    def show(self, views: Mapping[str, StageView]) -> None:
        """How all stages are now."""
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
            self._tell(words.paused(self.topic, pause))

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

    def __init__(self, plan: Plan, *, resumed: bool, **common: Any) -> None:
        super().__init__(**common)
        self._plan, self._resumed, self._worked = plan, resumed, False

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
    """Whether a stage stands still, why, and how far it has come."""
    done = view.progress.done if view.progress is not None else 0
    cause = ""
    if view.state == "paused":
        cause = paused_after(view.message) or "disk_full"
    elif view.state == "waiting":
        cause = paused_after(view.message)
    return Sight(cause, view.message, done, view.terminal)


def hears_of_run(
    plan: Plan,
    workspace: Workspace,
    run: RunRecord,
    before: Orchestrator,
    *,
    resumed: bool,
    say: Callable[[str], None],
) -> Hears:
    """Who tells somebody of a run that this process has just taken up; nobody, where no channel is
    named."""
    notify = plan.config.notify
    if not alarms_of(notify):
        return Nobody()
    topic = Topic(run.run, plan.recipe, str(workspace.root), host_name())
    common = common_of(topic, notify, workspace, run.started_at, before, say)
    return RunWatching(plan, resumed=resumed, **common)


def common_of(
    topic: Topic,
    notify: NotifyConfig,
    workspace: Workspace,
    began_at: str,
    before: Orchestrator,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What a :class:`Watching` needs of a call that this process has just taken up."""
    sender = Sender(notify, began_at, workspace.layout.run(topic.call).events, say)
    known = {"topic": topic, "notify": notify, "workspace": workspace}
    return {**known, "sender": sender, "before": before}
