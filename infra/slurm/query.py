"""One look at all jobs of an orchestrator: few queries, and never a wrong "dead".

In: which jobs are wanted, by id or (where a crash came before the id was noted) by their unique
name. Out: an :class:`Answer` each. At most one round of queries per ``poll_s``: squeue for what is
alive, and only for jobs that it no longer lists the controller's memory (scontrol) and accounting
(sacct). In between, the last answer counts. A scheduler that does not answer is asked ever more
rarely, and says nothing about any job.

Accounting lags behind, a controller forgets, and both are empty right after a start: a job that
nobody knows counts as lost only after several answers in a row, some seconds apart by our own
clock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from infra.slurm.commands import Accounts, SlurmCommands, SlurmUnavailable
from infra.slurm.states import JobFacts, facts_of, facts_of_accounts

log = logging.getLogger(__name__)

#: A scheduler that does not answer is asked at most this rarely, seconds.
LONGEST_PAUSE_S = 120.0
#: Accounting that was off is tried again after this long, seconds.
_ACCOUNTING_AGAIN_S = 600.0


class Wanted(NamedTuple):
    """A job that somebody wants to know of.

    ``job_id`` is none where it was not noted; then it is found by ``name``, and by ``task`` where
    that names an array. ``user`` is the number of who submitted it.
    """

    job_id: str | None
    name: str
    task: int | None
    user: str

    @property
    def key(self) -> Hashable:
        """The same from look to look."""
        return self.job_id or (self.name, self.task)


class Answer(NamedTuple):
    """What is known of a job: ``facts``, or that it is certainly ``lost``, or nothing."""

    facts: JobFacts | None = None
    lost: bool = False


@dataclass(frozen=True)
class Patience:
    """When a job that nobody knows is lost: after so many answers, over so many seconds."""

    answers: int = 3
    seconds: float = 15.0


class _Missing(NamedTuple):
    since: float
    answers: int


class SchedulerView:
    """Remembers the last answers; one per orchestrator.

    Parameters
    ----------
    commands
        What is asked.
    poll_s
        Seconds between rounds of queries, at least.
    clock
        Seconds that never run backwards.
    """

    def __init__(
        self,
        commands: SlurmCommands,
        poll_s: float = 10.0,
        *,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commands, self._poll_s, self._clock = commands, poll_s, clock
        self._patience = patience or Patience()
        self._live: dict[str, JobFacts] = {}
        self._by_name: dict[str, list[JobFacts]] = {}
        self._over: dict[Hashable, JobFacts] = {}
        self._lost: set[Hashable] = set()
        self._missing: dict[Hashable, _Missing] = {}
        self._new: dict[str, JobFacts] = {}
        self._next_at = float("-inf")
        self._failures = 0
        self._accounting_at = float("-inf")

    # ------------------------------------------------------------ asking

    def submitted(self, job_id: str, name: str) -> None:
        """A job that was submitted a moment ago: it is live until an answer says otherwise."""
        self._new[job_id] = JobFacts(job_id, "PENDING", name=name, source="sbatch")

    def released(self, job_id: str) -> None:
        """A job that was let go a moment ago: it is not held until an answer says so again."""
        if job_id in self._live:
            self._live[job_id] = replace(self._live[job_id], reason="released")

    def look(self, wanted: Sequence[Wanted]) -> dict[Hashable, Answer]:
        """What is known of each, by :attr:`Wanted.key`; asks the scheduler if it is time to."""
        if wanted and self._clock() >= self._next_at:
            self._ask(wanted)
        return {w.key: self._answer(w) for w in wanted}

    def known(self, job_id: str) -> JobFacts | None:
        """A job as it was at the last look, if it was alive then."""
        return self._live.get(job_id)

    def _answer(self, wanted: Wanted) -> Answer:
        over = self._over.get(wanted.key)
        if over is not None:
            return Answer(over)
        if wanted.key in self._lost:
            return Answer(lost=True)
        if wanted.job_id in self._new:
            return Answer(self._new[wanted.job_id])
        return Answer() if self._failures else Answer(self._in_queue(wanted))

    def _in_queue(self, wanted: Wanted) -> JobFacts | None:
        if wanted.job_id is not None:
            return self._live.get(wanted.job_id)
        return _one_of(self._by_name.get(wanted.name, ()), wanted)

    # ------------------------------------------------------------ one round of queries

    def _ask(self, wanted: Sequence[Wanted]) -> None:
        asked_at = self._clock()
        try:
            rows = self._commands.queue({w.user for w in wanted})
            jobs = [facts_of(row, "squeue") for row in rows]
            self._live = {j.job_id: j for j in jobs if not j.rule.over}
            self._by_name = {}
            for job in self._live.values():
                self._by_name.setdefault(job.name, []).append(job)
            self._new.clear()
            self._ask_for_the_rest(wanted)
        except SlurmUnavailable as error:
            self._pause(error)
            return
        if self._failures:
            log.info("Slurm answers again")
        self._failures, self._next_at = 0, asked_at + self._poll_s

    def _pause(self, error: SlurmUnavailable) -> None:
        self._failures += 1
        pause = min(self._poll_s * 2**self._failures, max(LONGEST_PAUSE_S, self._poll_s))
        self._next_at = self._clock() + pause
        if self._failures == 1:
            log.warning("%s Jobs go on; how they are is not known until it answers.", error)

    def _ask_for_the_rest(self, wanted: Sequence[Wanted]) -> None:
        """Ended jobs, and those that nobody has noted."""
        for w in wanted:
            if self._in_queue(w) is not None:  # an ended job may be put back by hand
                self._over.pop(w.key, None)
                self._lost.discard(w.key)
                self._missing.pop(w.key, None)
        open_ = [
            w
            for w in wanted
            if self._in_queue(w) is None and w.key not in self._over and w.key not in self._lost
        ]
        if not open_:
            return
        ids = [w.job_id for w in open_ if w.job_id is not None]
        names = sorted({w.name for w in open_ if w.job_id is None})
        remembered = [facts_of(r, "scontrol") for r in self._commands.shown(ids, names)]
        accounts = self._accounts(ids, names)
        recorded = list(facts_of_accounts(accounts.rows).values())
        for w in open_:
            self._settle(w, _pick(remembered, w), _pick(recorded, w))

    def _settle(self, wanted: Wanted, told: JobFacts | None, noted: JobFacts | None) -> None:
        """Of the controller and of accounting, the former is fresher; the latter alone knows steps,
        and who has cancelled it."""
        found = told or (noted if noted is not None and noted.rule.over else None)
        if found is not None and noted is not None:
            found = replace(found, steps=noted.steps, by=noted.by)
        if found is not None:
            self._missing.pop(wanted.key, None)
            if found.rule.over:
                self._over[wanted.key] = found
            else:  # it came back between two queries
                self._live[found.job_id] = found
                self._by_name.setdefault(found.name, []).append(found)
            return
        since, answers = self._missing.get(wanted.key, _Missing(self._clock(), 0))
        self._missing[wanted.key] = _Missing(since, answers + 1)
        enough = answers + 1 >= self._patience.answers
        if enough and self._clock() - since >= self._patience.seconds:
            del self._missing[wanted.key]
            self._lost.add(wanted.key)

    def _accounts(self, ids: Sequence[str], names: Sequence[str]) -> Accounts:
        if self._clock() < self._accounting_at:
            return Accounts(False)
        try:
            found = self._commands.accounts(ids, names)
        except SlurmUnavailable as error:
            log.debug("%s", error)
            return Accounts(False)
        if not found.available:
            log.debug("accounting is off; the controller's memory must do")
            self._accounting_at = self._clock() + _ACCOUNTING_AGAIN_S
        return found


def _pick(jobs: Iterable[JobFacts], wanted: Wanted) -> JobFacts | None:
    if wanted.job_id is not None:
        return next((j for j in jobs if j.job_id == wanted.job_id), None)
    return _one_of([j for j in jobs if j.name == wanted.name], wanted)


def _one_of(jobs: Sequence[JobFacts], wanted: Wanted) -> JobFacts | None:
    """The job itself, or the task of an array. Names are for all to see and to take, so it must be
    a job of the same user."""
    for job in jobs:
        _, _, number = job.job_id.partition("_")
        if job.user == wanted.user and number == ("" if wanted.task is None else str(wanted.task)):
            return job
    return None
