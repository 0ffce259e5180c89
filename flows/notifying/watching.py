"""Sees what is worth a message in the views of a run: pauses, their ends, how the run ends.

In: views, again and again, as a terminal gets them. Out: messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from flows.notifying import words
from flows.notifying.courier import Route, age_s
from flows.notifying.hears import Hears, Nobody
from flows.notifying.message import Message
from flows.notifying.pauses import Pauses, Sight
from flows.notifying.telling import Teller
from flows.notifying.words import Topic
from infra.campaign.reconcile import paused_after
from infra.host.processes import host_name
from infra.store.notices import Notices
from infra.store.orchestrators import Orchestrator
from infra.store.workspace import Workspace
from refiner_core.contract.alarms import alarms_of
from refiner_core.contract.config import NotifyConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)


class Watching(ABC):
    """What runs and sweeps have in common.

    Parameters
    ----------
    topic, notify
        What it is about, and what is told of.
    turn
        Which of its orchestrators this is.
    teller, notices
        Who records and delivers messages, and what was recorded before.
    clock
        Seconds, monotonic.
    """

    def __init__(
        self,
        topic: Topic,
        notify: NotifyConfig,
        turn: int,
        teller: Teller,
        notices: Notices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic, self.turn, self._teller = topic, turn, teller
        self._clock, self._began = clock, clock()
        self._pauses = Pauses(60.0 * notify.pause_min, told_pauses(notices))
        self._asked = ""
        self._works = True

    def begin(self, before: Orchestrator) -> None:
        """Start to deliver; say that it goes on where an earlier orchestrator had died."""
        self._safely(self._teller.begin)
        # Slurm may have started the same job again: that is no death.
        requeued = bool(before.job) and before.job == os.environ.get("SLURM_JOB_ID")
        if before.standing in ("gone", "elsewhere") and not requeued:
            self._tell(words.went_on(self.topic, f"went-on-{self.turn}", before.where))

    def asked_to_stop(self, why: str) -> None:
        """Somebody wants it to end."""
        self._asked = why

    def show(self, views: Mapping[str, StageView]) -> None:
        """How all stages are now."""
        self._safely(lambda: self._look(views))

    def over(self, views: Mapping[str, StageView]) -> None:
        """Nothing more will happen."""
        self._safely(lambda: self._end(views))

    def broke(self, error: BaseException) -> None:
        """The work on it has ended with an error; a second Ctrl-C is one."""
        if isinstance(error, KeyboardInterrupt):
            why = "it was left by Ctrl-C; jobs that it had submitted may go on"
            self._tell(words.stopped(self.topic, f"stopped-{self.turn}", why))
        else:
            self._tell(words.broke(self.topic, f"broke-{self.turn}", error))

    def close(self) -> None:
        """Wait a while for what is on its way; Ctrl-C leaves it to the courier."""
        with contextlib.suppress(KeyboardInterrupt):  # the run is over, and has its exit code
            self._safely(self._teller.close)

    def _look(self, views: Mapping[str, StageView]) -> None:
        self._watch_pauses({name: sight_of(view) for name, view in views.items()})

    @abstractmethod
    def _end(self, views: Mapping[str, StageView]) -> None:
        """Tell how all of it has ended."""

    def _watch_pauses(self, sights: Mapping[str, Sight]) -> None:
        now = self._clock() - self._began
        for change in self._pauses.look(sights, now, quiet=self._teller.quiet):
            key = f"{change.kind}-{change.cause}-{self.turn}-{change.number}"
            self._tell(words.changed(self.topic, key, change))

    def _tell(self, message: Message, *, silent: bool = False) -> None:
        self._safely(lambda: self._teller.tell(message, silent=silent))

    def _safely(self, action: Callable[[], None]) -> None:
        """A bug here must not end a run; it is said once."""
        try:
            action()
        except Exception as error:
            if self._works:
                log.warning("telling of %s does not work", self.topic.name, exc_info=error)
            self._works = False


class RunWatching(Watching):
    """Watches one run; a :class:`Hears`."""

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        *,
        resumed: bool,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._plan, self._workspace, self._resumed = plan, workspace, resumed

    def _end(self, views: Mapping[str, StageView]) -> None:
        self._look(views)
        states = {view.state for view in views.values()}
        if states <= {"done", "skipped"}:
            nothing_new = "done" not in states and not self._resumed
            key = f"finished-{self._digest(views)}"
            message = words.finished(self.topic, key, views, self._numbers())
            self._tell(message, silent=nothing_new)
        elif "failed" not in states and (why := self._why_stopped()):
            self._tell(words.stopped(self.topic, f"stopped-{self.turn}", why))
        else:
            causes = {v.name: self._cause(v) for v in views.values() if _ended_badly(v)}
            self._tell(words.failed(self.topic, f"failed-{self.turn}", views, causes))

    def _why_stopped(self) -> str:
        asked = self._workspace.cancel_asked(self.topic.call)
        return self._asked or (f"cancelled by {asked.get('by', 'somebody')}" if asked else "")

    def _digest(self, views: Mapping[str, StageView]) -> str:
        """Names what there is: a run that is taken up again, and finds all done, is no news."""
        made = sorted((self._plan.by_name[v.name].id, v.attempt) for v in views.values())
        return hashlib.sha256(repr(made).encode()).hexdigest()[:12]

    def _numbers(self) -> list[dict[str, Any]]:
        from flows.api import evaluations_of

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
    return Sight(cause, view.message, done, view.state in ("done", "skipped"), view.terminal)


def told_pauses(notices: Notices) -> dict[str, tuple[str, ...]]:
    """Cause -> stages of pauses that were recorded, and of whose end nothing is."""
    try:
        recorded = notices.all()
    except RefinerError as error:
        log.warning("what was told before cannot be read: %s", error)
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for value in recorded:
        kind, cause = value.get("kind"), str(value.get("cause", ""))
        if kind == "paused" and cause != words.HELD:
            found[cause] = tuple(str(value.get("stage", "")).split(", "))
        elif kind == "resumed":
            found.pop(cause, None)
        elif kind in ("finished", "stopped") or (kind == "failed" and cause not in words.GOES_ON):
            found.clear()
    return found


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
    common = common_of(Topic(run.run, plan.recipe, str(workspace.root), host_name()),
                       notify, workspace, run.started_at, say)  # fmt: skip
    watching = RunWatching(plan, workspace, resumed=resumed, **common)
    watching.begin(before)
    return watching


def common_of(
    topic: Topic,
    notify: NotifyConfig,
    workspace: Workspace,
    began_at: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What a :class:`Watching` needs of a call that this process has just taken up."""
    turn, who = workspace.newest_turn(topic.call)
    notices = Notices(workspace.layout, workspace.layout.run(topic.call).notices)
    route = Route(topic, notify, turn, str(who.get("process", "")), began_at)
    teller = Teller(route, notices, lambda: age_s(began_at), say)
    return {"topic": topic, "notify": notify, "turn": turn, "teller": teller, "notices": notices}
