"""Trials as runs: recorded, or taken up.

In: trials of a plan. Out: a member for the orchestrator each, with its run's record. A trial that
was begun before goes on as its run, with the code that it was begun with; one that has failed, or
whose stages are others by now, becomes a new run with the code as it is now. The code is pinned
once, when the first new run needs it, however many there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flows.running.recording import Pinned, pin_code, record_pinned_run
from infra.orchestrator.member import Member
from infra.store import atomic
from infra.store.orchestrators import orchestrator_of
from infra.store.sweep_records import note_trial, sweep_folder, trial_run
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.placement import STAGES
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import RunRecord
from sweeps.values import Trial

#: A step that the canary's training saves after, so that a save is measured early.
CANARY_STEPS = 2


class TrialElsewhere(ConfigurationError):
    """Somebody else works on a trial's run; the sweep goes on without it for now."""

    exit_code = 6
    resumable = True


@dataclass
class Trials:
    """Begins trials of one sweep.

    Parameters
    ----------
    sweep, recipe
        The sweep's name, and the recipe that its trials are made of, as `refiner run` takes it.
    workspace, clock
        As for a member; all trials share them.
    told
        What was last said of trials (:func:`flows.sweeping.reading.last_words`).
    take_over
        Also take up runs that a process on another host says it works on.
    pin
        Makes the snapshot of the code.
    """

    sweep: str
    recipe: str
    workspace: Workspace
    told: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    take_over: bool = False
    pin: Callable[[Workspace], Pinned] = pin_code
    clock: Callable[[], float] = time.monotonic
    _pinned: Pinned | None = None
    _not_begun: set[str] = field(default_factory=set)

    def begin(self, trial: Trial, *, canary: bool = False) -> Member:
        """Record the trial as a run, or take its run up.

        Raises
        ------
        TrialElsewhere
            Another process works on its run.
        NoSpaceError
            Its record did not fit.
        """
        plan = self._plan(trial, canary)
        run = self._recorded(trial) or self._new_run(trial, plan)
        member = Member(plan, run, self.workspace, trial.name, self.clock)
        self._take_up(member)
        self.workspace.withdraw_cancel(run.run)
        try:
            member.begin()
        except Exception as error:  # else it would seem to be worked on as long as the sweep is
            member.give_up(error)
            self._not_begun.add(run.run)
            raise
        self._not_begun.discard(run.run)
        return member

    def _take_up(self, member: Member) -> None:
        run_id = member.run.run
        who = orchestrator_of(self.workspace, run_id)
        if run_id in self._not_begun and who.standing == "running" and who.pid == os.getpid():
            return  # in an outage, in which it could not be said either that it was given up
        try:
            member.take_up(regardless=self.take_over)
        except ConfigurationError as error:
            raise TrialElsewhere(error.what, expected=error.expected, fix=error.fix) from error

    def ensure_run(self, trial: Trial) -> str:
        """The run of a trial of which everything is done; one is recorded where there is none."""
        known = trial_run(self.workspace, self.sweep, trial.name)
        if known is not None and self._run_of(trial, known) is not None:
            return known
        run = self._new_run(trial, self._plan(trial, False))
        self.workspace.write_run(run)
        return run.run

    def _plan(self, trial: Trial, canary: bool) -> Plan:
        changes: dict[str, Any] = {"tracking.group": self.sweep}
        if canary:
            changes |= {f"{kind}.first_save": CANARY_STEPS for kind in STAGES}
        return replace(trial.plan, config=replace_fields(trial.plan.config, changes))

    def _recorded(self, trial: Trial) -> RunRecord | None:
        """The run that goes on with the trial; None where it is to be a new one."""
        run_id = trial_run(self.workspace, self.sweep, trial.name)
        if run_id is None or (self.told.get(trial.name) or {}).get("state") == "failed":
            return None
        run = self._run_of(trial, run_id)
        if run is None or (run.code and not (self.workspace.layout.code / run.code).is_dir()):
            return None
        return run

    def _run_of(self, trial: Trial, run_id: str) -> RunRecord | None:
        """A run, if it is there and has the trial's stages as they are by now."""
        try:
            run = self.workspace.read_run(run_id)
        except ConfigurationError:  # it was deleted
            return None
        return run if dict(run.stages) == {s.name: s.id for s in trial.plan.stages} else None

    def _new_run(self, trial: Trial, plan: Plan) -> RunRecord:
        pinned = self.pinned()
        which = {"name": self.sweep, "arm": trial.arm, "seed": trial.seed}
        more = {"sweep": which}
        run = record_pinned_run(plan, self.workspace, self.recipe, trial.overrides, pinned, more)
        if pinned.diff:
            self._keep_diff(run, pinned.diff)
        self.workspace.write_run(run)
        note_trial(self.workspace, self.sweep, trial.name, run.run)
        return run

    def pinned(self) -> Pinned:
        """The code that new runs use."""
        if self._pinned is None:
            self._pinned = self.pin(self.workspace)
        return self._pinned

    def _keep_diff(self, run: RunRecord, diff: str) -> None:
        """What is not committed, once for all trials: each run has a link to it."""
        folder = sweep_folder(self.workspace, self.sweep) / "diffs"
        path = folder / f"{run.provenance['diff_sha256']}.diff"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(path, diff)
        target = self.workspace.layout.run(run.run).diff
        try:
            os.link(path, target)
        except OSError:  # a file system without hard links
            atomic.write_text(target, diff)
