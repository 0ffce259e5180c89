"""Another trainer as a process (stage `command`): its command, its output, and why it ended.

In: a recipe's ``command`` section, and paths. Out: a text for ``/bin/sh`` and the environment that
the trainer's user would have; its lines as they come, with their progress and metrics; a bounded
log of them; and, from its exit code, last lines, the disk and the kernel, the error that
:func:`infra.jobs.failures.classify` assigns to the right class.

An attempt (:func:`run_trainer`) takes a :class:`TrainerJob` and its StageIO from the newest
checkpoint to a trainer that has ended well, or to an error. While it runs, its lines go to the
attempt's log, its progress and metrics to ours; a stop is passed on, older checkpoints are deleted
when space is short, and silence is not hidden, so that a hung trainer is recognised. A trainer that
ends well before its last step is restarted.

All attempts share its output folder, because it has the checkpoints. Three things separate
attempts: before a start, leftover processes of earlier ones are killed; a trainer dies with its
worker; and a worker that is no longer the newest stops its trainer.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import re
import shlex
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

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
from infra.jobs.failures import class_of_text
from infra.process.child import MARK, ChildProcess, kill_stale_processes
from infra.store.atomic import has_room, is_no_space, no_space_error
from infra.store.checkpoints import CompleteCheckpoint
from refiner_core.contract.config import PLACEHOLDER, CommandConfig, uses
from refiner_core.contract.errors import (
    ConfigurationError,
    Interrupted,
    KilledError,
    NoSpaceError,
    NotFiniteError,
    ScriptFailed,
)
from refiner_core.contract.types import Progress

if TYPE_CHECKING:
    from infra.attempt.stage_io import AttemptIO

log = logging.getLogger(__name__)

#: Settings of our own worker.
OURS = (
    *("PYTHONSAFEPATH", "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"),
)

#: A line without an end is cut after this many bytes.
_LINE_LIMIT = 1 << 16
#: Ends of lines: after a line feed, or a carriage return without one.
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")
#: Limit of waiting lines. A faster trainer blocks, as at any pipe.
_MOST_WAITING = 10_000
#: Seconds after which a reader of lines may do something else.
_TURN_S = 0.5
_LAST_WORDS_S = 5.0
PHASE = "train"
_NOTHING = Progress(0, 0, PHASE)
#: Bytes allowed at once, and bytes per second after that (700 MB a day).
_AT_ONCE, _EACH_S = 16 << 20, 8 << 10
_MOST_LINES_WAITING = 400
#: Lines from the end that are searched: earlier lines say nothing about the end.
_LINES = 60
_SHOWN = 6
_NOT_FINITE = re.compile(
    r"(FloatingPointError|loss (is|became|was) (nan|inf)|(nan|inf)(inity)? (loss|grad)"
    r"|(loss|gradients?|grad_?norm)\b.{0,40}\b(nan|inf|not finite|non-?finite)\b)",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"^\W*(\[\w+\d*\]:\s*)?[\w.]*(Error|Exception|Killed|Interrupt)\b")
#: Exit codes of a shell whose program is missing, or not executable.
CANNOT_START = (127, 126)


@dataclass(frozen=True)
class TrainerJob:
    """A trainer's call, and the runner's callbacks.

    ``data`` and ``model`` are None if the recipe has none; ``checkpoint`` is None at the first
    start. ``grace_s`` is how long the trainer may take to save after a stop. Every ``watch_s``
    seconds ``shortage(need)`` returns how many of ``need`` bytes do not fit, and
    ``free_space(need)`` deletes what else may go. ``check_fence`` raises if the attempt is no
    longer the newest.
    """

    command: CommandConfig
    output: Path
    workdir: Path
    seed: int
    stage_id: str
    attempt: int
    data: Path | None = None
    model: str | None = None
    checkpoint: Path | None = None
    check_fence: Callable[[], None] = lambda: None
    shortage: Callable[[int], int] = lambda _: 0
    free_space: Callable[[int], object] = lambda _: None
    grace_s: float = 60.0
    watch_s: float = 30.0
    _whole: dict[Path, Signature] = field(default_factory=dict)

    def values(self) -> dict[str, str]:
        """Placeholder -> value, without ``resume``; missing values are empty."""
        names = ("output", "workdir", "seed", "data", "model", "checkpoint")
        return {n: "" if (v := getattr(self, n)) is None else str(v) for n in names}

    def checkpoints(self) -> list[ExternalCheckpoint]:
        """Its present checkpoints."""
        return find_checkpoints(self.output, self.command, self._whole)


def command_text(job: TrainerJob) -> str:
    """The shell command, with every value quoted."""
    config = job.command
    values = {name: shlex.quote(value) for name, value in job.values().items()}
    resume = fill(config.resume_arguments, values) if job.checkpoint is not None else ""
    return fill(config.run, {**values, "resume": resume})


def fill(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``{name}`` replaced; ``{{`` and ``}}`` are single braces, ``${…}`` stays."""

    def replaced(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0][0] if match[0] in ("{{", "}}") else match[0]
        return values.get(match["name"], match[0])

    return PLACEHOLDER.sub(replaced, text)


