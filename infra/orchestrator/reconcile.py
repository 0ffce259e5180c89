"""The next action of each stage, given plan, records and observations.

In: the union of plans (each stage once, by id: a stage that two trials share is launched once), the
records of its stages, an observation and the rules of this call. Out: one action per stage, by id,
for others to carry out and show. :func:`reconcile` is pure and level-triggered: it has no memory,
so the next process, after a crash or beside another orchestrator, comes to the same decisions;
once only terminal actions are left, it changes nothing more.

A service (kind ``serve``) is never done. It is *wanted* while a stage that uses it runs, or could
run but for it; *ready* when its live attempt answers. Only then are those stages launched, so that
no trainer holds GPUs while a server loads its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from infra.host.gpus import FreeGpus, too_many_gpus
from infra.jobs.dispatcher import Liveness
from infra.jobs.failures import CLASSES, budget_left, classify, classify_silent_end, outcome_of
from infra.orchestrator.timeline import first_line
from refiner_core.contract.config import RetryConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import Attempt, AttemptOutcome, FailureClass, StageRecord
from refiner_core.contract.services import is_service
from refiner_core.contract.types import ViewState


def stages_by_id(plan: Plan) -> tuple[dict[str, PlannedStage], dict[str, PlannedStage]]:
    """Stages of a plan and its given stages, by id; ``inputs`` and ``after`` hold ids."""

    def keyed(stage: PlannedStage) -> PlannedStage:
        inputs = {role: plan.by_name[name].id for role, name in stage.inputs.items()}
        return replace(stage, inputs=inputs, after=tuple(plan.by_name[n].id for n in stage.after))

    return {s.id: keyed(s) for s in plan.stages}, {s.id: keyed(s) for s in plan.given}


Stages = Mapping[str, PlannedStage]


def union_of(plans: Iterable[tuple[Stages, Stages]]) -> tuple[Stages, Stages]:
    """Stages of all plans by id, those of an earlier plan first; and the given stages that no plan
    runs, which are only read. ``plans`` are results of :func:`stages_by_id`.

    A stage that several plans name differently has the first one's ``name``.
    """
    stages: dict[str, PlannedStage] = {}
    given: dict[str, PlannedStage] = {}
    for mine, theirs in plans:
        stages |= {i: stage for i, stage in mine.items() if i not in stages}
        given |= theirs
    return stages, {i: stage for i, stage in given.items() if i not in stages}


@dataclass(frozen=True)
class Action:
    """Decision about a stage."""

    stage: PlannedStage


@dataclass(frozen=True)
class Finish(Action):
    """The stage has its result."""


@dataclass(frozen=True)
class Launch(Action):
    """Claim the attempt after ``after`` and submit it."""

    after: int


@dataclass(frozen=True)
class Wait(Action):
    """Wait for a running (``attempt`` > 0) or queued attempt, for inputs, or for a free slot.

    ``unseen``: the state of the attempt is not known just now; ``short``: it continues by itself
    when there is disk space, or an outage is over; ``gpus`` are kept for it while its service
    starts, so that two runs with a service each do not wait for each other.
    """

    reason: str
    attempt: int = 0
    queued: bool = False
    unseen: bool = False
    short: bool = False
    gpus: int = 0


@dataclass(frozen=True)
class Serve(Wait):
    """A service that runs, or may: ``ready`` if it answers, ``wanted`` if a stage of this call
    needs it now."""

    ready: bool = False
    wanted: bool = False


@dataclass(frozen=True)
class Idle(Action):
    """This call no longer needs the service; ``live``: it still runs, and ends by itself when no
    other call needs it either."""

    live: bool


@dataclass(frozen=True)
class CloseAttempt(Action):
    """Write the outcome of an attempt that ended without one; a hung one is killed first."""

    attempt: int
    outcome: AttemptOutcome


@dataclass(frozen=True)
class Release(Action):
    """Release an attempt's job that the scheduler holds back after a failed start."""

    attempt: int
    reason: str


@dataclass(frozen=True)
class Fail(Action):
    """The stage is over in this call; ``state`` is how it ends."""

    outcome: AttemptOutcome
    state: ViewState


