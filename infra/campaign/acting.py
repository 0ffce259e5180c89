"""Carries out what was decided: claims and submits attempts, closes them, asks jobs to end.

In: the reconciler's actions, one round at a time. Out: files in the workspace and calls of the
dispatchers; each may fail or be cut short at any point, and whoever looks next goes on from what is
recorded. What could not be done is kept for the next round's decision; an outage on the way is
raised once everything else was tried, and nothing is recorded because of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from infra.campaign.actions import CloseAttempt, Launch, Release
from infra.campaign.outage import one_by_one
from infra.campaign.reconcile import Seen
from infra.campaign.room_keeping import Rooms
from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router
from infra.jobs.failures import CLASSES, classify, is_outage, outcome_of
from infra.jobs.niceness import gives_way
from infra.jobs.protocol import AttemptRef, JobRequest, OpenAttempt
from infra.store.workspace import Claim, Workspace
from refiner_core.contract.errors import NoSpaceError, RefinerError
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import Attempt, Outcome, StageRecord

log = logging.getLogger(__name__)


@dataclass
class Actor:
    """Acts for one call.

    Parameters
    ----------
    plan, workspace, router
        What should be, where it is recorded, where jobs run.
    owner, code
        The call's process, and the code snapshot that its jobs import.
    rooms
        Hears of control files that could not be written.
    clock, note
        Seconds (monotonic), and where events go.
    """

    plan: Plan
    workspace: Workspace
    router: Router
    owner: str
    code: Path | None
    rooms: Rooms
    clock: Callable[[], float]
    note: Callable[[Mapping[str, Any]], None]
    refused: dict[str, Outcome] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    _stop_sent: dict[AttemptRef, float] = field(default_factory=dict)
    _killed: set[AttemptRef] = field(default_factory=set)
    _released: dict[AttemptRef, int] = field(default_factory=dict)
    _unsure: dict[AttemptRef, str] = field(default_factory=dict)

    # ------------------------------------------------------------ beginning

    def launch(self, actions: Iterable[Launch], records: Mapping[str, StageRecord]) -> None:
        """Claim an attempt at each stage and submit them, those of one executor together."""
        groups: dict[str, list[tuple[PlannedStage, JobRequest]]] = {}
        with one_by_one() as each:
            for action in actions:
                with each():
                    executor = self.router.executor_for(action.stage)
                    # Before the claim: what is claimed is to be submitted.
                    save_s = self.workspace.longest_save_s(action.stage.id)
                    attempt = self._claim(action, executor)
                    if attempt is not None:
                        record = records.get(action.stage.id)
                        request = self._request(action.stage, attempt, record, save_s)
                        groups.setdefault(executor, []).append((action.stage, request))
            for executor, members in groups.items():
                requests = [request for _, request in members]
                with each():
                    self.router.submit(executor, requests, partial(self._submitted, members))

    def _submitted(
        self,
        members: Sequence[tuple[PlannedStage, JobRequest]],
        failed: Mapping[AttemptRef, Exception],
    ) -> None:
        with one_by_one() as each:
            for stage, request in members:
                with each():
                    if error := failed.get(request.ref):
                        self._not_submitted(stage, request, error)
                        continue
                    self.note({"event": "submit", "stage": stage.name, "attempt": request.attempt})

    def _claim(self, action: Launch, executor: str) -> Attempt | None:
        stage = action.stage
        inputs = {role: self.plan.by_name[name].id for role, name in stage.inputs.items()}
        claim = Claim(self.owner, executor, action.after)
        try:
            attempt = self.workspace.claim_attempt(stage, self.plan.config_of(stage), inputs, claim)
        except NoSpaceError as error:
            self.rooms.blocked[stage.id] = str(error)
            return None
        if attempt is None:
            return None  # another orchestrator was faster; the next look shows its attempt
        self.note({"event": "claim", "stage": stage.name, "attempt": attempt.number})
        return attempt

    def _request(
        self, stage: PlannedStage, attempt: Attempt, record: StageRecord | None, save_s: float
    ) -> JobRequest:
        before = record.attempts if record is not None else ()
        bad = [a.node for a in before if a.outcome and CLASSES[a.outcome.failure].avoids_node]
        return JobRequest(
            stage_id=stage.id,
            attempt=attempt.number,
            comment=attempt.comment,
            resources=stage.resources,
            kind=stage.kind,
            needs_network=stage.needs_network,
            code=self.code,
            threads=self.plan.config.model.cpu_threads,
            save_s=save_s,
            avoid=tuple(dict.fromkeys(node for node in bad if node)),
            nice=self.plan.config.dispatch.nice if gives_way(self.plan, stage) else 0,
        )

    def _not_submitted(self, stage: PlannedStage, request: JobRequest, error: Exception) -> None:
        # Recorded as the attempt's outcome, and shown; the job may still be on its way.
        # A refusal in plain words needs no traceback beside it, except for --debug.
        level = logging.DEBUG if isinstance(error, RefinerError) else logging.WARNING
        log.log(level, "submitting %s failed", stage.title, exc_info=error)
        outcome = classify(error, self.workspace.root)
        message = outcome.message
        if outcome.failure != "disk_full" and isinstance(error, OSError) and is_outage(error):
            # No process could be started, or a file not be read: nobody knows whether there is a
            # job now. The next looks tell, and close the attempt if there is none.
            self._unsure[request.ref] = message
        elif self._give_up(request.ref, outcome) and outcome.decision == "stop":
            self.refused.setdefault(stage.id, outcome)
        self.note({"event": "refused", "stage": stage.name, "message": message})

    def _give_up(self, ref: AttemptRef, outcome: Outcome) -> bool:
        """Close an attempt that should not have started. False: it has, so it is waited for."""
        try:
            if not self.workspace.void_attempt(*ref):
                return False
            self.workspace.close_attempt(*ref, outcome)
        except OSError as error:
            self._unwritten(ref, outcome, error)
        return True

    def _unwritten(self, ref: AttemptRef, end: Outcome, error: OSError) -> None:
        """The attempt stays open: on a full disk it is closed when there is room, and after an
        outage by another round; with the end that was found now."""
        self.rooms.unwritten[ref] = end
        if classify(error, self.workspace.root).failure != "disk_full":
            raise error
        self.rooms.blocked[ref.stage_id] = str(error)

    # ------------------------------------------------------------ ending

    def close(self, action: CloseAttempt, attempt: OpenAttempt) -> None:
        """Write the outcome of an attempt that ended without one; a hung one is killed first."""
        outcome = action.outcome
        if attempt.ref in self._unsure and attempt.started is None:
            outcome = outcome_of("system_outage", self._unsure[attempt.ref])
        if outcome.failure == "hung" and not self.router.kill(attempt):
            return  # it may still run: the next round tries again
        if attempt.started is None:
            # Its job may be late rather than lost: take the token away before saying it is gone.
            if not self._give_up(attempt.ref, outcome):
                return
        elif not self._write_end(attempt.ref, outcome):
            return  # it did not fit, or its worker has had the last word after all
        note = {"event": "closed", "stage": action.stage.name, "attempt": action.attempt}
        self.note({**note, "failure": outcome.failure, "message": outcome.message})

    def _write_end(self, ref: AttemptRef, outcome: Outcome) -> bool:
        try:
            return self.workspace.close_attempt(*ref, outcome)
        except OSError as error:
            self._unwritten(ref, outcome, error)
            return False

    def release(self, action: Release, attempt: OpenAttempt, limit: int) -> None:
        """Let a held job start again; after ``limit`` times it is withdrawn instead."""
        count = self._released.get(attempt.ref, 0) + 1
        self._released[attempt.ref] = count
        if 0 <= limit < count:
            self.router.kill(attempt)
            outcome = outcome_of("launch_failure", f"held again and again: {action.reason}")
            self.close(CloseAttempt(action.stage, action.attempt, outcome), attempt)
            return
        self.note({"event": "release", "stage": action.stage.name, "reason": action.reason})
        self.router.release(attempt)

    def stop(self, stage: PlannedStage, attempt: OpenAttempt, seen: Seen, wish: StopWish) -> None:
        """Ask a live job to save and end, and end it if it takes too long."""
        owner, ref = attempt.attempt.owner, attempt.ref
        theirs = owner != self.owner and (not ProcessId.parse(owner).here or _alive(owner))
        if theirs and not wish.everybody:
            self.left_alone[stage.id] = owner
            return
        if ref not in self._stop_sent:
            self._ask_to_stop(attempt, seen, wish)
        elif self.clock() - self._stop_sent[ref] > wish.grace_s and ref not in self._killed:
            self._killed.add(ref)
            self.note({"event": "kill", "stage": stage.name, "attempt": ref.number})
            self.router.kill(attempt)

    def _ask_to_stop(self, attempt: OpenAttempt, seen: Seen, wish: StopWish) -> None:
        try:
            self.workspace.ask_stop(
                attempt.ref.stage_id, attempt.ref.number, wish.failure, wish.reason
            )
        except OSError as error:  # it only tells the worker why; the signal comes all the same
            log.warning("why %s is to stop could not be noted: %s", attempt.ref, error)
        if attempt.started is not None and self.router.stop(attempt):
            self._stop_sent[attempt.ref] = self.clock()
            return
        if attempt.started is not None and seen.running:
            return  # it cannot be asked just now; the next round tries again
        outcome = outcome_of(wish.failure, f"not begun: {wish.reason}")
        if attempt.started is not None:
            # Put back into the queue by the scheduler: `stop.json` keeps a late start from work.
            self.router.kill(attempt)
            self._write_end(attempt.ref, outcome)
        elif self._give_up(attempt.ref, outcome):
            self.router.kill(attempt)  # its worker has not begun, and now never will


@dataclass(frozen=True)
class StopWish:
    """Who wants a job to end, and how.

    ``everybody``: also jobs that another call has started.
    """

    reason: str
    failure: Literal["interrupted", "cancelled"] = "interrupted"
    grace_s: float = 60.0
    everybody: bool = False


def _alive(owner: str) -> bool:
    return ProcessId.parse(owner).alive
