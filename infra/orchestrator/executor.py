"""Carries out decisions: claims and submits attempts, closes them, asks jobs to end.

In: the reconciler's actions, one round at a time. Out: files in the workspace and calls of the
dispatchers. Each may fail or be cut short at any point; the next round continues from the records.
A failed action is kept for the next decision; an error is kept with its stage while all other
actions are tried.

Jobs end when the whole call stops or a user cancels their stages: they are asked to save, and
killed after the grace period. Jobs that another call, process or member still needs are left alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any, Literal

from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router, gives_way, make_router
from infra.jobs.dispatcher import AttemptRef, JobRequest, JobStatus, OpenAttempt
from infra.jobs.failures import classify, is_outage, nodes_to_avoid, outcome_of
from infra.orchestrator.members import Member
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import AttemptStatus, CloseAttempt, Launch, Release, StopWish
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import CollectedErrors, SpaceWaits
from infra.store.atomic import WarningLog
from infra.store.orchestrators import held_by_others, wanted_by_others
from infra.store.provenance import reads_parts_apart
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.errors import NoSpaceError, RefinerError
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import Attempt, AttemptOutcome, StageRecord
from refiner_core.contract.services import is_service
from refiner_core.contract.types import StageView

log = logging.getLogger(__name__)


@dataclass
class Executor:
    """Acts for one process.

    Parameters
    ----------
    workspace, router
        Where stages are recorded, where jobs run.
    owner
        The process.
    members, homes
        The runs being worked on, as they come and go; and which of them starts a stage (by id): its
        configuration and code are the job's.
    space_waits
        Notified of control files that could not be written.
    grace_s
        How long a job may take to save.
    clock
        Seconds, monotonic.

    Attributes
    ----------
    stop_request, since
        The request to end the whole call (None: there is none), and the time of the newest one.
    """

    workspace: Workspace
    router: Router
    owner: str
    members: Sequence[Member]
    homes: Mapping[str, Member]
    space_waits: SpaceWaits
    grace_s: float
    clock: Callable[[], float]
    stop_request: StopWish | None = None
    since: float = 0.0
    refused: dict[str, AttemptOutcome] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    _stop_sent: dict[AttemptRef, float] = field(default_factory=dict)
    _released: dict[AttemptRef, int] = field(default_factory=dict)
    _unsure: dict[AttemptRef, str] = field(default_factory=dict)
    _complaints: WarningLog = field(default_factory=WarningLog)
    #: Stage id -> the run that continues with it.
    _spared: dict[str, str] = field(default_factory=dict)

    @property
    def stopping(self) -> bool:
        """Whether all members are to end."""
        return self.stop_request is not None

    def _note(self, stage: PlannedStage, event: str, **more: Any) -> None:
        """Add a line to the log of the run that starts the stage."""
        self.homes[stage.id].note({"event": event, "stage": stage.name, **more})

    def keep_ends(self, statuses: Mapping[AttemptRef, JobStatus]) -> None:
        """Record the scheduler's facts about ended jobs, which it forgets later."""
        for ref, status in statuses.items():
            if status.liveness == "dead" and status.facts:
                try:
                    self.workspace.note_scheduler(*ref, status.facts)
                except OSError as error:  # tried again in each round until its outcome is written
                    text = "the scheduler's facts about %s cannot be recorded: %s"
                    self._complaints.warn(ref, text, ref, error)

    # ------------------------------------------------------------ starting

    def launch(
        self,
        actions: Iterable[Launch],
        records: Mapping[str, StageRecord],
        errors: CollectedErrors[str],
        kept: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Claim an attempt at each stage, then submit all of one executor together. ``kept`` are
        the GPUs of this machine to hold for stages (by id) that start later."""
        groups: dict[str, list[tuple[PlannedStage, JobRequest]]] = {}
        for action in self._with_gpus(actions, kept):
            with errors.at(action.stage.id):
                executor = self.router.executor_for(action.stage)
                record = records.get(action.stage.id)
                request = self._claim(action, executor, record.attempts if record else ())
                if request is not None:
                    groups.setdefault(executor, []).append((action.stage, request))
                else:
                    self.router.gpus.release(action.stage.id)
        for executor, members in groups.items():
            with errors.at(*(stage.id for stage, _ in members)):
                requests = [request for _, request in members]
                failed = self.router.dispatchers[executor].submit(requests)
                for stage, request in members:
                    with errors.at(stage.id):
                        if error := failed.get(request.ref):
                            self._not_submitted(stage, request, error)
                        else:
                            self._note(stage, "submit", attempt=request.attempt)

    def _with_gpus(self, actions: Iterable[Launch], kept: Mapping[str, int]) -> list[Launch]:
        """The stages that can start now: those with GPUs of this machine only if all of them are
        held, so that none is claimed that another process has just left without."""
        actions, local = list(actions), self.router.executor_for
        asked = {
            a.stage.id: a.stage.resources.gpus
            for a in actions
            if a.stage.resources.gpus and local(a.stage) == "local"
        }
        if self.router.gpus.share({**kept, **asked}):
            return actions
        return [a for a in actions if a.stage.id not in asked]

    def _claim(self, action: Launch, executor: str, before: Sequence[Attempt]) -> JobRequest | None:
        """Claim an attempt at a stage, and return its job."""
        stage, home = action.stage, self.homes[action.stage.id]
        own = home.planned[stage.id]
        # Before the claim: a claimed attempt must be submitted.
        save_s = self.workspace.longest_save_s(stage.id)
        apart = reads_parts_apart(self.workspace, home.run.code)
        claim = StageClaim(self.owner, executor, action.after, apart)
        config = home.plan.config_of(own)
        try:
            attempt = self.workspace.claim_attempt(own, config, stage.inputs, claim)
        except NoSpaceError as error:
            self.space_waits.blocked[stage.id] = str(error)
            return None
        if attempt is None:
            return None  # another orchestrator was faster; the next look shows its attempt
        self._note(own, "claim", attempt=attempt.number)
        code = self.workspace.layout.code / home.run.code if home.run.code else None
        return JobRequest(
            stage_id=stage.id,
            attempt=attempt.number,
            comment=attempt.comment,
            resources=own.resources,
            kind=own.kind,
            needs_network=own.needs_network,
            code=code,
            threads=home.plan.config.model.cpu_threads,
            save_s=save_s,
            avoid=nodes_to_avoid(before),
            nice=home.plan.config.dispatch.nice if gives_way(home.plan, own) else 0,
        )

    def _not_submitted(self, stage: PlannedStage, request: JobRequest, error: Exception) -> None:
        # Recorded as the attempt's outcome, and shown; the job may still be on its way.
        # A plain refusal needs no traceback, except with --debug.
        level = logging.DEBUG if isinstance(error, RefinerError) else logging.WARNING
        log.log(level, "submitting %s failed", stage.title, exc_info=error)
        outcome = classify(error, self.workspace.root)
        message = outcome.message
        if outcome.failure != "disk_full" and isinstance(error, OSError) and is_outage(error):
            # No process could be started, or a file not be read: whether there is a job is not
            # known. The next rounds find out, and close the attempt if there is none.
            self._unsure[request.ref] = message
        elif self._give_up(request.ref, outcome) and outcome.decision == "stop":
            self.refused.setdefault(stage.id, outcome)
        self._note(stage, "refused", message=message)

    def _give_up(self, ref: AttemptRef, outcome: AttemptOutcome) -> bool:
        """Close an attempt that should not have started. False: it has started, and is awaited."""
        try:
            if not self.workspace.void_attempt(*ref):
                return False
            self.workspace.close_attempt(*ref, outcome)
        except OSError as error:
            self._unwritten(ref, outcome, error)
        return True

    def _unwritten(self, ref: AttemptRef, end: AttemptOutcome, error: OSError) -> None:
        """Keep the outcome of an attempt that stays open: it is closed with this outcome when there
        is space again, or the outage is over."""
        self.space_waits.unwritten[ref] = end
        if classify(error, self.workspace.root).failure != "disk_full":
            raise error
        self.space_waits.blocked[ref.stage_id] = str(error)

    # ------------------------------------------------------------ ending

    def close(self, action: CloseAttempt, attempt: OpenAttempt) -> None:
        """Write the outcome of an attempt that ended without one; a hung one is killed first."""
        outcome = action.outcome
        if attempt.ref in self._unsure and attempt.started is None:
            outcome = outcome_of("system_outage", self._unsure[attempt.ref])
        if outcome.failure == "hung" and not self.router.kill(attempt):
            return  # it may still run: the next round tries again
        if attempt.started is None:
            # Its job may be late rather than lost: take the token before recording the end.
            if not self._give_up(attempt.ref, outcome):
                return
        elif not self._write_end(attempt.ref, outcome):
            return  # it did not fit, or its worker has recorded its own outcome after all
        facts = {"failure": outcome.failure, "message": outcome.message}
        self._note(action.stage, "closed", attempt=action.attempt, **facts)

    def _write_end(self, ref: AttemptRef, outcome: AttemptOutcome) -> bool:
        try:
            return self.workspace.close_attempt(*ref, outcome)
        except OSError as error:
            self._unwritten(ref, outcome, error)
            return False

    def release(self, action: Release, attempt: OpenAttempt, limit: int) -> None:
        """Let a held job start again; after ``limit`` times, withdraw it."""
        count = self._released.get(attempt.ref, 0) + 1
        self._released[attempt.ref] = count
        if 0 <= limit < count:
            self.router.kill(attempt)
            outcome = outcome_of("launch_failure", f"held repeatedly: {action.reason}")
            self.close(CloseAttempt(action.stage, action.attempt, outcome), attempt)
            return
        self._note(action.stage, "release", reason=action.reason)
        self.router.release(attempt)

    def stop(
        self, stage: PlannedStage, attempt: OpenAttempt, seen: AttemptStatus, stop_request: StopWish
    ) -> None:
        """Ask a live job to save and end; kill it after the grace period."""
        owner, ref = attempt.attempt.owner, attempt.ref
        process = ProcessId.parse(owner)
        theirs = owner != self.owner and (not process.here or process.alive)
        if theirs and not stop_request.everybody:
            self.left_alone[stage.id] = owner
            return
        if ref not in self._stop_sent:
            self._request_stop(attempt, seen, stop_request)
        elif self.clock() - self._stop_sent[ref] > stop_request.grace_s:
            self._stop_sent[ref] = inf
            self._note(stage, "kill", attempt=ref.number)
            self.router.kill(attempt)

    def _request_stop(
        self, attempt: OpenAttempt, seen: AttemptStatus, stop_request: StopWish
    ) -> None:
        try:
            self.workspace.request_stop_of(*attempt.ref, stop_request.failure, stop_request.reason)
        except OSError as error:  # only the reason is lost; the signal comes all the same
            log.warning("the reason to stop %s could not be recorded: %s", attempt.ref, error)
        if attempt.started is not None and self.router.stop(attempt):
            self._stop_sent[attempt.ref] = self.clock()
            return
        if attempt.started is not None and seen.running:
            return  # it cannot be asked just now; the next round tries again
        outcome = outcome_of(stop_request.failure, f"not started: {stop_request.reason}")
        if attempt.started is not None:
            # Requeued by the scheduler: `stop.json` keeps a late start from work.
            self.router.kill(attempt)
            self._write_end(attempt.ref, outcome)
        elif self._give_up(attempt.ref, outcome):
            self.router.kill(attempt)  # its worker has not started, and now never will

    # ------------------------------------------------------------ requests to end

    def request(
        self, reason: str, failure: Literal["interrupted", "cancelled"], spared: Mapping[str, str]
    ) -> None:
        """Request the end of all stages but ``spared``; the first request counts."""
        if self.stop_request is not None:
            return
        self._spared |= spared
        self.since = self.clock()
        self.stop_request = StopWish(reason, failure, self.grace_s)
        for member in list(self.members):
            member.note({"event": "stop", "reason": reason})

    def read_requests(self, member: Member) -> None:
        """Read whether a user has cancelled a run, or stages of it, with `refiner cancel`."""
        asked = self.workspace.cancel_asked(member.run.run)
        if asked is None:
            return
        if not asked.get("stages") and not member.cancelled:
            # Cancelling a call ends its own work; other calls continue shared stages.
            ours = {m.run.run for m in self.members}
            self._spared |= wanted_by_others(self.workspace, ours)
        if member.handle_cancel(asked, self.grace_s):
            self.since = self.clock()

    def stop_jobs(
        self,
        due: Iterable[Member],
        seen: Mapping[str, AttemptStatus],
        open_attempts: Mapping[str, OpenAttempt],
        errors: CollectedErrors[str],
    ) -> None:
        """Ask live jobs to end that no member needs any more."""
        cancelled = cancelled_of(self.members)
        if self.stop_request is None and not cancelled:
            return
        stages = {i: s for m in due for i, s in m.stages.items()}
        for stage_id, stage in stages.items():
            status, attempt = seen.get(stage_id), open_attempts.get(stage_id)
            stop_request = cancelled.get(stage_id) or self.stop_request
            if stop_request is None or status is None or attempt is None:
                continue
            with errors.at(stage_id):
                if stage_id in self._spared and status.liveness == "live":
                    self.left_alone[stage_id] = f"run {self._spared[stage_id]}"
                    continue
                if is_service(stage_id):
                    ending = [s for i, s in stages.items() if self.stop_request or i in cancelled]
                    if not self._may_end(stage, ending, seen):
                        continue
                if status.liveness in ("live", "hung"):
                    self.stop(stage, attempt, status, stop_request)

    def _may_end(
        self,
        service: PlannedStage,
        ending: Iterable[PlannedStage],
        seen: Mapping[str, AttemptStatus],
    ) -> bool:
        """Tell whether a server is no longer needed: neither by the jobs that are ended here, which
        may still wait for answers while they save, nor by any other."""
        asking = (s.id for s in ending if service.id in s.after)
        if any(i in seen and seen[i].liveness != "dead" for i in asking):
            return False
        ours = {m.run.run for m in self.members}.union(*(m.ids for m in self.members))
        if other := held_by_others(self.workspace, service.id, ours):
            self.left_alone[service.id] = other
        return not other


def cancelled_of(members: Iterable[Member]) -> dict[str, StopWish]:
    """Stages by id that a user has cancelled and no member still needs."""
    members = list(members)
    wishes = {i: stop_request for m in members for i, stop_request in m.cancelled.items()}
    if not wishes:
        return {}
    kept = {i for m in members for i in m.stages if i not in m.cancelled}
    return {i: stop_request for i, stop_request in wishes.items() if i not in kept}


def left_to(view: StageView, whose: str) -> StageView:
    """The view of a stage that is over here and that another run continues."""
    if is_service(f"{view.kind}-"):
        return replace(view, state="done", message=f"continues: {whose} needs it")
    message = f"continues: it belongs to {whose}, which still runs"
    return replace(view, state="interrupted", message=message, exit_code=6)


def observed_by(
    member: Member, stage: PlannedStage, view: StageView, members: Iterable[Member]
) -> StageView:
    """The view of a stage for a member that has cancelled it, where another still needs it."""
    if stage.id not in member.cancelled or view.terminal:
        return view
    others = (m for m in members if stage.id in m.stages and stage.id not in m.cancelled)
    other = next(others, None)
    if other is None:
        return view
    if view.attempt and view.state != "waiting":
        return left_to(view, f"run {other.run.run}")
    return replace(view, state="interrupted", message="not started: cancelled", exit_code=6)


# ---------------------------------------------------------------- calls without an orchestrator

Tell = Callable[[str], None]
POLL_S = 0.3
_TELL_EVERY_S = 5.0


class RateLimitedLog:
    """Limits repetition: passes on a new message at once, the same one only after some seconds."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._said, self._said_at = tell, "", 0.0

    def __call__(self, message: str) -> None:
        """Pass on the message if it is new."""
        now = time.monotonic()
        if message != self._said or now - self._said_at >= _TELL_EVERY_S:
            self._said, self._said_at = message, now
            self._tell(message)

    def wait_out(self, error: OSError) -> None:
        """Report an outage and wait a moment; other errors are raised."""
        if not is_outage(error):
            raise error
        self(first_line(str(error), 300))
        time.sleep(POLL_S)


def open_stages(workspace: Workspace, stages: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the stages (id -> name) with an attempt without an outcome."""
    records = ((name, workspace.read_record(stage_id)) for stage_id, name in stages.items())
    return tuple(n for n, record in records if record is not None and record.state == "claimed")


def end_jobs(
    workspace: Workspace,
    settings: DispatchConfig,
    stages: Mapping[str, str],
    failure: Literal["cancelled", "interrupted"],
    reason: str,
    tell: Tell,
    patience_s: float,
) -> tuple[str, ...]:
    """Ask the jobs of stages (id -> name) to end, kill and close them, until no attempt is open or
    ``patience_s`` is over. Returns the names of stages that are still open.

    Parameters
    ----------
    workspace, settings
        Where stages are recorded, and how their jobs are reached; ``settings.grace_s`` is how long
        one may take to save.
    failure, reason
        The outcome that they get.
    tell
        Receives messages about what is waited for.
    patience_s
        Limit for the whole call.
    """
    router, rarely = make_router(settings, workspace), RateLimitedLog(tell)
    observer = Observer(workspace, router, settings)
    asked_at: dict[AttemptRef, float] = {}

    def end(attempt: OpenAttempt, seen: AttemptStatus) -> None:
        ref = attempt.ref
        if seen.liveness == "dead":
            close(attempt, reason)
        elif ref not in asked_at:
            try:
                workspace.request_stop_of(*ref, failure, reason)
            except OSError as error:  # only the reason is lost; the signal comes all the same
                tell(f"the reason to stop could not be recorded: {error.strerror or error}")
            if attempt.begun and router.stop(attempt):
                asked_at[ref] = time.monotonic()
            else:
                close(attempt, reason if attempt.begun else f"not started: {reason}")
        elif time.monotonic() - asked_at[ref] > settings.grace_s and router.kill(attempt):
            asked_at[ref] = inf
            tell(f"{ref.stage_id} has not ended in {settings.grace_s:g} s: killed")

    def close(attempt: OpenAttempt, why: str) -> None:
        """Close an attempt that has not started, is dead or cannot be asked. If the order to end
        its job does not get through, it stays open for the next round or call."""
        try:
            ends = attempt.begun or workspace.void_attempt(*attempt.ref)
        except OSError:
            router.kill(attempt)  # on a full disk its token cannot be taken, but it can be killed
            raise
        if ends and router.kill(attempt):
            workspace.close_attempt(*attempt.ref, outcome_of(failure, why))

    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        errors = CollectedErrors[str]()
        try:
            _, observed = observer.observe(stages)
            for stage_id, attempt in observer.open.items():
                if (seen := observed.attempts.get(stage_id)) is not None:
                    with errors.at(stage_id):
                        end(attempt, seen)
            errors.raise_first()
            if not (left := open_stages(workspace, stages)):
                return ()
        except OSError as error:
            rarely.wait_out(error)
            continue
        rarely("waiting for " + ", ".join(left))
        time.sleep(POLL_S)
    return open_stages(workspace, stages)