@dataclass(frozen=True)
class Block(Action):
    """An input is not available in this call."""

    by: str
    state: ViewState


@dataclass(frozen=True)
class StopWish:
    """Request to end a job.

    ``everybody``: including jobs of other calls.
    """

    reason: str
    failure: Literal["interrupted", "cancelled"] = "interrupted"
    grace_s: float = 60.0
    everybody: bool = False


@dataclass(frozen=True)
class AttemptStatus:
    """One attempt as an observer sees it.

    ``local``: it takes one of this machine's slots; ``silent_end`` is why it ended, if it recorded
    no outcome; ``note`` is the scheduler's message; ``held``: it waits to be released; ``running``:
    it is not queued.
    """

    number: int
    liveness: Liveness
    local: bool = True
    silent_end: AttemptOutcome | None = None
    note: str = ""
    held: bool = False
    running: bool = True


@dataclass(frozen=True)
class Observation:
    """The present state: the newest attempt of each stage (by stage id), the stages (by id) that
    lack space for their next writes, the complete checkpoints (stage id, step) that a stage waits
    for, the attempts (stage id, number) at services that have answered, and this machine's GPUs
    (None: nobody asks for any)."""

    attempts: Mapping[str, AttemptStatus] = field(default_factory=dict)
    short: Mapping[str, str] = field(default_factory=dict)
    checkpoints: frozenset[tuple[str, int]] = frozenset()
    ready: frozenset[tuple[str, int]] = frozenset()
    gpus: FreeGpus | None = None


@dataclass(frozen=True)
class CallRules:
    """The rules of one call.

    Attributes
    ----------
    max_parallel, retries
        Limit of local jobs at a time; limit of attempts per failure class.
    stopping, cancelled
        Start nothing more at all, or of these stages (by id).
    ended_before
        Stage id -> the newest attempt that had ended when this call began. Its failure is history:
        the same command tries again.
    refused
        Stages that this call could not launch.
    not_before
        Stages that pause between two attempts, and until when, on the clock of ``now``.
    gave_up
        Stages that have reached the limit of waiting for disk space.
    runs_local
        Whether a stage's next attempt takes a local slot.
    """

    max_parallel: int = 2
    retries: RetryConfig = field(default_factory=RetryConfig)
    stopping: bool = False
    cancelled: frozenset[str] = frozenset()
    ended_before: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, AttemptOutcome] = field(default_factory=dict)
    now: float = 0.0
    not_before: Mapping[str, float] = field(default_factory=dict)
    gave_up: frozenset[str] = frozenset()
    runs_local: Callable[[PlannedStage], bool] = lambda _: True


#: Message for a live worker that reports a full disk.
NO_ROOM = "the disk is full: it waits for space and continues by itself"
#: Ends of unknown cause. A full disk keeps a job from recording its own.
SILENT: tuple[FailureClass, ...] = ("killed", "launch_failure", "system_outage")
_OVER = (Finish, Fail, Block, Idle)
#: Prefix of the message of a stage that waits for another attempt.
PAUSES = "pauses after"


def reconcile(
    stages: Stages,
    given: Stages,
    records: Mapping[str, StageRecord],
    observed: Observation,
    policy: CallRules,
) -> dict[str, Action]:
    """One action per stage, by its id.

    Parameters
    ----------
    stages, given
        The stages that should be; earlier ones get free slots first. See
        :func:`union_of`.
    records
        By stage id; a stage without a claim is absent. Each must have been read *after* its newest
        attempt was observed, so that an attempt seen dead has its outcome in it.
    observed
        The present state.
    policy
        The rules of this call.
    """
    step = _Step(stages, given, records, observed, policy)
    for stage in stages.values():
        if not is_service(stage.id):
            step.decide(stage)
    for stage in stages.values():
        if is_service(stage.id):
            step.actions[stage.id] = step.service_action(stage)
    return {stage_id: step.actions[stage_id] for stage_id in stages}


