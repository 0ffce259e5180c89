"""Deliberate bugs: each makes some schedule break a rule, which shows that the rules notice bugs.

In: a name. Out: a context in which the code has that bug, and the first seed that notices it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import tests.simulation.worker
from infra.attempt.attempt import AttemptRun
from infra.attempt.stage_io import AttemptIO
from infra.orchestrator.observe import Observer
from infra.store import atomic
from infra.store.checkpoints import CheckpointStore, RetainedCheckpoints
from infra.store.workspace import Workspace
from tests.simulation.campaigns import run_schedule
from tests.simulation.slurm import SimSlurm
from tests.simulation.world import Violation

Patch = tuple[Any, str, Any]


def _forget_the_fence() -> Iterable[Patch]:
    yield AttemptRun, "check_fence", lambda self: None
    yield Workspace, "is_stale", lambda self, stage_id, number: False


def _run_the_old_attempt_again() -> Iterable[Patch]:
    def start(self: Workspace, stage_id: str, number: int, value: Mapping[str, Any]) -> bool:
        real(self, stage_id, number, value)
        return True

    real = Workspace.start_attempt
    yield Workspace, "start_attempt", start
    yield tests.simulation.worker, "attempt_to_run", lambda _workspace, _stage, number, _job: number


def _unknown_is_dead() -> Iterable[Patch]:
    def observe(self: SimSlurm, attempts: Any) -> Any:
        seen = real(self, attempts)
        return {
            r: replace(s, liveness="dead") if s.liveness == "unknown" else s
            for r, s in seen.items()
        }

    real = SimSlurm.observe
    yield SimSlurm, "observe", observe


def _pending_is_hung() -> Iterable[Patch]:
    yield Observer, "_forget", lambda self, ref: None
    real = Observer._status_of

    def status(self: Observer, attempt: Any, job: Any) -> Any:
        return real(self, attempt, replace(job, running=True) if job.liveness == "live" else job)

    yield Observer, "_status_of", status


def _retain_before_commit() -> Iterable[Patch]:
    def retain(self: CheckpointStore, count: int, *, spare: Any) -> None:
        for old in self.complete():
            if old.path != spare:
                atomic.remove_tree(old.path)

    yield CheckpointStore, "_retain", retain


def _submit_again_after_silence() -> Iterable[Patch]:
    def submit(self: SimSlurm, requests: Any) -> Any:
        failed = real(self, requests)
        layout = self.workspace.layout
        silent = [r for r in requests if not layout.attempt(*r.ref).job.exists()]
        again = [r for r in silent if r.ref not in failed]
        return {**failed, **real(self, again)} if again else failed

    real = SimSlurm.submit
    yield SimSlurm, "submit", submit


def _metrics_not_taken_over() -> Iterable[Patch]:
    yield AttemptIO, "go_on_from", lambda self, found: None


def _numbers_are_skipped() -> Iterable[Patch]:
    def claim(self: Workspace, stage: Any, config: Any, inputs: Any, claim: Any) -> Any:
        return real(self, stage, config, inputs, replace(claim, after=claim.after + 1))

    real = Workspace.claim_attempt
    yield Workspace, "claim_attempt", claim


def _nothing_is_held() -> Iterable[Patch]:
    yield RetainedCheckpoints, "keep", lambda self, done: None


class Mutation(NamedTuple):
    """A deliberate bug: what is changed, and what the rule that notices it says."""

    patches: Callable[[], Iterable[Patch]]
    noticed: str


MUTATIONS: Mapping[str, Mutation] = {
    "a stale attempt is not fenced": Mutation(_forget_the_fence, "is stale, and published"),
    "a job that was started again runs its old attempt": Mutation(
        _run_the_old_attempt_again, "the metrics of"
    ),
    "a job that nobody can speak of counts as dead": Mutation(_unknown_is_dead, "at a time"),
    "a job that queues for long counts as hung": Mutation(_pending_is_hung, "attempts after"),
    "the last checkpoint goes before its successor is there": Mutation(
        _retain_before_commit, "is gone, "
    ),
    "a submission without an answer is repeated": Mutation(
        _submit_again_after_silence, "was submitted twice"
    ),
    "metrics are not taken over": Mutation(_metrics_not_taken_over, "the metrics of"),
    "checkpoints that a publication waits for are not kept": Mutation(_nothing_is_held, "it took"),
    "attempt numbers are skipped": Mutation(_numbers_are_skipped, "still open"),
}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """The code has this bug within the block."""
    with contextlib.ExitStack() as stack:
        for target, attribute, value in MUTATIONS[name].patches():
            stack.enter_context(mock.patch.object(target, attribute, value))
        yield


def first_noticed(name: str, seeds: Iterable[int]) -> str | None:
    """What the first schedule says that notices the bug; None if none does."""
    with mutated(name):
        for seed in seeds:
            try:
                run_schedule(seed)
            except Violation as error:
                said = str(error).splitlines()[0]
                if re.search(MUTATIONS[name].noticed, said):
                    return said
    return None
