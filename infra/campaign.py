"""Brings the world to a plan: looks, reconciles, acts, and says how it stands.

In: a plan, a workspace, a dispatcher. Out: a :class:`StageView` per stage, for terminals and UIs,
and an event log beside the run's record. The loop runs in a thread; it may die at any point with
its process, and the next campaign on the plan goes on from what is recorded.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infra.dispatch import Dispatcher, JobRequest
from infra.failures import classify, outcome_of
from infra.observe import Observer
from infra.processes import ProcessId
from infra.reconcile import (
    Action,
    CloseAttempt,
    Launch,
    Observed,
    Policy,
    reconcile,
)
from infra.views import view_of
from infra.workspace import Claim, Workspace, now_text
from refiner_core.contract.errors import NoSpaceError
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import Outcome, RunRecord, StageRecord
from refiner_core.contract.views import StageView

log = logging.getLogger(__name__)
_KILL_WAIT_S = 10.0


class Campaign:
    """One call's work on a plan.

    Parameters
    ----------
    plan, workspace, dispatcher
        What should be, where it is recorded, and where jobs run.
    run
        The call; it is recorded at :meth:`start`. Its ``code`` names the snapshot that jobs import.
    on_event
        Called from the campaign's thread whenever a stage's view has changed.
    """

    def __init__(
        self,
        plan: Plan,
        workspace: Workspace,
        dispatcher: Dispatcher,
        *,
        run: RunRecord,
        on_event: Callable[[StageView], None] | None = None,
    ) -> None:
        self.plan, self.workspace, self.dispatcher, self.run = plan, workspace, dispatcher, run
        self.owner = str(ProcessId.of())
        self._settings = plan.config.dispatch
        self._on_event = on_event
        self._observer = Observer(workspace, dispatcher, self._settings.heartbeat_timeout_s)
        self._ended_before: dict[str, int] | None = None
        self._done_before: frozenset[str] = frozenset()
        self._refused: dict[str, Outcome] = {}
        self._stop_reason: str | None = None
        self._stop_sent: dict[tuple[str, int], float] = {}
        self._stop_killed: set[tuple[str, int]] = set()
        self._left_alone: dict[str, str] = {}
        self._views: dict[str, StageView] = {}
        self._error: BaseException | None = None
        self._event_log_works = True
        self._changed = threading.Condition()
        self._wake, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="campaign", daemon=True)

    # ------------------------------------------------------------ for the caller

    def start(self) -> None:
        """Record the call and begin.

        Raises
        ------
        NoSpaceError
            Not even the run's record fits.
        """
        self.workspace.write_run(self.run)
        self._look_and_act(act=False)
        self._thread.start()

    def wait(self, stage_name: str, timeout_s: float | None = None) -> StageView:
        """Wait until the stage is in a terminal state, or for ``timeout_s``; its view either way.

        Raises
        ------
        Exception
            Whatever ended the campaign's thread.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._views[stage_name].terminal, timeout_s
            )
            if self._error is not None:
                raise self._error
            return self._views[stage_name]

    def views(self) -> dict[str, StageView]:
        """All stages by name, in the plan's order."""
        with self._changed:
            return dict(self._views)

    def request_stop(self, reason: str) -> None:
        """Begin nothing more and ask the running jobs to save and end. Returns at once.

        Jobs that belong to another call that still runs are left alone.
        """
        if self._stop_reason is None:
            self._stop_reason = reason
            self._note({"event": "stop", "reason": reason})
        self._wake.set()

    def join(self) -> dict[str, StageView]:
        """Wait until every stage is in a terminal state; the last views.

        Raises
        ------
        Exception
            Whatever ended the campaign's thread.
        """
        # Not Thread.join: a Ctrl-C in it makes Python take the thread for ended (bpo-45274).
        while not self._ended.wait(1.0):
            pass
        if self._error is not None:
            raise self._error
        return self.views()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            while not self._look_and_act():
                self._wake.wait(self._settings.poll_s)
                self._wake.clear()
        except BaseException as error:  # it surfaces in wait() and join()
            log.debug("the campaign ends with an error", exc_info=error)
            self._error = error
        self._ended.set()
        with self._changed:
            self._changed.notify_all()

    def _look_and_act(self, act: bool = True) -> bool:
        """One round; True when every stage is in a terminal state."""
        records, observed = self._observer.look(stage.id for stage in self.plan.stages)
        self._note_beginning(records, observed)
        actions = reconcile(self.plan, records, observed, self._policy())
        if act:
            for action in actions:
                self._apply(action, records, observed)
        self._stop_jobs(records, observed)
        return self._show(actions, records)

    def _policy(self) -> Policy:
        return Policy(
            owner=self.owner,
            max_attempts=3,
            max_parallel=self._settings.max_parallel,
            stopping=self._stop_reason is not None,
            ended_before=self._ended_before or {},
            refused=self._refused,
        )

    def _note_beginning(self, records: Mapping[str, StageRecord], observed: Observed) -> None:
        """What had ended when this call began is history: it neither counts nor fails it."""
        if self._ended_before is not None:
            return
        self._done_before = frozenset(i for i, r in records.items() if r.result is not None)
        self._ended_before = {}
        for stage_id, record in records.items():
            if not record.attempts:
                continue
            last, seen = record.attempts[-1], observed.attempts.get(stage_id)
            lives = last.outcome is None and seen is not None and seen.sight != "dead"
            self._ended_before[stage_id] = last.number - 1 if lives else last.number

    def _apply(
        self, action: Action, records: Mapping[str, StageRecord], observed: Observed
    ) -> None:
        if isinstance(action, Launch):
            self._launch(action)
        elif isinstance(action, CloseAttempt):
            self._close(action, records[action.stage.id])

    # ------------------------------------------------------------ acting

    def _launch(self, action: Launch) -> None:
        stage = action.stage
        inputs = {role: self.plan.by_name[name].id for role, name in stage.inputs.items()}
        claim = Claim(self.owner, self.dispatcher.executor, action.after)
        try:
            attempt = self.workspace.claim_attempt(stage, self.plan.config, inputs, claim)
        except NoSpaceError as error:
            self._refuse(stage.id, classify(error))
            return
        if attempt is None:
            return  # another orchestrator was faster; the next look shows its attempt
        self._note({"event": "claim", "stage": stage.name, "attempt": attempt.number})
        code = self.workspace.layout.code / self.run.code if self.run.code else None
        request = JobRequest(
            stage_id=stage.id,
            attempt=attempt.number,
            comment=attempt.comment,
            resources=stage.resources,
            code=code,
            threads=self.plan.config.model.cpu_threads,
        )
        try:
            job_id = self.dispatcher.submit(request)
        except Exception as error:
            # Recorded as the attempt's outcome, and shown; the job may still be on its way.
            log.warning("submitting %s failed", stage.title, exc_info=error)
            outcome = classify(error, self.workspace.root)
            if self._give_up_attempt(stage.id, attempt.number, outcome):
                self._refused.setdefault(stage.id, outcome)
            return
        self._note({"event": "submit", "stage": stage.name, "job": job_id})

    def _refuse(self, stage_id: str, outcome: Outcome) -> None:
        self._refused[stage_id] = outcome
        self._note({"event": "refused", "stage_id": stage_id, "message": outcome.message})

    def _give_up_attempt(self, stage_id: str, number: int, outcome: Outcome) -> bool:
        """Close an attempt that should not have started. False: it has, so it is waited for."""
        try:
            if not self.workspace.void_attempt(stage_id, number):
                return False
            self.workspace.close_attempt(stage_id, number, outcome)
        except OSError as error:
            # A full disk: the attempt stays open, and a later call closes it.
            self._refuse(stage_id, classify(error, self.workspace.root))
        return True

    def _close(self, action: CloseAttempt, record: StageRecord) -> None:
        stage_id, number, outcome = action.stage.id, action.attempt, action.outcome
        if outcome.failure == "hung":
            self.dispatcher.kill(stage_id, number)
        attempt = record.attempts[-1]
        if attempt.number == number and attempt.started_at is None:
            # Its job may be late rather than lost: take the token away before saying it is gone.
            if not self._give_up_attempt(stage_id, number, outcome):
                return
        else:
            try:
                self.workspace.close_attempt(stage_id, number, outcome)
            except OSError as error:
                self._refuse(stage_id, classify(error, self.workspace.root))
                return
        note = {"event": "closed", "stage": action.stage.name, "attempt": number}
        self._note({**note, "failure": outcome.failure, "message": outcome.message})

    def _stop_jobs(self, records: Mapping[str, StageRecord], observed: Observed) -> None:
        """Ask live jobs of this call to end, and end those that take too long."""
        if self._stop_reason is None:
            return
        for stage in self.plan.stages:
            seen, record = observed.attempts.get(stage.id), records.get(stage.id)
            if seen is None or record is None or seen.sight not in ("live", "hung"):
                continue
            attempt, key = record.attempts[-1], (stage.id, seen.number)
            if attempt.owner != self.owner and ProcessId.parse(attempt.owner).alive:
                self._left_alone[stage.id] = attempt.owner
                continue
            if not seen.local:
                self._left_alone[stage.id] = attempt.owner
            elif key not in self._stop_sent:
                self._ask_to_stop(stage.id, seen.number)
            elif time.monotonic() - self._stop_sent[key] > self._settings.grace_s:
                self._kill(stage.id, seen.number)

    def _ask_to_stop(self, stage_id: str, number: int) -> None:
        if self.dispatcher.stop(stage_id, number):
            self._stop_sent[stage_id, number] = time.monotonic()
            return
        outcome = outcome_of("interrupted", f"not begun: {self._stop_reason}")
        if self._give_up_attempt(stage_id, number, outcome):
            self.dispatcher.kill(stage_id, number)  # its worker has not begun, and now never will

    def _kill(self, stage_id: str, number: int) -> None:
        if (stage_id, number) in self._stop_killed:
            return
        self._stop_killed.add((stage_id, number))
        self._note({"event": "kill", "stage_id": stage_id, "attempt": number})
        self.dispatcher.kill(stage_id, number)

    # ------------------------------------------------------------ showing

    def _show(self, actions: tuple[Action, ...], records: Mapping[str, StageRecord]) -> bool:
        views: dict[str, StageView] = {}
        for action in actions:
            stage = action.stage
            view = view_of(
                action,
                records.get(stage.id),
                self.workspace,
                owner=self.owner,
                ended_before=(self._ended_before or {}).get(stage.id, 0),
                done_before=stage.id in self._done_before,
            )
            if stage.id in self._left_alone and not view.terminal:
                message = f"goes on: it belongs to {self._left_alone[stage.id]}, which still runs"
                view = replace(view, state="interrupted", message=message, exit_code=6)
            views[stage.name] = view
        with self._changed:
            changed = [v for n, v in views.items() if v != self._views.get(n)]
            news = [v for v in changed if _state(v) != _state(self._views.get(v.name))]
            self._views = views
            self._changed.notify_all()
        for view in news:
            self._note(_event(view))
        for view in changed:
            self._tell(view)
        return all(v.terminal for v in views.values())

    def _tell(self, view: StageView) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(view)
        except Exception as error:  # a picture that fails must not stop the work behind it
            log.warning("showing %s failed; it is not shown any more", view.name, exc_info=error)
            self._on_event = None

    def _note(self, event: Mapping[str, Any]) -> None:
        """One line in the run's event log. One writer: this call."""
        path = self.workspace.layout.run(self.run.run).events
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"at": now_text(), **event}) + "\n")
        except OSError as error:
            if self._event_log_works:
                log.warning("the event log cannot be written: %s", error)
            self._event_log_works = False


def _state(view: StageView | None) -> tuple[Any, ...]:
    return () if view is None else (view.state, view.attempt, view.job_id)


def _event(view: StageView) -> dict[str, Any]:
    return {
        "event": "stage",
        "stage": view.name,
        "state": view.state,
        "attempt": view.attempt,
        "job": view.job_id,
        "seconds": round(view.seconds, 3),
        "message": view.message,
    }
