"""An attempt at a `command` stage: another trainer from its newest checkpoint to its end.

In: a :class:`TrainerJob` and the attempt's StageIO. Out: a trainer that has ended well, or the
error that says why it did not. While it runs its lines go to the attempt's log, its progress and
metrics to ours; a stop is passed on, older checkpoints make room where it is short, and silence
stays silence, so that a hung trainer is seen as one.

The folder it writes into is one for all attempts, because its checkpoints lie there. Three things
keep attempts apart: before a start, whatever an earlier one has left running here is killed; a
trainer dies with its worker; and a worker that is no longer the newest stops its trainer.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from infra.attempt.stage_io import AttemptIO
from infra.foreign.calling import Call, command_text, environment
from infra.foreign.checkpoints import (
    CheckpointRule,
    ForeignCheckpoint,
    find_checkpoints,
    newest_complete,
    remove_older,
    remove_unfinished,
    signature,
    size_of,
)
from infra.foreign.endings import Ending, error_of, kernel_oom_kills
from infra.foreign.process import Line, TrainerProcess, kill_leftovers
from infra.foreign.reading import LineReader
from infra.store.checkpoints import Complete
from refiner_core.contract.config import CommandConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, NoSpaceError
from refiner_core.contract.types import Progress

log = logging.getLogger(__name__)

_POLL_S = 0.2
_FENCE_S = 5.0
#: A bar that redraws itself is logged this often.
_REDRAW_S = 30.0
#: Room is short when less than this many of the largest checkpoint so far fit.
_ROOM_FOR = 1.1


@dataclass(frozen=True)
class TrainerJob:
    """What to run, and what the runner may ask.

    ``grace_s`` is how long the trainer may take to save after a stop. Every ``watch_s`` seconds
    ``shortage(need)`` is asked how many of ``need`` bytes do not fit, and ``make_room(need)`` to
    delete what else may go. ``check_fence`` raises if the attempt is no longer the newest; ``ours``
    is the folder that the worker's own code is imported from.
    """

    command: CommandConfig
    call: Call
    check_fence: Callable[[], None] = lambda: None
    shortage: Callable[[int], int] = lambda _: 0
    make_room: Callable[[int], object] = lambda _: None
    grace_s: float = 60.0
    watch_s: float = 30.0
    ours: Path | None = None

    @property
    def rule(self) -> CheckpointRule:
        """How its checkpoints look."""
        return CheckpointRule.of(self.command)


@dataclass(frozen=True)
class TrainerReport:
    """A trainer that has ended well: its checkpoints, and the last numbers that it printed."""

    checkpoints: list[ForeignCheckpoint]
    step: int
    resumed_from: int | None
    values: dict[str, float] = field(default_factory=dict)


def run_trainer(job: TrainerJob, io: AttemptIO) -> TrainerReport:
    """Run a trainer to its end.

    Raises
    ------
    Interrupted
        Somebody asked to stop; the trainer was told, and has ended.
    NoSpaceError, MemoryError, NotFiniteError, ConfigurationError, StageFailed
        Why it ended otherwise (:mod:`infra.foreign.endings`).
    """
    _check_workdir(job.call.workdir)
    job.call.output.mkdir(parents=True, exist_ok=True)
    kill_leftovers(job.call.output)
    job.check_fence()
    start = _where_to_start(job, io)
    job = _with_checkpoint(job, start)
    at_work = _AtWork(job, io, 0 if start is None else start.step)
    code = at_work.until_end()
    found = find_checkpoints(job.call.output, job.rule)
    if at_work.stopped and not (code == 0 and at_work.is_at_end):
        remove_unfinished(found)
        raise Interrupted(
            f"The trainer was asked to stop and ended with exit code {code}; it goes on from "
            f"{_named(newest_complete(find_checkpoints(job.call.output, job.rule)))}",
            fix="run the same command again",
        )
    if code != 0:
        ending = at_work.ending(code)
        # Nobody writes now, and what is half-written takes the room that the outcome needs.
        error = error_of(ending)
        remove_unfinished(found)
        at_work.flush_log()
        raise error
    step = at_work.reader.progress.done
    values = dict(at_work.reader.progress.values)
    return TrainerReport(found, step, None if start is None else start.step, values)


def _where_to_start(job: TrainerJob, io: AttemptIO) -> ForeignCheckpoint | None:
    found = find_checkpoints(job.call.output, job.rule)
    if remove_unfinished(found):
        found = find_checkpoints(job.call.output, job.rule)
    start = newest_complete(found)
    if start is None:
        return None
    before = [n for n in io.stage.attempt_numbers() if n < job.call.attempt]
    with_metrics = [n for n in before if io.stage.attempt(n).metrics.exists()]
    made_by = (with_metrics or before or [job.call.attempt])[-1]
    io.go_on_from(Complete(start.step, made_by, start.path))
    return start


class _AtWork:
    """The loop around one started trainer."""

    def __init__(self, job: TrainerJob, io: AttemptIO, first_step: int) -> None:
        self.job, self.io = job, io
        self.reader = LineReader(job.command.progress_pattern, first_step)
        self.stopped = False
        self._lines: deque[str] = deque(maxlen=400)
        self._log = _Log()
        self._oom_before = kernel_oom_kills()
        self._stop_deadline = float("inf")
        self._last_redraw = float("-inf")
        self._signature = signature(job.call.output)
        self._due = dict.fromkeys(("fence", "files", "room"), time.monotonic() + 1.0)

    @property
    def is_at_end(self) -> bool:
        """Whether the trainer has printed its last step."""
        progress = self.reader.progress
        return 0 < progress.total <= progress.done

    def ending(self, code: int) -> Ending:
        """How it ended, for who says why."""
        kills = kernel_oom_kills() - self._oom_before
        return Ending(code, tuple(self._lines), self.job.call.output, kills)

    def flush_log(self) -> None:
        """Write what did not go in while the disk was full."""
        self._log.flush()

    def until_end(self) -> int:
        """Start it and wait for its end; returns its exit code."""
        job = self.job
        text = command_text(job.command, job.call)
        log.info("starting the trainer in %s: %s", job.call.workdir, text)
        settings = environment(job.command, job.call, job.ours)
        self.io.progress(self.reader.progress)
        with TrainerProcess(text, settings, job.call.workdir) as process:
            try:
                while process.code is None:
                    for line in process.lines(_POLL_S):
                        self._take(line)
                    self._look_around(process)
            except NoSpaceError:  # ours; the trainer may still be able to save
                self._stop(process)
                self._wait(process)
                raise
            for line in process.last_lines():
                self._take(line)
            assert process.code is not None
            return process.code

    def _take(self, line: Line) -> None:
        if line.redrawn and time.monotonic() - self._last_redraw < _REDRAW_S:
            pass
        else:
            if line.redrawn:
                self._last_redraw = time.monotonic()
            self._log.write(line.text)
        if line.text:
            self._lines.append(line.text)
        reading = self.reader.read(line.text)
        if reading is not None and reading.metrics:
            self.io.log_metrics(reading.step, reading.metrics)
        if reading is not None or self.job.command.heartbeat == "output":
            self._tell()

    def _look_around(self, process: TrainerProcess) -> None:
        if self.io.should_stop() and not self.stopped:
            self._stop(process)
        if time.monotonic() > self._stop_deadline:
            log.warning("the trainer has not ended within %.0f s; it is killed", self.job.grace_s)
            process.kill()
        if self._is_due("fence", _FENCE_S):
            self.job.check_fence()
        if self.job.command.heartbeat == "files" and self._is_due("files", 2.0):
            now = signature(self.job.call.output)
            if now != self._signature:
                self._signature = now
                self._tell()
        if self._is_due("room", self.job.watch_s):
            self._make_room()

    def _tell(self) -> None:
        progress = self.reader.progress
        if self.stopped:
            progress = Progress(progress.done, progress.total, "stopping", progress.values)
        self.io.progress(progress)

    def _stop(self, process: TrainerProcess) -> None:
        self.stopped = True
        self._stop_deadline = time.monotonic() + self.job.grace_s
        number = getattr(signal, f"SIG{self.job.command.stop_signal}")
        log.info("asking the trainer to save and end (%s)", number.name)
        process.signal(number)
        self._tell()

    def _wait(self, process: TrainerProcess) -> None:
        while process.code is None and time.monotonic() < self._stop_deadline:
            for line in process.lines(_POLL_S):
                self._log.write(line.text)

    def _make_room(self) -> None:
        """For the next save. Its own older checkpoints go first, then what the policy allows."""
        found = find_checkpoints(self.job.call.output, self.job.rule)
        largest = max((size_of(c.path) for c in found if not c.damage), default=0)
        need = int(_ROOM_FOR * largest)
        if need and self.job.shortage(need):
            remove_older(found, self.job.command.keep)
            self.job.make_room(need)

    def _is_due(self, name: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[name]:
            return False
        self._due[name] = now + every_s
        return True


def _with_checkpoint(job: TrainerJob, start: ForeignCheckpoint | None) -> TrainerJob:
    call = replace(job.call, checkpoint=None if start is None else start.path)
    return replace(job, call=call)


def _check_workdir(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigurationError(
            f"command.workdir {folder} is not a folder here",
            expected="the folder that the trainer starts in, seen from where the job runs",
            fix="correct command.workdir",
        )


class _Log:
    """The attempt's log. One that is full is no reason to end the training: lines that do not go
    in wait for the next that does."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque(maxlen=400)

    def write(self, text: str) -> None:
        self._waiting.append(text)
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            while self._waiting:
                sys.stdout.write(self._waiting[0] + "\n")
                sys.stdout.flush()
                self._waiting.popleft()


def _named(checkpoint: ForeignCheckpoint | None) -> str:
    return "the beginning" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
