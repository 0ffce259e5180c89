"""One run of another trainer as a process: its command, its output, and why it ended.

In: a recipe's ``command`` section, and paths. Out: a text for ``/bin/sh`` and the environment that
the trainer's user would have; its lines as they come, with their progress and metrics; a bounded
log of them; and, from its exit code, last lines, the disk and the kernel, the error that
:func:`infra.jobs.failures.classify` assigns to the right class.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from infra.jobs.failures import class_of_text
from infra.process.child import MARK, ChildProcess
from infra.store.atomic import has_room, is_no_space, no_space_error
from refiner_core.contract.config import PLACEHOLDER, CommandConfig
from refiner_core.contract.errors import (
    ConfigurationError,
    KilledError,
    NotFiniteError,
    ScriptFailed,
)
from refiner_core.contract.types import Progress

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
class TrainerCall:
    """Call of a trainer.

    ``data`` and ``model`` are None if the recipe has none; ``checkpoint`` is None at the first
    start.
    """

    output: Path
    workdir: Path
    seed: int
    stage_id: str
    attempt: int
    data: Path | None = None
    model: str | None = None
    checkpoint: Path | None = None

    def values(self) -> dict[str, str]:
        """Placeholder -> value, without ``resume``; missing values are empty."""
        names = ("output", "workdir", "seed", "data", "model", "checkpoint")
        return {n: "" if (v := getattr(self, n)) is None else str(v) for n in names}


def command_text(config: CommandConfig, call: TrainerCall) -> str:
    """The shell command, with every value quoted."""
    values = {name: shlex.quote(value) for name, value in call.values().items()}
    resume = fill(config.resume_arguments, values) if call.checkpoint is not None else ""
    return fill(config.run, {**values, "resume": resume})


def fill(text: str, values: Mapping[str, str]) -> str:
    """``text`` with ``{name}`` replaced; ``{{`` and ``}}`` are single braces, ``${…}`` stays."""

    def replaced(match: re.Match[str]) -> str:
        if match["name"] is None:
            return match[0][0] if match[0] in ("{{", "}}") else match[0]
        return values.get(match["name"], match[0])

    return PLACEHOLDER.sub(replaced, text)


def without_ours(base: Mapping[str, str], ours: Path | None) -> dict[str, str]:
    """An environment without our worker's settings; its code is in ``ours``."""
    kept = {k: v for k, v in base.items() if k not in OURS and k != "PYTHONPATH"}
    paths = [p for p in base.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ours)]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)} if paths else kept


def environment(
    config: CommandConfig,
    call: TrainerCall,
    ours: Path | None = None,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The trainer's environment.

    ``ours`` is the folder that this worker imports refiner from, which the trainer must not see.
    """
    values = call.values()
    own = (setting.partition("=") for setting in config.env)
    return {
        **without_ours(base, ours),
        "PYTHONUNBUFFERED": "1",
        **{f"REFINER_{name.upper()}": value for name, value in values.items()},
        "REFINER_STAGE": call.stage_id,
        "REFINER_ATTEMPT": str(call.attempt),
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