class _Step:
    """One pass over the union; holds the decisions of the stages before."""

    def __init__(
        self,
        stages: Stages,
        given: Stages,
        records: Mapping[str, StageRecord],
        observed: Observation,
        policy: CallRules,
    ) -> None:
        self.stages, self.known = stages, {**given, **stages}
        self.records, self.observed, self.policy = records, observed, policy
        self.actions: dict[str, Action] = {}
        self.wanted: set[str] = set()
        self.services: dict[str, Action] = {}
        busy = [
            is_light(stage_id)
            for stage_id, seen in observed.attempts.items()
            if seen.local and seen.liveness in ("live", "hung") and not is_service(stage_id)
            if (record := records.get(stage_id)) is not None and record.state == "claimed"
        ]
        #: Free local slots: for stages that compute, and for those that only move bytes.
        self.slots = {
            False: policy.max_parallel - busy.count(False),
            True: max(2, policy.max_parallel) - busy.count(True),
        }
        self.free_gpus = observed.gpus.free if observed.gpus is not None else 0
        #: Stages whose GPUs are taken, or will be in this round.
        self.with_gpus = {
            i for i, r in records.items() if r.attempts and r.attempts[-1].outcome is None
        }

    def _before(self, stage_id: str) -> Action:
        """Decision about an input."""
        if stage_id in self.stages:
            self.decide(self.stages[stage_id])  # it may belong to a later plan than its consumer
            return self.actions[stage_id]
        # This call does not run it: it is done, or not available.
        record, stage = self.records.get(stage_id), self.known[stage_id]
        if record is not None and record.result is not None:
            return Finish(stage)
        why = f"{stage.name} ({stage.id}) is not done, and this call does not start it"
        return Fail(stage, outcome_of("bad_configuration", why), "failed")

    def decide(self, stage: PlannedStage) -> None:
        """Decide about a stage, once, and note which services it needs."""
        if stage.id in self.actions:
            return
        self.actions[stage.id] = action = self._action(stage)
        if isinstance(action, Launch) or (isinstance(action, Wait) and action.attempt > 0):
            self.wanted.update(service.id for service in self._services_of(stage))

    def service_action(self, stage: PlannedStage) -> Action:
        """Decide about a service, after the stages, whose needs decide."""
        asking = [a for a in self.actions.values() if stage.id in a.stage.after]
        over = all(isinstance(a, _OVER) for a in asking)
        now = self._service(stage)
        if isinstance(now, Serve):
            if over and not self._stopping(stage):
                return Idle(stage, live=True)
            return replace(now, wanted=stage.id in self.wanted)
        if stage.id in self.wanted or isinstance(now, CloseAttempt | Release):
            return now
        blocks = any(isinstance(a, Block) and a.by == stage.name for a in asking)
        if isinstance(now, Fail) and blocks:
            return now
        return Idle(stage, live=False) if over else Wait(stage, "nobody needs it yet")

    def _service(self, stage: PlannedStage) -> Action:
        """Action of a service if it is wanted."""
        if stage.id not in self.services:
            action = self._action(stage)
            if isinstance(action, Wait) and action.attempt > 0:
                seen = self.observed.attempts.get(stage.id)
                ready = seen is not None and seen.liveness == "live" and seen.running
                ready = ready and (stage.id, action.attempt) in self.observed.ready
                action = Serve(**vars(action), ready=ready)
            self.services[stage.id] = action
        return self.services[stage.id]

    def _services_of(self, stage: PlannedStage) -> list[PlannedStage]:
        return [self.known[i] for i in stage.after if is_service(i)]

    def _served(self, stage: PlannedStage) -> Action | None:
        """Action of a stage whose service is not ready; None if it is, or it needs none."""
        for service in self._services_of(stage):
            now = self._service(service)
            if isinstance(now, Fail | Block):
                return replace(_blocked(stage, now), by=service.name)
            self.wanted.add(service.id)
            if not (isinstance(now, Serve) and now.ready):
                return Wait(stage, f"waits until {service.name} answers")
        return None

    def _action(self, stage: PlannedStage) -> Action:
        record = self.records.get(stage.id)
        if record is not None and record.result is not None:
            return Finish(stage)
        last = record.attempts[-1] if record is not None and record.attempts else None
        if last is not None and last.outcome is None:
            return self._open_attempt(stage, last)
        if stage.id in self.policy.refused:
            outcome = self.policy.refused[stage.id]
            return Fail(stage, outcome, CLASSES[outcome.failure].exhausted)
        if record is not None and last is not None and last.outcome is not None:
            end = self._after_end(stage, record, last.outcome)
            if end is not None:
                return end
        return self._next_attempt(stage, last)

    def _open_attempt(self, stage: PlannedStage, last: Attempt) -> Action:
        seen = self.observed.attempts.get(stage.id)
        if seen is None or seen.number != last.number:
            return Wait(stage, "not observed yet", last.number)
        if seen.liveness == "unknown":
            return Wait(stage, seen.note or "its state is not known", last.number, unseen=True)
        if seen.liveness == "live" and seen.held:
            return Release(stage, last.number, seen.note)
        if seen.liveness == "live" and seen.running and last.has_room is False:
            return Wait(stage, NO_ROOM, last.number, short=True)
        if seen.liveness == "live":
            return Wait(stage, seen.note or "runs", last.number, queued=not seen.running)
        if paused := self._pause(stage):
            return paused  # not even its outcome could be written
        if seen.liveness == "hung":
            outcome = outcome_of("hung", "it runs, but has made no progress for too long")
        else:
            outcome = seen.silent_end or classify_silent_end(last.started_at is not None, "")
        if last.has_room is False and outcome.failure in SILENT:
            message = f"{outcome.message}; the disk was too full even to record its end"
            outcome = outcome_of("disk_full", message)
        return CloseAttempt(stage, last.number, outcome)

    def _after_end(
        self, stage: PlannedStage, record: StageRecord, outcome: AttemptOutcome
    ) -> Action | None:
        """Consequence of an ended attempt for this call; None if another one may begin."""
        last = record.attempts[-1]
        before = self.policy.ended_before.get(stage.id, 0)
        if last.number <= before or outcome.decision == "finish":
            return None
        exhausted = CLASSES[outcome.failure].exhausted
        if outcome.decision == "stop":
            return Fail(stage, outcome, exhausted)
        if self._stopping(stage):
            return self._stopped(stage, outcome.message)
        # A server that has answered made more progress than one that never did.
        ready = [a.number for a in record.attempts if (stage.id, a.number) in self.observed.ready]
        mine = [
            a for a in record.attempts if a.number > before and a.number >= max(ready, default=0)
        ]
        if not budget_left(mine, self.policy.retries):
            return Fail(stage, outcome, exhausted)
        return None

    def _stopping(self, stage: PlannedStage) -> bool:
        return self.policy.stopping or stage.id in self.policy.cancelled

    def _stopped(self, stage: PlannedStage, message: str) -> Fail:
        """The stage was asked to end, whatever else happened to it."""
        failure: FailureClass = "interrupted"
        if stage.id in self.policy.cancelled:
            failure = "cancelled"
        return Fail(stage, outcome_of(failure, message), "interrupted")

    def _pause(self, stage: PlannedStage) -> Action | None:
        """Wait for disk space, if the stage lacks it."""
        reason = self.observed.short.get(stage.id)
        if reason is None:
            return None
        if self._stopping(stage):
            return self._stopped(stage, reason)
        if stage.id in self.policy.gave_up:
            return Fail(stage, outcome_of("disk_full", reason), "interrupted")
        return Wait(stage, reason, short=True)

    def _next_attempt(self, stage: PlannedStage, last: Attempt | None) -> Action:
        needed = dict.fromkeys(
            i for i in (*stage.inputs.values(), *stage.after) if not is_service(i)
        )
        for role, step in stage.at_step.items():
            if missing := self._checkpoint(stage, stage.inputs[role], step):
                return missing
            needed.pop(stage.inputs[role], None)
        for stage_id in needed:
            before = self._before(stage_id)
            if isinstance(before, Fail | Block):
                return _blocked(stage, before)
        if self._stopping(stage):
            why = "cancelled" if stage.id in self.policy.cancelled else "asked to stop"
            return self._stopped(stage, f"not started: {why}")
        waiting = [self.known[i].name for i in needed if not isinstance(self._before(i), Finish)]
        if waiting:
            return Wait(stage, f"waits for {', '.join(waiting)}")
        if paused := self._pause(stage):
            return paused
        pause_s = self.policy.not_before.get(stage.id, self.policy.now) - self.policy.now
        if pause_s > 0:
            outcome = last.outcome if last is not None else None
            failure = outcome.failure if outcome is not None else ""
            why = f"{PAUSES} {failure.replace('_', ' ')}, {pause_s:.0f} s more"
            if outcome is not None and failure == "system_outage":
                return Wait(stage, f"{why}: {first_line(outcome.message)}", short=True)
            return Wait(stage, why)
        takes_slot = self.policy.runs_local(stage) and not is_service(stage.id)
        if takes_slot and self.slots[is_light(stage.id)] <= 0:
            return Wait(stage, "waits for a free slot (dispatch.max_parallel)")
        if lacking := self._lacks_gpus(stage):
            return lacking
        if unserved := self._served(stage):
            if isinstance(unserved, Wait) and self._take_gpus(stage):
                return replace(unserved, gpus=stage.resources.gpus)
            return unserved
        self._take_gpus(stage)
        if takes_slot:
            self.slots[is_light(stage.id)] -= 1
        return Launch(stage, 0 if last is None else last.number)

    def _gpus_of(self, stage: PlannedStage) -> int:
        """GPUs of this machine that a stage needs and does not have yet."""
        if stage.id in self.with_gpus or not self.policy.runs_local(stage):
            return 0
        return stage.resources.gpus

    def _take_gpus(self, stage: PlannedStage) -> bool:
        """Count a stage's GPUs as taken; True if there are any."""
        count = self._gpus_of(stage)
        self.free_gpus -= count
        self.with_gpus.add(stage.id)
        return count > 0

    def _lacks_gpus(self, stage: PlannedStage) -> Action | None:
        """Action of a stage without enough free GPUs, for itself and the services that it would
        start; None if there are enough. A service of a stage that waits is not wanted, so that its
        GPUs do not keep another run's stage waiting for ever."""
        gpus, parts = self.observed.gpus, [stage, *self._services_of(stage)]
        needed = sum(map(self._gpus_of, parts))
        if gpus is None or not needed:
            return None
        asked = {s.name: s.resources.gpus for s in parts if self.policy.runs_local(s)}
        if refusal := too_many_gpus(asked, gpus.total):
            return Fail(stage, classify(refusal), "failed")
        if needed <= self.free_gpus:
            return None
        text = f"waits for {needed} GPU{'s' * (needed > 1)}: {self.free_gpus} of {gpus.total} free"
        return Wait(stage, f"{text}, {gpus.users}" if gpus.users else text)

    def _checkpoint(self, stage: PlannedStage, source: str, step: int) -> Action | None:
        """Action of a stage that reads the checkpoint of ``step``; None if it is there."""
        before, name = self._before(source), self.known[source].name
        if (before.stage.id, step) in self.observed.checkpoints:
            return None
        if isinstance(before, Fail | Block):
            return _blocked(stage, before)
        if isinstance(before, Finish):
            why = (
                f"The checkpoint of step {step} of {name} ({before.stage.id}) is not there: "
                "training is over, and only checkpoints with a consumer are kept. Expected: "
                "it is listed in publish.which or publish.steps before training ends. To fix "
                "it: remove the step from what is published; the last one is always available"
            )
            return Fail(stage, outcome_of("bad_configuration", why), "failed")
        if self._stopping(stage):
            return self._stopped(stage, "not started: asked to stop")
        return Wait(stage, f"waits for step {step} of {name}")


def paused_after(message: str) -> str:
    """The failure class that a stage pauses for, from its message; empty if it waits for something
    else."""
    head, _, rest = message.partition(f"{PAUSES} ")
    return "" if head or not rest else rest.partition(",")[0].replace(" ", "_")


def is_light(stage_id: str) -> bool:
    """Tell whether a stage only moves bytes: its slots are separate from those that compute."""
    return stage_id.partition("-")[0] in ("fetch", "export", "publish", "card")


def _blocked(stage: PlannedStage, before: Fail | Block) -> Block:
    """A stage with an unavailable input; resumable if the input was only interrupted."""
    if isinstance(before, Block):
        return Block(stage, before.by, before.state)
    asked = before.outcome.failure in ("interrupted", "cancelled")
    return Block(stage, before.stage.name, "interrupted" if asked else "blocked")
