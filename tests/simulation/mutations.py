"""Deliberate bugs: each makes some schedule break a rule, which shows that the rules notice bugs.

In: a name. Out: a context in which the code has that bug, and the first seed that notices it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import infra.campaign
import infra.reconcile
from infra.attempt import AttemptRun
from infra.checkpoints import CheckpointStore
from infra.observe import Observer
from infra.stage_io import AttemptIO
from infra.workspace import Workspace
from tests.simulation.campaigns import run_schedule
from tests.simulation.slurm import SimSlurm
from tests.simulation.world import Violation

Patch = tuple[Any, str, Any]


def _forget_the_fence() -> Iterable[Patch]:
    yield AttemptRun, "check_fence", lambda self: None
    yield Workspace, "is_stale", lambda self, stage_id, number: False


def _ignore_a_void_token() -> Iterable[Patch]:
    def start(self: Workspace, stage_id: str, number: int, value: Mapping[str, Any]) -> bool:
        real(self, stage_id, number, value)
        return True

    real = Workspace.start_attempt
    yield Workspace, "start_attempt", start


def _unknown_is_dead() -> Iterable[Patch]:
    def look(self: SimSlurm, attempts: Any) -> Any:
        seen = real(self, attempts)
        return {r: replace(s, sight="dead") if s.sight == "unknown" else s for r, s in seen.items()}

    real = SimSlurm.look
    yield SimSlurm, "look", look


def _pending_is_hung() -> Iterable[Patch]:
    yield Observer, "_forget", lambda self, ref: None
    real = Observer._sight

    def sight(self: Observer, attempt: Any, job: Any) -> Any:
        return real(self, attempt, replace(job, running=True) if job.sight == "live" else job)

    yield Observer, "_sight", sight


def _retain_before_commit() -> Iterable[Patch]:
    def retain(self: CheckpointStore, count: int, *, spare: Any) -> None:
        for old in self.complete():
            if old.path != spare:
                infra.checkpoints._remove_tree(old.path)

    yield CheckpointStore, "_retain", retain


def _submit_again_after_silence() -> Iterable[Patch]:
    def submit(self: SimSlurm, requests: Any) -> Any:
        failed = real(self, requests)
        again = [r for r in requests if r.ref in failed]
        return real(self, again) if again else failed

    real = SimSlurm.submit
    yield SimSlurm, "submit", submit


def _no_budget() -> Iterable[Patch]:
    yield infra.reconcile, "budget_left", lambda attempts, retries: True


def _stop_is_no_stop() -> Iterable[Patch]:
    yield infra.reconcile._Step, "_after_end", lambda self, stage, record, outcome: None


def _everything_is_history() -> Iterable[Patch]:
    def note(self: Any, records: Any, observed: Any) -> None:
        self._ended_before = {}
        self._done_before = frozenset()

    yield infra.campaign.Campaign, "_note_beginning", note


def _metrics_not_taken_over() -> Iterable[Patch]:
    yield AttemptIO, "_take_over", lambda self, found: None


def _close_without_voiding() -> Iterable[Patch]:
    yield Workspace, "void_attempt", lambda self, stage_id, number: True


def _result_without_exclusion() -> Iterable[Patch]:
    def claim(self: Workspace, stage: Any, config: Any, inputs: Any, claim: Any) -> Any:
        return real(self, stage, config, inputs, replace(claim, after=claim.after + 1))

    real = Workspace.claim_attempt
    yield Workspace, "claim_attempt", claim


#: Name -> what is changed.
MUTATIONS: Mapping[str, Callable[[], Iterable[Patch]]] = {
    "a stale attempt is not fenced": _forget_the_fence,
    "a token that was given up is ignored": _ignore_a_void_token,
    "a job that nobody can speak of counts as dead": _unknown_is_dead,
    "a job that queues for long counts as hung": _pending_is_hung,
    "the last checkpoint goes before its successor is there": _retain_before_commit,
    "a submission without an answer is repeated": _submit_again_after_silence,
    "budgets are not looked at": _no_budget,
    "what was to stop is tried again": _stop_is_no_stop,
    "old failures count for the new call": _everything_is_history,
    "metrics are not taken over": _metrics_not_taken_over,
    "an attempt is given up without taking its token": _close_without_voiding,
    "attempt numbers are skipped": _result_without_exclusion,
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code has this bug within the block."""
    with contextlib.ExitStack() as stack:
        for target, attribute, value in MUTATIONS[name]():
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield


def first_noticed(name: str, seeds: Iterable[int]) -> str | None:
    """What the first schedule says that notices the bug; None if none does."""
    with mutated(name):
        for seed in seeds:
            try:
                run_schedule(seed)
            except Violation as error:
                return str(error).splitlines()[0]
    return None
