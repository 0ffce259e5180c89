"""Given what should be, what is recorded and what lives: what to do next.

In: a plan, the records of its stages, a look at the world and the rules of this call. Out: one
action per stage. :func:`reconcile` is pure and level-triggered: it has no memory, so whoever runs
it next, after a crash or beside another orchestrator, comes to the same decisions; applied until
nothing but terminal actions is left, it changes nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from infra.failures import CLASSES, classify_silent_end, outcome_of
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import Attempt, Outcome, StageRecord
from refiner_core.contract.views import ViewState

Sight = Literal[
    "live",  # it runs, or is on its way to
    "dead",  # it is certain that nothing of it runs any more
    "hung",  # it runs and has shown no sign of life for too long
    "unknown",  # not looked at yet
]


@dataclass(frozen=True)
class Seen:
    """One attempt as an observer sees it. ``local``: it takes one of this machine's slots."""

    number: int
    sight: Sight
    local: bool = True
    silent_end: Outcome | None = None


@dataclass(frozen=True)
class Observed:
    """The world now: the newest attempt of each stage (by stage id), and whether the disk takes
    a write."""

    attempts: Mapping[str, Seen] = field(default_factory=dict)
    room: bool = True


@dataclass(frozen=True)
class Policy:
    """The rules of one call.

    ``ended_before`` maps stage ids to the newest attempt that had ended when this call began: what
    failed then is history, and the same command tries again. ``refused`` holds stages that this
    call could not launch, or whose end it could not record.
    """

    owner: str
    max_attempts: int = 3
    max_parallel: int = 2
    stopping: bool = False
    ended_before: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The stage has its result."""

    stage: PlannedStage


@dataclass(frozen=True)
class Launch:
    """Claim the attempt after ``after`` and submit it."""

    stage: PlannedStage
    after: int


@dataclass(frozen=True)
class Wait:
    """For an attempt that runs (``attempt`` > 0), for inputs, or for a free slot."""

    stage: PlannedStage
    reason: str
    attempt: int = 0


@dataclass(frozen=True)
class CloseAttempt:
    """Write the outcome of an attempt that ended without one; a hung one is killed first."""

    stage: PlannedStage
    attempt: int
    outcome: Outcome


@dataclass(frozen=True)
class Fail:
    """Nothing more happens to the stage in this call; ``state`` is how it ends."""

    stage: PlannedStage
    outcome: Outcome
    state: ViewState


@dataclass(frozen=True)
class Block:
    """An input cannot be had in this call."""

    stage: PlannedStage
    by: str
    state: ViewState


Action = Done | Launch | Wait | CloseAttempt | Fail | Block


def reconcile(
    plan: Plan, records: Mapping[str, StageRecord], observed: Observed, policy: Policy
) -> tuple[Action, ...]:
    """One action per stage, in the plan's order.

    Parameters
    ----------
    plan
        The stages as they should be.
    records
        By stage id; a stage that nobody claimed is absent. Each must have been read *after* its
        newest attempt was looked at, so that an attempt seen dead has its last word in it.
    observed
        The world now.
    policy
        The rules of this call.
    """
    step = _Step(records, observed, policy)
    for stage in plan.stages:
        step.decide(stage)
    return tuple(step.actions.values())


class _Step:
    """One pass over the plan; knows what was decided for the stages before."""

    def __init__(
        self, records: Mapping[str, StageRecord], observed: Observed, policy: Policy
    ) -> None:
        self.records, self.observed, self.policy = records, observed, policy
        self.actions: dict[str, Action] = {}
        self.launched: set[str] = set()
        busy = (
            stage_id
            for stage_id, seen in observed.attempts.items()
            if seen.local and seen.sight in ("live", "hung") and not _ended(records.get(stage_id))
        )
        self.slots = policy.max_parallel - len(set(busy))

    def decide(self, stage: PlannedStage) -> None:
        self.actions[stage.name] = self._action(stage)

    def _action(self, stage: PlannedStage) -> Action:
        record = self.records.get(stage.id)
        if record is not None and record.result is not None:
            return Done(stage)
        last = record.attempts[-1] if record is not None and record.attempts else None
        if last is not None and last.outcome is None:
            return self._open_attempt(stage, last)
        if stage.id in self.policy.refused:
            return self._refused(stage)
        if record is not None and last is not None and last.outcome is not None:
            end = self._after_end(stage, record, last.outcome)
            if end is not None:
                return end
        return self._next_attempt(stage, last)

    def _open_attempt(self, stage: PlannedStage, last: Attempt) -> Action:
        seen = self.observed.attempts.get(stage.id)
        if seen is None or seen.number != last.number or seen.sight == "unknown":
            return Wait(stage, "not looked at yet", last.number)
        if seen.sight == "live":
            return Wait(stage, "runs", last.number)
        if stage.id in self.policy.refused:
            return self._refused(stage)  # not even its outcome could be written
        if seen.sight == "hung":
            outcome = outcome_of("hung", "it runs, but has shown no sign of life for too long")
        else:
            outcome = seen.silent_end or classify_silent_end(last.started_at is not None, "")
        return CloseAttempt(stage, last.number, outcome)

    def _refused(self, stage: PlannedStage) -> Action:
        outcome = self.policy.refused[stage.id]
        return Fail(stage, outcome, CLASSES[outcome.failure].exhausted)

    def _after_end(
        self, stage: PlannedStage, record: StageRecord, outcome: Outcome
    ) -> Action | None:
        """What an ended attempt means for this call; None if another one may begin."""
        last = record.attempts[-1]
        if last.number <= self.policy.ended_before.get(stage.id, 0):
            return None
        exhausted = CLASSES[outcome.failure].exhausted
        if outcome.decision == "stop":
            return Fail(stage, outcome, "failed")
        if self.policy.stopping:
            return Fail(stage, outcome, "interrupted")
        if outcome.failure == "disk_full" and not self.observed.room:
            return Fail(stage, outcome, exhausted)
        mine = sum(a.owner == self.policy.owner for a in record.attempts)
        if mine >= self.policy.max_attempts:
            return Fail(stage, outcome, exhausted)
        return None

    def _next_attempt(self, stage: PlannedStage, last: Attempt | None) -> Action:
        for name in stage.inputs.values():
            before = self.actions[name]
            if isinstance(before, Fail | Block):
                by = before.by if isinstance(before, Block) else name
                return Block(stage, by, "interrupted" if _resumable(before) else "blocked")
        if self.policy.stopping:
            return Fail(stage, outcome_of("interrupted", "not begun: asked to stop"), "interrupted")
        waiting = [n for n in stage.inputs.values() if not isinstance(self.actions[n], Done)]
        if waiting:
            return Wait(stage, f"waits for {', '.join(dict.fromkeys(waiting))}")
        if stage.id in self.launched:
            return Wait(stage, "the same stage under another name is about to run")
        if self.slots <= 0:
            return Wait(stage, "waits for a free slot (dispatch.max_parallel)")
        self.slots -= 1
        self.launched.add(stage.id)
        return Launch(stage, 0 if last is None else last.number)


def _ended(record: StageRecord | None) -> bool:
    return (
        record is None
        or record.result is not None
        or not record.attempts
        or record.attempts[-1].outcome is not None
    )


def _resumable(action: Fail | Block) -> bool:
    """Whether what stands in the way was only an interruption on request."""
    if isinstance(action, Block):
        return action.state == "interrupted"
    return action.outcome.failure == "interrupted"
