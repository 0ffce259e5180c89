"""Why ranks ended: of all that failed, the one that failed first.

In: what ranks said before they ended, in the order in which it came, how torchrun saw them end, and
the last lines. Out: the error that the attempt ends with. One rank's failure makes the others fail
a moment later, when they wait for it in vain; these are consequences, and not what a user must
read.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.jobs.failures import class_of_text
from infra.store.room import has_room, no_space_error
from refiner_core.contract.errors import Interrupted, KilledError, LaunchError, StageFailed

#: What a process says whose partner is gone.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|socket (is )?closed|pair closure"
    r"|ncclremoteerror|remote process exited|recvvalue failed|failed to recv|store->|store is down"
    r"|watchdog caught collective operation timeout|timed out waiting \d+ms",
    re.IGNORECASE,
)
_NO_MEETING = re.compile(
    r"eaddrinuse|address already in use|rendezvous\w*error|distnetworkerror|diststoreerror"
    r"|timed out after \d+ seconds waiting for clients",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"^(\[rank \d+\] )?[\w.]*(Error|Exception|Interrupt)\b")
_SHOWN = 6
#: torchrun tells whole seconds. The ranks that it kills itself end later than this after the first.
_AT_ONCE_S = 1
LEAST_SHUTDOWN_S = _AT_ONCE_S + 2


@dataclass
class Ended:
    """What is known of a launch that did not end well.

    ``errors`` are pairs of rank and error, oldest first; ``failures`` torchrun's, by rank
    (``code``, ``pid``, ``late_s``: seconds after the first); ``code`` is how an agent ended.
    """

    errors: list[tuple[int, Exception]] = field(default_factory=list)
    failures: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lines: Sequence[str] = ()
    code: int | None = None
    oom_kills: int = 0
    folder: Path = Path()


def error_of(ended: Ended) -> Exception:
    """The error to raise."""
    killed = [
        (rank, failure)
        for rank, failure in sorted(ended.failures.items())
        if failure["code"] < 0 and failure["late_s"] <= _AT_ONCE_S
    ]
    own = [error for _, error in ended.errors if not is_consequence(error)]
    hard = [(r, f) for r, f in killed if -f["code"] != signal.SIGABRT]
    if hard and not any(isinstance(error, Interrupted) for error in own):
        return _killed(ended, *hard[0])
    for error in sorted(own, key=lambda e: isinstance(e, Interrupted)):  # sorted() keeps the order
        return error
    if killed:  # a library gave up (NCCL's watchdog, a failed check in C++)
        return _aborted(ended, *killed[0])
    if ended.errors:
        return ended.errors[0][1]
    return _unknown(ended)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that somebody else is gone."""
    return bool(_CONSEQUENCE.search(str(error))) and not isinstance(error, KilledError)


def _killed(ended: Ended, rank: int, failure: Mapping[str, Any]) -> Exception:
    number = -failure["code"]
    if number == signal.SIGKILL and ended.oom_kills:
        return MemoryError(f"The kernel killed rank {rank} for lack of memory")
    if number == signal.SIGBUS and not has_room(ended.folder):
        return no_space_error(ended.folder, f"rank {rank} was writing")
    return KilledError(
        f"Rank {rank} (process {failure['pid']}) was ended by {signal.Signals(number).name}",
        expected="all ranks to live until the stage ends",
        fix="nothing, if that was an accident: the next attempt goes on from the last checkpoint",
    )


def _aborted(ended: Ended, rank: int, failure: Mapping[str, Any]) -> Exception:
    prefix = f"[rank {rank}] "
    own = [
        line.removeprefix(prefix)
        for line in ended.lines
        if line.startswith(prefix) or (rank == 0 and not line.startswith("[rank "))
    ]
    spoken = [line for line in own if class_of_text(line) is not None]
    said = (spoken or own or ["it printed nothing"])[-1].strip()
    return KilledError(
        f"Rank {rank} (process {failure['pid']}) gave up (SIGABRT): {said}",
        expected="all ranks to live until the stage ends",
        fix="nothing, if it does not come back: the next attempt goes on from the last checkpoint; "
        "else see `refiner logs STAGE`",
    )


def _unknown(ended: Ended) -> Exception:
    lines = [line.strip() for line in ended.lines if line.strip()]
    named = [line for line in lines if _ERROR_LINE.match(line)]
    last = (named or lines or ["it printed nothing"])[-1]
    if ended.code == 128 + signal.SIGKILL:
        return KilledError(
            "The process that starts the ranks (torchrun) was ended by SIGKILL",
            expected="it to live until the stage ends",
            fix="nothing, if that was an accident: the next attempt goes on from the last "
            "checkpoint",
        )
    if any(_NO_MEETING.search(line) for line in lines):
        return LaunchError(
            f"The ranks did not find each other: {last}",
            expected="nodes that reach each other",
            fix="nothing, if that was an accident: it is tried again; else name the network with "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    shown = "\n".join(lines[-_SHOWN:])
    ranks = ", ".join(f"{rank}: {f['code']}" for rank, f in sorted(ended.failures.items()))
    codes = f"rank {ranks}" if ranks else f"torchrun: {ended.code}"
    return StageFailed(
        f"The ranks ended without a word (exit code of {codes}): {last}",
        expected="ranks that end well, or say why not",
        fix=f"look at the log (`refiner logs STAGE`). Its last lines:\n{shown}",
    )
