"""Ends a run, or stages of it: by asking the process that works on it, or by itself if none does.

In: a workspace, a run, names of stages. Out: a :class:`CancelOutcome`. The wish is a file, so it is
heard wherever the orchestrator runs. Where none runs, jobs are asked from here to save and end,
killed after the recipe's grace, and their attempts are closed as ``cancelled``. Doing it twice
changes nothing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flows.running.status import required_run, stage_names
from infra.host.processes import ProcessId, host_name, user_name
from infra.jobs.dispatch import Router, make_router
from infra.jobs.failures import is_outage, outcome_of
from infra.jobs.protocol import AttemptRef, OpenAttempt
from infra.orchestrator.observe import Observer, Patience
from infra.orchestrator.reconcile import Seen
from infra.orchestrator.timeline import first_line
from infra.orchestrator.waiting import Trouble
from infra.store.orchestrators import (
    Orchestrator,
    held_by_others,
    orchestrator_of,
    wanted_by_others,
)
from infra.store.workspace import Workspace
from refiner_core.contract.config import DispatchConfig, RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import suggest
from refiner_core.contract.records import RunRecord, from_json, picked
from refiner_core.contract.services import is_service

_POLL_S = 0.3
_TELL_EVERY_S = 5.0
#: Beside the grace that jobs get: for the orchestrator's next look, and a slow scheduler.
_MARGIN_S = 60.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class CancelOutcome:
    """Outcome of a cancel.

    Attributes
    ----------
    run, stages
        What was to end (names of stages).
    by
        ``orchestrator``: it did the work; ``here``: nobody worked on the run; ``nobody``: there was
        nothing to end.
    ended
        Nothing of it runs any more. False: it takes longer than was waited for.
    left
        Names of stages that still run.
    """

    run: str
    stages: tuple[str, ...]
    by: str
    ended: bool
    left: tuple[str, ...] = ()
    orchestrator: Orchestrator | None = None


def cancel_run(
    run_id: str | None = None,
    stages: Sequence[str] = (),
    workspace: str | Path = RecipeConfig.workspace,
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Tell = lambda message: None,
) -> CancelOutcome:
    """End a run, or some of its stages, and keep what is saved.

    Parameters
    ----------
    run_id
        Which one (default: the newest).
    stages
        Only these, by name.
    workspace
        The folder that it is recorded in.
    wait_s
        Seconds to wait for the end (default: ``dispatch.grace_s`` of the recipe and a minute).
    now
        Do not leave it to the process that works on it, but end the jobs from here.
    tell
        Hears what is waited for.

    Returns
    -------
    CancelOutcome
        What was ended; ``ended`` is False where that takes longer than was waited for.

    Raises
    ------
    ConfigurationError
        There is no such run or stage.
    WorkspaceError
        Somebody else may have written what is recorded there.
    """
    room = Workspace.read_only(Path(workspace).absolute())  # a full disk must not keep one from it
    room.require_trust()
    run = required_run(room, run_id, "a run to cancel", or_begin=False)
    return cancel(room, run, stages, wait_s=wait_s, now=now, tell=tell)


def cancel(
    workspace: Workspace,
    run: RunRecord,
    stages: Sequence[str] = (),
    *,
    wait_s: float | None = None,
    now: bool = False,
    tell: Tell = lambda message: None,
    ours: frozenset[str] = frozenset(),
) -> CancelOutcome:
    """End a run or some of its stages, as :func:`cancel_run` does.

    ``ours`` are other runs that are to end with it: what only they want is not spared.

    Raises
    ------
    ConfigurationError
        The run has no such stage.
    """
    for name in stages:
        if name not in run.stages:
            raise ConfigurationError(
                f"Run {run.run} has no stage {name!r}.{suggest(name, run.stages)}",
                expected="stages of it: " + ", ".join(run.stages),
                fix="name one of these, or none to end the whole run",
            )
    settings = from_json(DispatchConfig, run.config.get("dispatch") or {})
    patience_s = settings.grace_s + _MARGIN_S if wait_s is None else wait_s
    work = _Cancel(workspace, run, stages, settings, tell, ours)
    names = work.names
    who = orchestrator_of(workspace, run.run)
    if not who.works and not work.open_stages():
        return CancelOutcome(run.run, names, "nobody", True, orchestrator=who)
    by = f"{user_name()} on {host_name()}"
    try:
        if not workspace.ask_cancel(run.run, by, stages):
            tell("it has been asked for before")
    except OSError as error:
        if who.works and (stages or not _signal(who)):
            raise
        how = f"{who.where} is told by a signal" if who.works else "its jobs are ended from here"
        tell(f"no note of it can be taken ({error.strerror or error}), so {how}")
    if who.works and not now:
        if work.wait_for(who, patience_s) and not work.open_stages():
            return CancelOutcome(run.run, names, "orchestrator", True, orchestrator=who)
        who = orchestrator_of(workspace, run.run)
        if who.works:
            return CancelOutcome(run.run, names, "orchestrator", False, work.open_stages(), who)
        tell(f"{who.where} has ended before that; its jobs are ended from here")
    work.end_jobs(by, patience_s)
    left = work.open_stages()
    return CancelOutcome(run.run, names, "here", not left, left, who)


def waiting_stages(workspace: Workspace, run: RunRecord) -> list[str]:
    """The stages of a run that no attempt was ever made at."""
    made = ((n, workspace.layout.stage(i).attempt_numbers()) for n, i in run.stages.items())
    return [name for name, numbers in made if not numbers]


def _signal(who: Orchestrator) -> bool:
    """Ask the process that works on the run to stop, as Ctrl-C would; False if it is not here."""
    if who.standing != "running" or who.host != host_name() or not who.pid:
        return False
    try:
        return ProcessId.of(who.pid).terminate()
    except psutil.NoSuchProcess:  # it has ended since
        return False


@dataclass
class _Cancel:
    workspace: Workspace
    run: RunRecord
    stages: Sequence[str]
    settings: DispatchConfig
    tell: Tell
    ours: frozenset[str] = frozenset()
    _asked_at: dict[AttemptRef, float] = field(default_factory=dict)
    _killed: set[AttemptRef] = field(default_factory=set)
    _said: str = ""
    _said_at: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages that are to end: those named, or all that are not done."""
        if self.stages:
            return tuple(self.stages)
        done = {n for n, i in self.run.stages.items() if self.workspace.read_result(i) is not None}
        spared = {n for n, i in self.run.stages.items() if i in self.spared}
        ours = {self.run.run, *self.ours, *self.run.stages.values()}
        spared |= {
            n
            for n, i in self.run.stages.items()
            if is_service(i) and held_by_others(self.workspace, i, ours)
        }
        return tuple(n for n in stage_names(self.run) if n not in done | spared)

    @functools.cached_property
    def spared(self) -> dict[str, str]:
        """Stages, by id, that another run goes on with, which somebody works on."""
        return wanted_by_others(self.workspace, {self.run.run, *self.ours})

    def open_stages(self) -> tuple[str, ...]:
        """Those that have an attempt without an end."""
        found = []
        for name in self.names:
            record = self.workspace.read_record(self.run.stages[name])
            if record is not None and record.state == "claimed":
                found.append(name)
        return tuple(found)

    # ------------------------------------------------------------ by the orchestrator

    def wait_for(self, who: Orchestrator, patience_s: float) -> bool:
        """Wait until the orchestrator has done it; False if it takes too long, or has gone."""
        deadline = time.monotonic() + patience_s
        whole = not self.stages
        while time.monotonic() < deadline:
            try:
                now, left = orchestrator_of(self.workspace, self.run.run), self.open_stages()
            except OSError as error:
                self._cannot_look(error)
                continue
            if now.standing in ("ended", "gone") or (not whole and not left):
                return now.standing != "gone"
            self._say(f"{who.where} ends " + (", ".join(left) or "the run"))
            time.sleep(_POLL_S)
        return False

    def _say(self, message: str) -> None:
        """Not the same thing again and again."""
        now = time.monotonic()
        if message != self._said or now - self._said_at >= _TELL_EVERY_S:
            self._said, self._said_at = message, now
            self.tell(message)

    # ------------------------------------------------------------ from here

    def end_jobs(self, by: str, patience_s: float) -> None:
        """Ask, kill, and close, until no attempt is open or it has taken too long."""
        router = make_router(self.settings, self.workspace)
        patience = Patience(self.settings.heartbeat_timeout_s, self.settings.hung_after_s)
        observer = Observer(self.workspace, router, patience)
        ids = {self.run.stages[name]: name for name in self.names}
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            errors = Trouble[str]()
            try:
                _, observed = observer.look(ids)
                for stage_id, attempt in observer.open.items():
                    if (seen := observed.attempts.get(stage_id)) is not None:
                        with errors.at(stage_id):
                            self._end(router, attempt, seen, f"cancelled by {by}")
                errors.raise_first()
                left = self.open_stages()
            except OSError as error:
                self._cannot_look(error)
                continue
            if not left:
                return
            self._say("waiting for " + ", ".join(left))
            time.sleep(_POLL_S)

    def _cannot_look(self, error: OSError) -> None:
        """Nothing follows from that; it is tried again until it has taken too long."""
        if not is_outage(error):
            raise error
        self._say(first_line(str(error), 300))
        time.sleep(_POLL_S)

    def _end(self, router: Router, attempt: OpenAttempt, seen: Seen, reason: str) -> None:
        ref = attempt.ref
        if seen.sight == "dead":
            self._close(router, attempt, reason)
        elif ref not in self._asked_at:
            try:
                self.workspace.ask_stop(ref.stage_id, ref.number, "cancelled", reason)
            except OSError as error:  # it only tells the worker why; the signal comes all the same
                self._say(f"why its jobs are to stop could not be noted: {error.strerror or error}")
            begun = attempt.started is not None and not attempt.started.get("void")
            if begun and router.stop(attempt):
                self._asked_at[ref] = time.monotonic()
            else:
                self._close(router, attempt, reason if begun else f"not begun: {reason}")
        elif ref in self._killed or time.monotonic() - self._asked_at[ref] <= self.settings.grace_s:
            return
        elif router.kill(attempt):
            self._killed.add(ref)
            self.tell(f"{ref.stage_id} has not ended in {self.settings.grace_s:g} s: killed")

    def _close(self, router: Router, attempt: OpenAttempt, reason: str) -> None:
        """Close an attempt that has not begun, is dead or cannot be asked. Where the order to end
        its job does not get through it stays open, for the next round, or the next call."""
        ref = attempt.ref
        begun = attempt.started is not None and not attempt.started.get("void")
        try:
            ends = begun or self.workspace.void_attempt(*ref)
        except OSError:
            router.kill(attempt)  # on a full disk its token cannot be taken, but it can be ended
            raise
        if ends and router.kill(attempt):
            self.workspace.close_attempt(*ref, outcome_of("cancelled", reason))


