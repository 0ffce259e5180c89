"""How long it takes from begin to end when only so many run at a time. Pure.

In: per trial its jobs with their seconds and what each waits for. Out: seconds. A job that several
trials need runs once; a trial begins when one before it has ended, in their order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Job(NamedTuple):
    """One stage: ``after`` names the jobs that it waits for; those that are in no trial are done
    already."""

    id: str
    seconds: float
    after: tuple[str, ...]


def wall_seconds(
    trials_jobs: Sequence[Sequence[Job]], *, trials: int | None = None, jobs: int | None = None
) -> float:
    """Seconds until all is done.

    Parameters
    ----------
    trials, jobs
        So many at a time; None is no limit.
    """
    return _Schedule(trials_jobs, trials, jobs).run()


class _Schedule:
    """Steps from one end of a job to the next."""

    def __init__(
        self, trials_jobs: Sequence[Sequence[Job]], trials: int | None, jobs: int | None
    ) -> None:
        self.left = [{job.id for job in mine} for mine in trials_jobs]
        self.most_jobs = jobs
        self.slots = len(trials_jobs) if trials is None else trials
        self.waiting_trials = deque(range(len(trials_jobs)))
        self.begun = [False] * len(trials_jobs)
        self.trials_jobs = trials_jobs
        self.jobs: dict[str, Job] = {}
        self.owners: dict[str, list[int]] = {}
        for number, mine in enumerate(trials_jobs):
            for job in mine:
                self.jobs.setdefault(job.id, job)
                self.owners.setdefault(job.id, []).append(number)
        self.followers: dict[str, list[str]] = {}
        self.open: dict[str, int] = {}
        for job in self.jobs.values():
            before = {a for a in job.after if a in self.jobs}
            self.open[job.id] = len(before)
            for name in before:
                self.followers.setdefault(name, []).append(job.id)
        self.wanted: set[str] = set()
        self.ready: deque[str] = deque()
        self.running: list[tuple[float, str]] = []
        self.ended: set[str] = set()
        self.now = 0.0

    def run(self) -> float:
        self._begin_trials()
        while True:
            self._start()
            if not self.running:
                return self.now
            self.now, name = heapq.heappop(self.running)
            self._end(name)

    def _begin_trials(self) -> None:
        while self.slots > 0 and self.waiting_trials:
            number = self.waiting_trials.popleft()
            if not self.left[number]:
                continue  # others have done all of it
            self.slots -= 1
            self.begun[number] = True
            for job in self.trials_jobs[number]:
                if job.id in self.wanted or job.id in self.ended:
                    continue
                self.wanted.add(job.id)
                if self.open[job.id] == 0:
                    self.ready.append(job.id)

    def _start(self) -> None:
        while self.ready and (self.most_jobs is None or len(self.running) < self.most_jobs):
            name = self.ready.popleft()
            heapq.heappush(self.running, (self.now + self.jobs[name].seconds, name))

    def _end(self, name: str) -> None:
        self.ended.add(name)
        for follower in self.followers.get(name, ()):
            self.open[follower] -= 1
            if self.open[follower] == 0 and follower in self.wanted:
                self.ready.append(follower)
        for number in self.owners[name]:
            self.left[number].discard(name)
            if self.begun[number] and not self.left[number]:
                self.slots += 1
        self._begin_trials()
