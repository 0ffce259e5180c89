"""The ranks of a stage, from their start to their end, as the worker sees them.

In: a :class:`RanksJob` and the attempt's StageIO. Out: the report that rank 0 has handed in, or the
error of the rank that failed first. While they work their lines go to the attempt's log, and the
attempt's fence is looked at. Requests to stop need nothing here: rank 0 asks the attempt
(``should_stop``), and who wants an end sooner than the next step boundary kills the worker, with
which all ranks end.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.foreign.process import TrainerProcess, kernel_oom_kills
from infra.host.processes import environment
from infra.jobs.failures import class_of_text
from infra.ranks.bridge import Bridge
from infra.ranks.events import MARK, decode, read_event
from infra.ranks.nodes import Meeting, OtherNodes
from infra.ranks.settings import ORDER, rank_settings
from infra.store.atomic import has_room, no_space_error
from refiner_core.contract.errors import Interrupted, KilledError, LaunchError, StageFailed
from refiner_core.contract.placement import Placement
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.ranks import TALK

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

log = logging.getLogger(__name__)
_POLL_S = 0.2
_FENCE_S = 5.0
#: How long what ranks have started (servers) may take to end after them.
_LINGER_S = 10.0
_LINES = 200


@dataclass
class Ended:
    """Traces of a launch that did not end well.

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
    """True if an error only says that somebody else is gone."""
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


@dataclass(frozen=True)
class RanksJob:
    """Ranks to launch.

    ``module`` is what each rank runs (``python -m``), ``order`` what it is told. ``folder`` is
    where the stage writes. ``check_fence`` raises if the attempt is no longer the newest;
    ``shutdown_s`` is how long the other ranks may take to end when one has failed; ``meet`` opens
    the way to the job's other nodes, where it has any.
    """

    placement: Placement
    module: str
    order: Mapping[str, Any]
    folder: Path
    check_fence: Callable[[], None] = lambda: None
    shutdown_s: int = 10
    meet: Callable[[], OtherNodes] | None = None


def run_ranks(job: RanksJob, io: StageIO) -> dict[str, Any]:
    """Launch the ranks and wait for their end.

    Raises
    ------
    RefinerError, Exception
        What the first rank that failed has raised.
    KilledError, MemoryError
        A rank was ended from outside.
    LaunchError
        They did not find each other.
    """
    with ExitStack() as stack:
        bridge = stack.enter_context(Bridge(io))
        nodes = stack.enter_context(job.meet()) if job.meet is not None else None
        io.progress(Progress(0, 0, "starting ranks"))
        ended = _Work(job).until_end(bridge, nodes)
        if bridge.report is None or ended.errors:
            raise error_of(ended)
        for rank, failure in ended.failures.items():
            log.warning("rank %d ended with %s after all was done", rank, failure["code"])
        return bridge.report


def agent_command(job: RanksJob, meeting: Meeting, node: int) -> str:
    """torchrun's agent on one node, as a shell command."""
    placement = job.placement
    arguments = [
        *(f"--nproc-per-node={placement.nproc_per_node}", f"--nnodes={placement.nodes}"),
        *("--max-restarts=0", f"--log-dir={os.devnull}"),  # else it makes an empty one in /tmp
        "--signals-to-handle=SIGQUIT",
        f"--shutdown-timeout={max(LEAST_SHUTDOWN_S, job.shutdown_s)}",
    ]
    if placement.nodes == 1:
        arguments += ["--standalone"]
    else:
        arguments += ["--rdzv-backend=static", f"--rdzv-id={meeting.name}", f"--node-rank={node}"]
        arguments += [f"--master-addr={meeting.address}", f"--master-port={meeting.port}"]
    python = [sys.executable, "-P"]
    rank = ["--no-python", *python, "-u", "-m", job.module]
    return "exec " + shlex.join([*python, "-m", "infra.ranks.agent", *arguments, *rank])


class _Work:
    """The loop around launched ranks."""

    def __init__(self, job: RanksJob) -> None:
        self.job, self.mark = job, secrets.token_hex(16)
        self.lines: deque[str] = deque(maxlen=_LINES)
        self.ended = Ended(lines=self.lines, folder=job.folder)

    def until_end(self, bridge: Bridge, nodes: OtherNodes | None) -> Ended:
        """Start them and wait for the end of all; how they ended."""
        job, ended, placement = self.job, self.ended, self.job.placement
        oom_before = kernel_oom_kills()
        meeting = nodes.meeting if nodes is not None else Meeting()
        order = {**job.order, "placement": asdict(placement)}
        shared = {MARK: self.mark, ORDER: json.dumps(order), TALK: secrets.token_hex(32)}
        commands = [agent_command(job, meeting, node) for node in range(placement.nodes)]
        log.info("starting %d ranks on %d nodes", placement.world, placement.nodes)
        own = {**environment(), **rank_settings(placement), **shared, **bridge.environment}
        if nodes is not None:
            nodes.start(commands, shared)
        deadline, fence_due = float("inf"), time.monotonic() + _FENCE_S
        with TrainerProcess(commands[0], own, Path.cwd()) as process:
            while process.code is None and time.monotonic() < deadline:
                self._take(line.text for line in process.lines(_POLL_S))
                self._take(nodes.lines() if nodes is not None else ())
                if ended.code is not None and deadline == float("inf"):
                    deadline = time.monotonic() + job.shutdown_s + _LINGER_S
                if time.monotonic() >= fence_due:
                    fence_due = time.monotonic() + _FENCE_S
                    job.check_fence()
            code = process.code
            if code is None:
                log.warning("what the ranks have started does not end; it is killed")
                process.kill()
            self._take(line.text for line in process.last_lines())
        ended.code = code if ended.code is None else ended.code
        self._take(nodes.last_lines() if nodes is not None else ())
        ended.oom_kills = kernel_oom_kills() - oom_before
        return ended

    def _take(self, printed: Iterable[str]) -> None:
        for text in printed:
            event = read_event(self.mark, text)
            if event is None:
                self.lines.append(text)
                with suppress(OSError):  # a log on a full disk is no reason to end the training
                    sys.stdout.write(f"{text}\n")
                    sys.stdout.flush()
            elif event["event"] == "error":
                rank = int(event["rank"])
                self.ended.errors.append((rank, decode(event["error"], f"In rank {rank}")))
            elif event["event"] == "ended":
                self.ended.failures |= {int(rank): f for rank, f in event["failures"].items()}
                if int(event["node"]) == 0 or event["failures"]:
                    self.ended.code = 1 if event["failures"] else 0
