"""Why another trainer ended: from its exit code, its last words, the disk and the kernel.

In: a :class:`Ending`. Out: the error that :func:`infra.jobs.failures.classify` makes the right
class of, with the trainer's own line in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.jobs.failures import class_of_text
from infra.store.room import has_room, is_no_space, no_space_error
from refiner_core.contract.errors import (
    ConfigurationError,
    KilledError,
    NotFiniteError,
    ScriptFailed,
)

#: Lines from the end that are looked at: what went well long before says nothing about the end.
_LINES = 60
_SHOWN = 6
_NOT_FINITE = re.compile(
    r"(FloatingPointError|loss (is|became|was) (nan|inf)|(nan|inf)(inity)? (loss|grad)"
    r"|(loss|gradients?|grad_?norm)\b.{0,40}\b(nan|inf|not finite|non-?finite)\b)",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"^\W*(\[\w+\d*\]:\s*)?[\w.]*(Error|Exception|Killed|Interrupt)\b")
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


class TrainerKilled(KilledError):
    """The trainer was ended from outside, or crashed: another try may well get further."""


@dataclass(frozen=True)
class Ending:
    """How a trainer ended.

    ``code`` is that of a shell (128 + signal), ``lines`` are its last ones, ``oom_kills`` counts
    what the kernel has killed for lack of memory while it ran.
    """

    code: int
    lines: Sequence[str]
    output: Path
    oom_kills: int = 0


def error_of(ending: Ending) -> Exception:
    """The error to raise; the message holds the trainer's own words."""
    lines = [line.strip() for line in ending.lines if line.strip()][-_LINES:]
    for line in reversed(lines):
        failure = class_of_text(line)
        if failure == "disk_full":
            return no_space_error(ending.output, "the trainer was writing", OSError(line))
        if failure == "out_of_memory":
            return MemoryError(f"The trainer ran out of memory: {line}")
        if failure is not None:  # of the GPU: whoever classifies goes by the text
            return _failed(ending, line, lines)
    if _no_room(ending, lines):
        return no_space_error(ending.output, "the trainer was writing", OSError(_last(lines)))
    if ending.oom_kills and ending.code in (128 + signal.SIGKILL, 1):
        return MemoryError(f"The kernel killed {ending.oom_kills} processes for lack of memory")
    for line in reversed(lines):
        if _NOT_FINITE.search(line):
            return NotFiniteError(
                f"The trainer gave up on a number: {line}",
                expected="finite losses and gradients",
                fix="lower its learning rate, or look at its data",
            )
    if ending.code in (_NOT_FOUND, _NOT_RUNNABLE):
        return ConfigurationError(
            f"The trainer could not be started (exit code {ending.code}): {_last(lines)}",
            expected="a command that can be run where the job runs",
            fix="correct command.run, or command.workdir",
        )
    if ending.code > 128 and ending.code != 128 + signal.SIGINT:
        name = _signal_name(ending.code - 128)
        return TrainerKilled(
            f"The trainer was ended by {name}; its last line: {_last(lines)}",
            fix="nothing, if that was an accident: the next attempt goes on from its last "
            "checkpoint",
        )
    return _failed(ending, _last(lines), lines)


def kernel_oom_kills(root: Path = Path("/")) -> int:
    """How many processes the kernel has killed for lack of memory: of our control group, where it
    counts them, for a neighbour's job on the same node is none of ours; else of this machine.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` lie.
    """
    for path in (*_counts_of_groups(root), root / "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _counts_of_groups(root: Path) -> list[Path]:
    """Where our control group's count may stand: of version 2, then of version 1."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            inside = group.strip("/")
            if not inside:  # the root group counts nothing of its own
                continue
            if not controllers:
                found.append(root / "sys/fs/cgroup" / inside / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(root / "sys/fs/cgroup/memory" / inside / "memory.oom_control")
    return found


def _failed(ending: Ending, line: str, lines: Sequence[str]) -> ScriptFailed:
    tail = "\n".join(lines[-_SHOWN:])
    error = ScriptFailed(
        f"The trainer ended with exit code {ending.code}: {line}",
        expected="exit code 0",
        fix=f"look at its log (`refiner logs STAGE`). Its last lines:\n{tail}",
    )
    error.signature = hashlib.sha256(line.encode()).hexdigest()[:16]
    return error


def _no_room(ending: Ending, lines: Sequence[str]) -> bool:
    """Writers that say only that a write failed, and those that a full disk kills (SIGBUS from a
    mapped file): a probe decides."""
    if ending.code == 128 + signal.SIGBUS:
        return not has_room(ending.output)
    return any(is_no_space(RuntimeError(line), ending.output) for line in lines[-_SHOWN:])


def _last(lines: Sequence[str]) -> str:
    """The line that names the error."""
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or list(lines) or ["(it printed nothing)"])[-1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