def outcome_lines(outcome: CancelOutcome, workspace: Workspace) -> Sequence[str]:
    """Lines for people: what happened, and what to do next."""
    where = f"workspace={workspace.root}"
    what = ", ".join(outcome.stages) if outcome.stages else "the run"
    if outcome.by == "nobody":
        return [f"Nothing of {outcome.run} runs; there was nothing to end."]
    if outcome.ended:
        how = " from here, as nobody worked on the run" if outcome.by == "here" else ""
        lines = [f"Ended{how}: {what}. What was saved is kept.", "Next:"]
        return [*lines, f"  refiner resume {outcome.run} {where}"]
    lines = [f"Not ended yet: {', '.join(outcome.left) or what}."]
    if outcome.orchestrator and outcome.orchestrator.standing == "elsewhere":
        lines.append(
            f"{outcome.orchestrator.where} has not answered and cannot be looked at from here. If "
            "it is gone, end its jobs from here:"
        )
        return [*lines, f"  refiner cancel {outcome.run} {where} --now"]
    return [*lines, "Next:", f"  refiner status {outcome.run} {where}"]


def outcome_json(outcome: CancelOutcome) -> Mapping[str, object]:
    """The same for scripts."""
    return {"version": 1, **picked(outcome, "run", "stages", "by", "ended", "left")}
