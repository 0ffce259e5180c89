"""Jobs ended from here, where no orchestrator does it: asked to save, killed late, closed.

In: stages, why they are to end, how long to wait. Out: what still runs. Nothing follows from a look
that a file system or a scheduler does not answer: it is tried again until it has taken too long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from infra.jobs.dispatch import Router, make_router
from infra.jobs.failures import is_outage, outcome_of
from infra.jobs.protocol import AttemptRef, OpenAttempt
from infra.orchestrator.observe import Observer, Patience
from infra.orchestrator.reconcile import Seen
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import Trouble
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig

Tell = Callable[[str], None]
POLL_S = 0.3
_TELL_EVERY_S = 5.0


class Seldom:
    """Tells a message again after some seconds only, and another one at once."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._said, self._said_at = tell, "", 0.0

    def __call__(self, message: str) -> None:
        """Tell it, if it is news."""
        now = time.monotonic()
        if message != self._said or now - self._said_at >= _TELL_EVERY_S:
            self._said, self._said_at = message, now
            self._tell(message)

    def wait_out(self, error: OSError) -> None:
        """Tell of an outage, and wait a moment; raises what is none."""
        if not is_outage(error):
            raise error
        self(first_line(str(error), 300))
        time.sleep(POLL_S)


def open_stages(workspace: Workspace, stages: Mapping[str, str]) -> tuple[str, ...]:
    """Names of those (id -> name) that have an attempt without an end."""
    records = ((name, workspace.read_record(stage_id)) for stage_id, name in stages.items())
    return tuple(n for n, record in records if record is not None and record.state == "claimed")


class Ending:
    """Ends the jobs of some stages (id -> name).

    Parameters
    ----------
    workspace, settings
        Where they are recorded, and how their jobs are reached; ``settings.grace_s`` is how long
        one may take to save.
    failure, reason
        The outcome that they get.
    tell
        Hears what is waited for.
    """

    def __init__(
        self,
        workspace: Workspace,
        settings: DispatchConfig,
        stages: Mapping[str, str],
        failure: Literal["cancelled", "interrupted"],
        reason: str,
        tell: Tell,
    ) -> None:
        self._workspace, self._settings, self._stages = workspace, settings, stages
        self._failure, self._reason, self._tell = failure, reason, tell
        self._asked_at: dict[AttemptRef, float] = {}
        self._killed: set[AttemptRef] = set()

    def work(self, patience_s: float) -> tuple[str, ...]:
        """Ask, kill, and close, until no attempt is open or it has taken too long; names of stages
        that are open still."""
        router, told = make_router(self._settings, self._workspace), Seldom(self._tell)
        patience = Patience(self._settings.heartbeat_timeout_s, self._settings.hung_after_s)
        observer = Observer(self._workspace, router, patience)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            errors = Trouble[str]()
            try:
                _, observed = observer.look(self._stages)
                for stage_id, attempt in observer.open.items():
                    if (seen := observed.attempts.get(stage_id)) is not None:
                        with errors.at(stage_id):
                            self._end(router, attempt, seen)
                errors.raise_first()
                if not (left := open_stages(self._workspace, self._stages)):
                    return ()
            except OSError as error:
                told.wait_out(error)
                continue
            told("waiting for " + ", ".join(left))
            time.sleep(POLL_S)
        return open_stages(self._workspace, self._stages)

    def _end(self, router: Router, attempt: OpenAttempt, seen: Seen) -> None:
        ref, grace_s = attempt.ref, self._settings.grace_s
        if seen.sight == "dead":
            self._close(router, attempt, self._reason)
        elif ref not in self._asked_at:
            try:
                self._workspace.ask_stop(*ref, self._failure, self._reason)
            except OSError as error:  # it only tells the worker why; the signal comes all the same
                why = error.strerror or error
                self._tell(f"why its jobs are to stop could not be noted: {why}")
            begun = attempt.started is not None and not attempt.started.get("void")
            if begun and router.stop(attempt):
                self._asked_at[ref] = time.monotonic()
            else:
                self._close(router, attempt, f"{'' if begun else 'not begun: '}{self._reason}")
        elif ref in self._killed or time.monotonic() - self._asked_at[ref] <= grace_s:
            return
        elif router.kill(attempt):
            self._killed.add(ref)
            self._tell(f"{ref.stage_id} has not ended in {grace_s:g} s: killed")

    def _close(self, router: Router, attempt: OpenAttempt, reason: str) -> None:
        """Close an attempt that has not begun, is dead or cannot be asked. Where the order to end
        its job does not get through it stays open, for the next round, or the next call."""
        ref = attempt.ref
        begun = attempt.started is not None and not attempt.started.get("void")
        try:
            ends = begun or self._workspace.void_attempt(*ref)
        except OSError:
            router.kill(attempt)  # on a full disk its token cannot be taken, but it can be ended
            raise
        if ends and router.kill(attempt):
            self._workspace.close_attempt(*ref, outcome_of(self._failure, reason))
