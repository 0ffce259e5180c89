"""Which jobs are to end: a stop of the whole call, or stages that somebody has cancelled.

In: members, and what is seen of their newest attempts. Out: requests to save and end, with a kill
after the grace. What another call, another process or another member goes on with is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from infra.jobs.protocol import OpenAttempt
from infra.orchestrator.acting import Actor
from infra.orchestrator.actions import StopWish
from infra.orchestrator.member import Member
from infra.orchestrator.outage import Trouble
from infra.orchestrator.reconcile import Seen
from infra.store.leases import held_by_others
from infra.store.orchestrators import wanted_by_others
from infra.store.workspace import Workspace
from refiner_core.contract.plan import PlannedStage
from refiner_core.contract.services import is_service
from refiner_core.contract.views import StageView


class Stopping:
    """Knows who wants what to end.

    Parameters
    ----------
    workspace, actor
        Where wishes are recorded, and who carries them out.
    grace_s
        How long a job may take to save.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    wish, since
        That the whole call is to end (None: it is not), and when the newest wish was heard.
    """

    def __init__(
        self, workspace: Workspace, actor: Actor, grace_s: float, clock: Callable[[], float]
    ) -> None:
        self.wish: StopWish | None = None
        self.since = 0.0
        self._workspace, self._actor = workspace, actor
        self._grace_s, self._clock = grace_s, clock
        self._spared: dict[str, str] = {}  # stage id -> the run that goes on with it

    def request(
        self,
        reason: str,
        failure: Literal["interrupted", "cancelled"],
        spared: Mapping[str, str],
        members: Iterable[Member],
    ) -> None:
        """All is to end, but for ``spared``; the first wish counts."""
        if self.wish is not None:
            return
        self._spared |= spared
        self.since = self._clock()
        self.wish = StopWish(reason, failure, self._grace_s)
        for member in members:
            member.note({"event": "stop", "reason": reason})

    def hear(self, member: Member, members: Iterable[Member]) -> None:
        """Whether somebody has cancelled a run, or stages of it, with `refiner cancel`."""
        asked = self._workspace.cancel_asked(member.run.run)
        if asked is None:
            return
        if not asked.get("stages") and not member.cancelled:
            # Who ends a call means its own work; another call goes on with what they share.
            ours = {m.run.run for m in members}
            self._spared |= wanted_by_others(self._workspace, ours)
        if member.hear_cancel(asked, self._grace_s):
            self.since = self._clock()

    def stop_jobs(
        self,
        due: Iterable[Member],
        members: Collection[Member],
        seen: Mapping[str, Seen],
        open_attempts: Mapping[str, OpenAttempt],
        errors: Trouble[str],
    ) -> None:
        """Ask live jobs to end that nobody here wants any more."""
        cancelled = cancelled_of(members)
        if self.wish is None and not cancelled:
            return
        stages = {i: s for m in due for i, s in m.stages.items()}
        for stage_id, stage in stages.items():
            sight, attempt = seen.get(stage_id), open_attempts.get(stage_id)
            wish = cancelled.get(stage_id) or self.wish
            if wish is None or sight is None or attempt is None:
                continue
            with errors.at(stage_id):
                if stage_id in self._spared and sight.sight == "live":
                    self._actor.left_alone[stage_id] = f"run {self._spared[stage_id]}"
                    continue
                if is_service(stage_id):
                    ending = [s for i, s in stages.items() if self.wish or i in cancelled]
                    if not self._may_end(stage, ending, seen, members):
                        continue
                if sight.sight in ("live", "hung"):
                    self._actor.stop(stage, attempt, sight, wish)

    def _may_end(
        self,
        service: PlannedStage,
        ending: Iterable[PlannedStage],
        seen: Mapping[str, Seen],
        members: Collection[Member],
    ) -> bool:
        """Whether nobody needs a server any more: not the jobs that are ended here, which may
        still wait for answers while they save, nor anybody else."""
        asking = (s.id for s in ending if service.id in s.after)
        if any(i in seen and seen[i].sight != "dead" for i in asking):
            return False
        ours = {m.run.run for m in members}.union(*(m.ids for m in members))
        if other := held_by_others(self._workspace, service.id, ours):
            self._actor.left_alone[service.id] = other
        return not other


def cancelled_of(members: Iterable[Member]) -> dict[str, StopWish]:
    """Stages that somebody has cancelled and that no member wants any more, by id."""
    members = list(members)
    wishes = {i: wish for m in members for i, wish in m.cancelled.items()}
    if not wishes:
        return {}
    kept = {i for m in members for i in m.stages if i not in m.cancelled}
    return {i: wish for i, wish in wishes.items() if i not in kept}


def left_to(view: StageView, whose: str) -> StageView:
    """The view of a stage that is over here, and that somebody else goes on with."""
    if is_service(f"{view.kind}-"):
        return replace(view, state="done", message=f"goes on: {whose} needs it")
    message = f"goes on: it belongs to {whose}, which still runs"
    return replace(view, state="interrupted", message=message, exit_code=6)


def seen_by(
    member: Member, stage: PlannedStage, view: StageView, members: Iterable[Member]
) -> StageView:
    """The view of a stage for a member that has cancelled it, where another still wants it."""
    if stage.id not in member.cancelled or view.terminal:
        return view
    others = (m for m in members if stage.id in m.stages and stage.id not in m.cancelled)
    other = next(others, None)
    if other is None:
        return view
    if view.attempt and view.state != "waiting":
        return left_to(view, f"run {other.run.run}")
    return replace(view, state="interrupted", message="not begun: cancelled", exit_code=6)
