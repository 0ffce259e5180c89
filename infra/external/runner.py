"""An attempt at a `command` stage: another trainer from its newest checkpoint to its end.

In: a :class:`TrainerJob` and the attempt's StageIO. Out: a trainer that has ended well, or an
error with the reason. While it runs, its lines go to the attempt's log, its progress and metrics
to ours; a stop is passed on, older checkpoints are deleted when space is short, and silence is not
hidden, so that a hung trainer is recognised.

All attempts share its output folder, because it has the checkpoints. Three things separate
attempts: before a start, leftover processes of earlier ones are killed; a trainer dies with its
worker; and a worker that is no longer the newest stops its trainer.

An attempt restarts a trainer that ends well before its last step.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra.external.checkpoints import (
    ExternalCheckpoint,
    Signature,
    find_checkpoints,
    largest_of,
    newest_complete,
    older,
    remove,
    signature,
    trainer_note,
    unfinished,
)
from infra.external.process import (
    PHASE,
    LineReader,
    OutputLine,
    TrainerCall,
    TrainerLog,
    TrainerProcess,
    command_text,
    environment,
    error_of,
    kernel_oom_kills,
)
from infra.process.child import kill_stale_processes
from infra.store.checkpoints import CompleteCheckpoint
from refiner_core.contract.config import CommandConfig, uses
from refiner_core.contract.errors import ConfigurationError, Interrupted, NoSpaceError, ScriptFailed
from refiner_core.contract.types import Progress

if TYPE_CHECKING:
    from infra.attempt.stage_io import AttemptIO

log = logging.getLogger(__name__)

_POLL_S = 0.2
#: Longest interval between searches for new checkpoints, seconds.
_SAVES_S = 1.0
_FENCE_S = 5.0
#: Interval of logging a progress bar that redraws itself.
_REDRAW_S = 30.0
#: Space is short when less than this many of the largest checkpoint so far fit.
_ROOM_FOR = 1.1


@dataclass(frozen=True)
class TrainerJob:
    """A trainer, and the runner's callbacks.

    ``grace_s`` is how long the trainer may take to save after a stop. Every ``watch_s`` seconds
    ``shortage(need)`` returns how many of ``need`` bytes do not fit, and ``free_space(need)``
    deletes what else may go. ``check_fence`` raises if the attempt is no longer the newest;
    ``ours`` is the folder of the worker's own code.
    """

    command: CommandConfig
    call: TrainerCall
    check_fence: Callable[[], None] = lambda: None
    shortage: Callable[[int], int] = lambda _: 0
    free_space: Callable[[int], object] = lambda _: None
    grace_s: float = 60.0
    watch_s: float = 30.0
    ours: Path | None = None
    _whole: dict[Path, Signature] = field(default_factory=dict)

    def checkpoints(self) -> list[ExternalCheckpoint]:
        """Its present checkpoints."""
        return find_checkpoints(self.call.output, self.command, self._whole)


def run_trainer(job: TrainerJob, io: AttemptIO) -> tuple[list[ExternalCheckpoint], Progress]:
    """Run a trainer until it ends well. Returns its checkpoints, and the last step and numbers that
    it printed, with its total of steps (0: unknown). It is restarted if it ends well before its
    last step and can resume.

    Raises
    ------
    Interrupted
        A stop was requested; the trainer was told, and has ended.
    NoSpaceError, MemoryError, NotFiniteError, ConfigurationError, ScriptFailed
        Its end otherwise (:mod:`infra.external.process`).
    """
    if not job.call.workdir.is_dir():
        raise ConfigurationError(
            f"command.workdir {job.call.workdir} is not a folder here",
            expected="the folder that the trainer starts in, as seen by the job",
            fix="correct command.workdir",
        )
    job.call.output.mkdir(parents=True, exist_ok=True)
    kill_stale_processes(job.call.output)
    job.check_fence()
    start = newest_complete(_tidied(job))
    if start is not None:
        before = [n for n in io.stage.attempt_numbers() if n < job.call.attempt]
        with_metrics = [n for n in before if io.stage.attempt(n).metrics.exists()]
        made_by = (with_metrics or before or [job.call.attempt])[-1]
        io.go_on_from(CompleteCheckpoint(start.step, made_by, start.path))
    progress, ended_at = Progress(0 if start is None else start.step, 0, PHASE), -1
    while True:
        call = replace(job.call, checkpoint=None if start is None else start.path)
        loop = _TrainerLoop(replace(job, call=call), io, progress)
        found = _to_its_end(loop)
        progress = loop.progress_with(found)
        can_resume = uses(job.command, "resume") and job.command.resume_arguments
        if progress.done >= progress.total or progress.done <= ended_at or not can_resume:
            return found, progress
        start, ended_at = newest_complete(found), progress.done
        log.warning(
            "the trainer has ended well at step %d of %d; it is restarted from %s, to see "
            "whether it continues",
            *(progress.done, progress.total, _named(start)),
        )


def _to_its_end(loop: _TrainerLoop) -> list[ExternalCheckpoint]:
    """Start the trainer once; returns its checkpoints if it ends well."""
    job = loop.job
    try:
        code = loop.until_end()
    except NoSpaceError:  # ours; the trainer has ended
        _tidied(job, short=True)
        raise
    found = job.checkpoints()
    progress = loop.reader.progress
    if loop.stopped and not (code == 0 and 0 < progress.total <= progress.done):
        remove(unfinished(found))
        raise Interrupted(
            f"The trainer was asked to stop and ended with exit code {code}; it resumes from "
            f"{_named(newest_complete(job.checkpoints()))}",
            fix="run the same command again",
        )
    if code != 0:
        kills = kernel_oom_kills() - loop.oom_before
        error = error_of(code, loop.lines, job.call.output, kills)
        if all(c.damage for c in found):  # no other sign of the size of a save
            loop.io.checkpoints.lost_bytes = sum(signature(c.path)[1] for c in found)
        # The trainer has ended, and half-written files take the space that the outcome needs.
        found = _tidied(job, short=isinstance(error, NoSpaceError))
        loop.log.flush(last=True)
        if isinstance(error, ScriptFailed) and (start := job.call.checkpoint) is not None:
            error.fix = f"if it cannot resume from {start}, move that away; else {error.fix}"
        loop.io.progress(loop.progress_with(found))
        raise error
    loop.log.flush(last=True)
    return found


def _tidied(job: TrainerJob, *, short: bool = False) -> list[ExternalCheckpoint]:
    """Clean up the checkpoints of a trainer that has ended: remove interrupted saves, and all but
    ``command.keep`` complete ones if space is short. Returns the rest."""
    found = job.checkpoints()
    if remove(unfinished(found)):
        found = job.checkpoints()
    largest = largest_of(found)
    if short or (largest and job.shortage(largest)):
        remove(older(found, job.command.keep))
    return job.checkpoints()


class _TrainerLoop:
    """The loop around one started trainer."""

    def __init__(self, job: TrainerJob, io: AttemptIO, progress: Progress) -> None:
        self.job, self.io = job, io
        self.reader = LineReader(job.command.progress_pattern, progress)
        self.stopped = False
        self.lines: deque[str] = deque(maxlen=400)
        self.log = TrainerLog()
        self.oom_before = kernel_oom_kills()
        self._stop_deadline = float("inf")
        self._last_redraw = float("-inf")
        self._signature = signature(job.call.output)
        self._names: frozenset[Path] = frozenset()
        self._signatures: dict[Path, Signature] = {}
        self._due = dict.fromkeys(("fence", "files", "saves", "room"), time.monotonic() + 1.0)

    def progress_with(self, found: list[ExternalCheckpoint]) -> Progress:
        """Progress from its lines, or else from its newest checkpoint."""
        progress, newest = self.reader.progress, newest_complete(found)
        if newest is None:
            return progress
        total = progress.total
        if not total and self.job.command.exports == "auto":
            total = trainer_note(newest.path, "max_steps")
        return replace(progress, done=max(progress.done, newest.step), total=total)

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
                    self._check(process)
            except NoSpaceError:  # ours; the trainer may still be able to save
                self._stop(process)
                while process.code is None and time.monotonic() < self._stop_deadline:
                    for line in process.lines(_POLL_S):
                        self.log.write(line.text)
                raise
            for line in process.last_lines():
                self._take(line)
            assert process.code is not None
            return process.code

    def _take(self, line: OutputLine) -> None:
        now = time.monotonic()
        if not line.redrawn or now - self._last_redraw >= _REDRAW_S:
            self._last_redraw = now if line.redrawn else self._last_redraw
            self.log.write(line.text)
        if line.text:
            self.lines.append(line.text)
        metrics = self.reader.read(line.text)
        if metrics:
            self.io.log_metrics(self.reader.progress.done, metrics)
        if metrics is not None or self.job.command.heartbeat == "output":
            self._tell()

    def _check(self, process: TrainerProcess) -> None:
        if self.io.should_stop() and not self.stopped:
            self._stop(process)
        if time.monotonic() > self._stop_deadline:
            log.warning("the trainer has not ended within %.0f s; it is killed", self.job.grace_s)
            process.end()
        if self._is_due("fence", _FENCE_S):
            self.job.check_fence()
        if self.job.command.heartbeat == "files" and self._is_due("files", 2.0):
            now = signature(self.job.call.output)
            if now != self._signature:
                self._signature = now
                self._tell()
        if self._is_due("saves", min(_SAVES_S, self.job.watch_s)):
            try:
                self._check_saves()
            except OSError as error:
                log.warning("the checkpoints cannot be read now: %s", error)

    def _tell(self) -> None:
        progress = self.reader.progress
        self.io.progress(replace(progress, phase="stopping") if self.stopped else progress)

    def _stop(self, process: TrainerProcess) -> None:
        self.stopped = True
        self._stop_deadline = time.monotonic() + self.job.grace_s
        number = getattr(signal, f"SIG{self.job.command.stop_signal}")
        log.info("asking the trainer to save and end (%s)", number.name)
        process.signal(number)
        self._tell()

    def _check_saves(self) -> None:
        """Provide space for the next save: own older checkpoints go first, then by the policy.

        Runs for each new checkpoint, and every ``watch_s``. One that has changed since the last
        check may still be written: it is left alone, and does not count.
        """
        names = frozenset(self.job.call.output.glob(self.job.command.checkpoints))
        if not self._is_due("room", self.job.watch_s) and names == self._names:
            return
        found = self.job.checkpoints()
        before, self._signatures = self._signatures, {c.path: signature(c.path) for c in found}
        settled = [c for c in found if self._signatures[c.path] == before.get(c.path)]
        if len(settled) == len(found):
            self._names = names
        need = int(_ROOM_FOR * largest_of(found))
        if need and self.job.shortage(need):
            remove(older(settled, self.job.command.keep))
            self.job.free_space(need)

    def _is_due(self, name: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due[name]:
            return False
        self._due[name] = now + every_s
        return True


def _named(checkpoint: ExternalCheckpoint | None) -> str:
    return "the beginning" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