def without_ours(base: Mapping[str, str]) -> dict[str, str]:
    """An environment without our worker's settings, and without the folder of its code."""
    kept = {k: v for k, v in base.items() if k not in OURS and k != "PYTHONPATH"}
    ours, given = Path(__file__).resolve().parents[2], base.get("PYTHONPATH", "")
    paths = [p for p in given.split(os.pathsep) if p and Path(p).resolve() != ours]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)} if paths else kept


def environment(job: TrainerJob, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The trainer's environment."""
    values = job.values()
    own = (setting.partition("=") for setting in job.command.env)
    return {
        **without_ours(base),
        "PYTHONUNBUFFERED": "1",
        **{f"REFINER_{name.upper()}": value for name, value in values.items()},
        "REFINER_STAGE": job.stage_id,
        "REFINER_ATTEMPT": str(job.attempt),
        **{name: fill(value, values) for name, _, value in own},
        MARK: values["output"],
    }


class OutputLine(NamedTuple):
    """A printed line; ``redrawn`` if it ends in a carriage return, as progress bars do."""

    text: str
    redrawn: bool = False


class TrainerProcess(ChildProcess):
    """A started trainer; a context manager that ends all of its processes."""

    def __init__(self, command: str, environment: Mapping[str, str], workdir: Path) -> None:
        self._waiting: queue.Queue[OutputLine] = queue.Queue(_MOST_WAITING)
        self._left = threading.Event()
        super().__init__(command, environment, self._read_lines, workdir)

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._left.set()

    def lines(self, timeout_s: float) -> Iterator[OutputLine]:
        """Lines since the last call, for at most half a second; waits up to ``timeout_s`` for the
        first line."""
        with contextlib.suppress(queue.Empty):
            yield self._waiting.get(timeout=timeout_s)
            turn_ends = time.monotonic() + _TURN_S
            while time.monotonic() < turn_ends:
                yield self._waiting.get_nowait()

    def last_lines(self) -> Iterator[OutputLine]:
        """Remaining lines once it has ended."""
        give_up = time.monotonic() + _LAST_WORDS_S
        while not self.is_read and time.monotonic() < give_up:
            yield from self.lines(0.05)
        while not self._waiting.empty():
            yield from self.lines(0.05)
            if not self.is_read:  # a process that nothing ends continues to print
                return

    def _read_lines(self, output: IO[bytes]) -> None:
        rest = b""
        while chunk := os.read(output.fileno(), 1 << 16):
            *whole, rest = _LINE_END.split(rest + chunk)
            if len(rest) > _LINE_LIMIT:
                whole, rest = [*whole, rest], b""
            for line in whole:
                self._put(line)
        if rest:
            self._put(rest)

    def _put(self, line: bytes) -> None:
        """Hand a line over as soon as the queue has a slot; drop it once nobody reads."""
        found = OutputLine(line.decode(errors="replace").rstrip(), line.endswith(b"\r"))
        while not self._left.is_set():
            try:
                self._waiting.put(found, timeout=0.2)
                break
            except queue.Full:
                continue


class LineReader:
    """Reads lines with a pattern whose groups are ``step``, ``total`` and metrics by name."""

    def __init__(self, pattern: str, start: Progress = _NOTHING) -> None:
        self._pattern = re.compile(pattern)
        self._logged_step = start.done + 1 if start.done else 0
        self.progress = start

    def read(self, line: str) -> dict[str, float] | None:
        """New numbers of the line's step to log; None if it has none of the training. Sets
        :attr:`progress`."""
        match = self._pattern.search(line)
        if match is None:
            return None
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        step, total = (_number(groups.pop(name, "")) for name in ("step", "total"))
        numbers = {name: _number(text) for name, text in groups.items()}
        metrics = {name: value for name, value in numbers.items() if value is not None}
        before = self.progress
        done = before.done if step is None else int(step)
        total = before.total if total is None else int(total)
        self.progress = Progress(done, total, PHASE, {**before.values, **metrics})
        if step is None or done < self._logged_step:
            return {}
        if metrics:
            self._logged_step = done
        return metrics


def _number(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        return float(text.replace(",", "").rstrip("%"))
    return None


class TrainerLog:
    """Lines on their way to the log. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._waiting: deque[str] = deque(maxlen=_MOST_LINES_WAITING)
        self._left_out = self._written = 0

    def write(self, text: str) -> None:
        """Take a line."""
        self._left_out += len(self._waiting) == _MOST_LINES_WAITING
        self._waiting.append(text)
        self.flush()

    def flush(self, *, last: bool = False) -> None:
        """Write waiting lines within the limits; the ``last`` lines are always written."""
        allowed = _AT_ONCE + _EACH_S * (self._clock() - self._began)
        while self._waiting and (last or self._written < allowed):
            line = f"{self._waiting[0]}\n"
            if self._left_out:
                line = f"[{self._left_out:,} lines are left out here]\n{line}"
            try:
                sys.stdout.write(line)
                sys.stdout.flush()
            except OSError:  # a full disk; they wait
                return
            self._written += len(line)
            self._left_out = 0
            self._waiting.popleft()


def error_of(code: int, printed: Sequence[str], output: Path, oom_kills: int = 0) -> Exception:
    """The error to raise; its message contains the trainer's own words.

    Parameters
    ----------
    code
        Exit code as of a shell (128 + signal).
    printed
        The trainer's last lines.
    output
        Its output folder.
    oom_kills
        Number of processes that the kernel killed for lack of memory meanwhile.
    """
    lines = [line.strip() for line in printed if line.strip()][-_LINES:]
    for line in reversed(lines):
        failure = class_of_text(line)
        if failure == "disk_full":
            return no_space_error(output, "the trainer was writing", OSError(line))
        if failure == "out_of_memory":
            return MemoryError(f"The trainer ran out of memory: {line}")
        if failure is not None:  # of the GPU: classification uses the text
            return _failed(code, line, lines)
    # Writers report only a failed write, and a full disk kills writers of a mapped file: a probe
    # decides.
    no_room = any(is_no_space(RuntimeError(line), output) for line in lines[-_SHOWN:])
    if code == 128 + signal.SIGBUS:
        no_room = not has_room(output)
    if no_room:
        return no_space_error(output, "the trainer was writing", OSError(_last(lines)))
    if oom_kills and code in (128 + signal.SIGKILL, 1):
        return MemoryError(f"The kernel killed {oom_kills} processes for lack of memory")
    for line in reversed(lines):
        if _NOT_FINITE.search(line):
            return NotFiniteError(
                f"The trainer gave up on a number: {line}",
                expected="finite losses and gradients",
                fix="lower its learning rate, or look at its data",
            )
    if code in CANNOT_START:
        return ConfigurationError(
            f"The trainer could not be started (exit code {code}): {_last(lines)}",
            expected="a command that can be run where the job runs",
            fix="correct command.run, or command.workdir",
        )
    if code > 128 and code != 128 + signal.SIGINT:
        name = f"signal {code - 128}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(code - 128).name
        return KilledError(
            f"The trainer was ended by {name}; its last line: {_last(lines)}",
            fix="nothing, if that was an accident: the next attempt resumes from its last "
            "checkpoint",
        )
    return _failed(code, _last(lines), lines)


def kernel_oom_kills(root: Path = Path("/")) -> int:
    """Number of processes that the kernel has killed for lack of memory: of our control group if it
    counts them (a neighbour's job on the same node does not concern us), else of this machine.

    Parameters
    ----------
    root
        Parent of ``proc`` and ``sys``.
    """
    for path in (*_counts_of_groups(root), root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _counts_of_groups(root: Path) -> list[Path]:
    """Files with our control group's count, if any: of version 2, then of version 1."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            inside = group.strip("/")
            if not inside:  # the root group has no count of its own
                continue
            if not controllers:
                found.append(root / "sys/fs/cgroup" / inside / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(root / "sys/fs/cgroup/memory" / inside / "memory.oom_control")
    return found


def _failed(code: int, line: str, lines: Sequence[str]) -> ScriptFailed:
    tail = "\n".join(lines[-_SHOWN:])
    error = ScriptFailed(
        f"The trainer ended with exit code {code}: {line}",
        expected="exit code 0",
        fix=f"look at its log (`refiner logs STAGE`). Its last lines:\n{tail}",
    )
    error.signature = hashlib.sha256(line.encode()).hexdigest()[:16]
    return error


def _last(lines: Sequence[str]) -> str:
    """The line that names the error."""
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or list(lines) or ["(it printed nothing)"])[-1]


# ---------------------------------------------------------------- an attempt

_POLL_S = 0.2
#: Longest interval between searches for new checkpoints, seconds.
_SAVES_S = 1.0
_FENCE_S = 5.0
#: Interval of logging a progress bar that redraws itself.
_REDRAW_S = 30.0
#: Space is short when less than this many of the largest checkpoint so far fit.
_ROOM_FOR = 1.1


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
    if not job.workdir.is_dir():
        raise ConfigurationError(
            f"command.workdir {job.workdir} is not a folder here",
            expected="the folder that the trainer starts in, as seen by the job",
            fix="correct command.workdir",
        )
    job.output.mkdir(parents=True, exist_ok=True)
    kill_stale_processes(job.output)
    job.check_fence()
    start = newest_complete(_tidied(job))
    if start is not None:
        before = [n for n in io.stage.attempt_numbers() if n < job.attempt]
        with_metrics = [n for n in before if io.stage.attempt(n).metrics.exists()]
        made_by = (with_metrics or before or [job.attempt])[-1]
        io.go_on_from(CompleteCheckpoint(start.step, made_by, start.path))
    progress, ended_at = Progress(0 if start is None else start.step, 0, PHASE), -1
    while True:
        now = replace(job, checkpoint=None if start is None else start.path)
        loop = _TrainerLoop(now, io, progress)
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
        error = error_of(code, loop.lines, job.output, kills)
        if all(c.damage for c in found):  # no other sign of the size of a save
            loop.io.checkpoints.lost_bytes = sum(signature(c.path)[1] for c in found)
        # The trainer has ended, and half-written files take the space that the outcome needs.
        found = _tidied(job, short=isinstance(error, NoSpaceError))
        loop.log.flush(last=True)
        if isinstance(error, ScriptFailed) and (start := job.checkpoint) is not None:
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
        self._signature = signature(job.output)
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
        text = command_text(job)
        log.info("starting the trainer in %s: %s", job.workdir, text)
        settings = environment(job)
        self.io.progress(self.reader.progress)
        with TrainerProcess(text, settings, job.workdir) as process:
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
            now = signature(self.job.output)
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
        names = frozenset(self.job.output.glob(self.job.command.checkpoints))
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
