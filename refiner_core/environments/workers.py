"""Threads in which tools and simulated users work, with a time limit on each piece of work.

In: functions. Out: what they gave or raised, and how long they took; or that they took too long.

A thread that hangs cannot be ended. So a limit that has passed makes the work *late*: its caller
goes on, another thread takes the hanging one's place, and what it gives one day is thrown away. All
threads are daemons: none keeps the process from ending. Time counts from when a thread takes the
work up, so that a long queue is nobody's fault.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: How long idle threads are waited for when all is over, seconds.
_JOIN_S = 5.0


@dataclass(frozen=True)
class Ended:
    """Work that is over: its key, what it gave (or raised, or that it is late), and its seconds."""

    key: int
    value: Any = None
    error: BaseException | None = None
    late: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class _Job:
    key: int
    work: Callable[[], Any]
    limit_s: float
    abandoned: Callable[[], None]
    began: float | None = None
    late: bool = field(default=False)


class Workers:
    """At most ``count`` threads at work at a time, beside those that hang.

    Parameters
    ----------
    count
        Threads; they are started as they are needed.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._urgent: deque[_Job] = deque()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._ended: list[Ended] = []
        self._threads: set[threading.Thread] = set()
        self._hanging: set[threading.Thread] = set()
        self._of_job: dict[int, threading.Thread] = {}
        self._idle, self._closed = 0, False

    def submit(
        self,
        key: int,
        work: Callable[[], Any],
        limit_s: float,
        *,
        urgent: bool = True,
        abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        """Do ``work`` in a thread, urgent work before other.

        Parameters
        ----------
        key
            Comes back with its end; one piece of work per key at a time.
        limit_s
            Seconds after which it is late.
        abandoned
            Called in the thread of late work, should that ever come to an end.
        """
        with self._changed:
            job = _Job(key, work, limit_s, abandoned)
            (self._urgent if urgent else self._waiting).append(job)
            self._call_up()
            self._changed.notify_all()

    def ended(self, timeout_s: float) -> list[Ended]:
        """All that has ended since the last call; waits up to ``timeout_s`` for a first one."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now = time.monotonic()
                self._give_up(now)
                if self._ended or now >= until:
                    ended, self._ended = self._ended, []
                    return ended
                limits = [job.began + job.limit_s for job in self._running if job.began is not None]
                self._changed.wait(max(0.0, min([until, *limits]) - now))

    def abandon(self) -> frozenset[int]:
        """Drop what waits, and call late what runs: the keys of what runs."""
        with self._changed:
            self._urgent.clear()
            self._waiting.clear()
            self._ended.clear()
            running = list(self._running)
            for job in running:
                self._hang(job)
            return frozenset(job.key for job in running)

    def close(self) -> None:
        """Let idle threads end and wait for them; work that runs is late from now on."""
        self.abandon()
        with self._changed:
            self._closed = True
            idle = self._threads - self._hanging
            self._changed.notify_all()
        for thread in idle:
            thread.join(_JOIN_S)

    def _give_up(self, now: float) -> None:
        for job in list(self._running):
            assert job.began is not None
            if now - job.began >= job.limit_s:
                self._hang(job)
                self._ended.append(Ended(job.key, late=True, seconds=now - job.began))
        self._call_up()

    def _hang(self, job: _Job) -> None:
        """From now on nobody waits for this job, and its thread is none of the count."""
        job.late = True
        self._running.remove(job)
        self._hanging.add(self._of_job.pop(id(job)))

    def _call_up(self) -> None:
        """Start threads for what waits."""
        waiting = len(self._urgent) + len(self._waiting) - self._idle
        room = self._count - (len(self._threads) - len(self._hanging))
        for _ in range(min(waiting, room)):
            thread = threading.Thread(target=self._work, name="refiner-episodes", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        me = threading.current_thread()
        while (job := self._next(me)) is not None:
            value, error = None, None
            try:
                value = job.work()
            except BaseException as raised:  # a tool may raise SystemExit; who waits is told
                error = raised
            if not self._over(job, value, error):
                job.abandoned()
                break
        with self._changed:
            self._threads.discard(me)
            self._hanging.discard(me)

    def _next(self, me: threading.Thread) -> _Job | None:
        with self._changed:
            self._idle += 1
            while not (self._urgent or self._waiting or self._closed):
                self._changed.wait()
            self._idle -= 1
            if self._closed:
                return None
            job = (self._urgent or self._waiting).popleft()
            job.began = time.monotonic()
            self._running.append(job)
            self._of_job[id(job)] = me
            self._changed.notify_all()  # who waits has another limit now
            return job

    def _over(self, job: _Job, value: Any, error: BaseException | None) -> bool:
        """Hand in what a job gave; False where nobody waits for it any more."""
        with self._changed:
            if job.late:
                return False
            assert job.began is not None
            self._running.remove(job)
            del self._of_job[id(job)]
            seconds = time.monotonic() - job.began
            self._ended.append(Ended(job.key, value, error, seconds=seconds))
            self._changed.notify_all()
            return True
