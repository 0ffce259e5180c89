"""Virtual time, and processes that may stall or die at every single operation on the disk.

In: functions to run as processes, and timers. Out: one deterministic order of everything, drawn
from a seed. Each process is a greenlet; :meth:`World.point` is called before and after each
operation on the disk and each word with the scheduler: there a process may stall while others go
on, and there it dies, and from then on nothing of it, clean-up included, reaches the disk.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from greenlet import getcurrent, greenlet


class Killed(BaseException):
    """The process is gone. Nothing may catch it but the world."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass
class Process:
    """One simulated process.

    ``dies_at`` is after how many points it is killed; ``dies_near`` kills it at the so-many-th
    point whose label begins so. A ``frozen`` one stands still and does not know it. ``lost``: on a
    node that nobody reaches. ``finished``: it
    came to its end by itself. ``job`` is the scheduler's job that it is part of.
    """

    name: str
    host: str
    pid: int
    main: Callable[[], None]
    dies_at: int | None = None
    dies_near: tuple[str, int] | None = None
    alive: bool = True
    frozen: bool = False
    lost: bool = False
    finished: bool = False
    points: int = 0
    due: float | None = None
    job: Any = None
    handlers: dict[int, Any] = field(default_factory=dict)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    run: greenlet | None = None

    def tell(self, signal_number: int) -> None:
        """Deliver a signal, if it has a handler for it."""
        handler = self.handlers.get(signal_number)
        if self.alive and not self.lost and callable(handler):
            handler(signal_number, None)


@dataclass(frozen=True)
class Stalls:
    """How likely a process stands still at a point, and for how long at most (seconds)."""

    short: float = 0.03
    short_s: float = 8.0
    long: float = 0.0
    long_s: float = 4000.0


class World:
    """The clock, the processes, and what has happened.

    Parameters
    ----------
    seed
        Decides everything.
    print_line
        Takes the trace, a line at a time; None to keep none.
    """

    def __init__(self, seed: int, print_line: Callable[[str], None] | None = None) -> None:
        self.seed, self.random, self._print_line = seed, random.Random(seed), print_line
        self.now = 0.0
        self.stalls = Stalls()
        self.current: Process | None = None
        self.processes: dict[int, Process] = {}
        self.after_event: Callable[[], None] = lambda: None
        self.on_stall: Callable[[Process, float], None] = lambda process, seconds: None
        self.failure: BaseException | None = None
        self._hub = getcurrent()
        self._queue: list[tuple[float, int, Process | None, Callable[[], None] | None]] = []
        self._count = 0
        self._dying: list[Process] = []
        self._pid = 100

    # ------------------------------------------------------------ what happens

    def tell(self, text: str) -> None:
        """One line of the trace."""
        if self._print_line is not None:
            who = self.current.name if self.current else "-"
            self._print_line(f"{self.now:10.1f}  {who:<16} {text}")

    def chance(self, probability: float) -> bool:
        """Whether something comes to pass."""
        return probability > 0 and self.random.random() < probability

    def violated(self, text: str) -> NoReturn:
        """What must never happen did: the end, whatever is around it that catches errors."""
        self.failure = self.failure or Violation(text)
        if self.current is None:
            raise self.failure
        self.current.alive = False
        raise Killed

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call something later; it may not sleep."""
        self._push(self.now + delay_s, None, call)

    def spawn(
        self, name: str, host: str, main: Callable[[], None], delay_s: float = 0.0
    ) -> Process:
        """Start a process."""
        self._pid += 1
        process = Process(name, host, self._pid, main)
        self.processes[process.pid] = process
        process.run = greenlet(lambda: self._main(process), parent=self._hub)
        self._wake(process, delay_s)
        return process

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does."""
        if not process.alive:
            return
        process.alive = False
        if process is not self.current:
            self._dying.append(process)

    def freeze(self, process: Process, frozen: bool) -> None:
        """Stop a process where it is, or let it go on."""
        process.frozen = frozen
        if not frozen and process.alive and process.due is None:
            self._wake(process, 0.0)

    # ------------------------------------------------------------ from within a process

    def sleep(self, seconds: float) -> None:
        """Let time pass for the current process."""
        process = self.current
        self._wake(process, seconds)
        self._hub.switch()
        while process.frozen and process.alive:
            process.due = None
            self._hub.switch()
        if not process.alive:
            raise Killed

    def point(self, label: str) -> None:
        """A moment at which the current process may stall, and at which it may be gone."""
        process = self.current
        if process is None:
            return
        if not process.alive:
            raise Killed
        process.points += 1
        if self._dies_now(process, label):
            self.tell(f"is killed at {label}")
            process.alive = False
            raise Killed
        if getcurrent() is not process.run:
            return  # a timer on its behalf
        if self.chance(self.stalls.short):
            self.sleep(self.random.random() * self.stalls.short_s)
        elif self.chance(self.stalls.long):
            stall_s = self.random.random() * self.stalls.long_s
            self.tell(f"stalls for {stall_s:.0f} s at {label}")
            self.on_stall(process, stall_s)
            self.sleep(stall_s)

    def _dies_now(self, process: Process, label: str) -> bool:
        if process.dies_at is not None and process.points >= process.dies_at:
            return True
        if process.dies_near is None or not label.startswith(process.dies_near[0]):
            return False
        process.dies_near = (process.dies_near[0], process.dies_near[1] - 1)
        return process.dies_near[1] <= 0

    # ------------------------------------------------------------ the loop

    def run(self, until: float, over: Callable[[], bool] = lambda: False) -> bool:
        """Let things happen until ``over()`` or the time ``until``; whether it was ``over``.

        Raises
        ------
        Violation
            Something that must never happen did.
        """
        while self._queue and self._queue[0][0] <= until:
            due, _, process, call = heapq.heappop(self._queue)
            if process is not None and (not process.alive or process.due != due):
                continue
            self.now = max(self.now, due)
            if process is not None:
                process.due = None
                if not process.frozen:
                    self._switch(process)
            elif call is not None:
                call()
            self._bury()
            self.after_event()
            if self.failure is not None:
                raise self.failure
            if over():
                return True
        self.now = max(self.now, until) if not self._queue else self.now
        return over()

    def _switch(self, process: Process) -> None:
        self.current = process
        process.run.switch()
        self.current = None

    def _bury(self) -> None:
        """Unwind the dead: whatever they still try on the way, the disk does not take it."""
        while self._dying:
            process = self._dying.pop()
            if process.run:  # begun, and not yet at its end
                self.current = process
                process.run.throw(Killed)
                self.current = None
            else:
                self._ended(process)

    def _main(self, process: Process) -> None:
        try:
            process.main()
        except Killed:
            pass
        except BaseException as error:  # what a process lets through is the simulation's end
            self.failure = self.failure or error
        process.alive = False
        self._ended(process)

    def _ended(self, process: Process) -> None:
        self.processes.pop(process.pid, None)
        calls, process.at_end = process.at_end, []
        for call in calls:
            self.at(0.0, call)

    def _wake(self, process: Process, delay_s: float) -> None:
        process.due = self.now + delay_s
        self._push(process.due, process, None)

    def _push(self, due: float, process: Process | None, call: Callable[[], None] | None) -> None:
        self._count += 1
        heapq.heappush(self._queue, (due, self._count, process, call))
