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
import secrets
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.foreign.endings import kernel_oom_kills
from infra.foreign.process import TrainerProcess
from infra.host.environment import environment
from infra.ranks.bridge import Bridge
from infra.ranks.endings import LEAST_SHUTDOWN_S, Ended, error_of
from infra.ranks.errors import decode
from infra.ranks.events import MARK, read_event
from infra.ranks.nodes import Meeting, OtherNodes
from infra.ranks.settings import ORDER, rank_settings
from refiner_core.contract.placement import Placement
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.ranks import TALK

log = logging.getLogger(__name__)

_POLL_S = 0.2
_FENCE_S = 5.0
#: How long what ranks have started (servers) may take to end after them.
_LINGER_S = 10.0
_LINES = 200


@dataclass(frozen=True)
class RanksJob:
    """What to launch.

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
        at_work = _AtWork(job, secrets.token_hex(16))
        io.progress(Progress(0, 0, "starting ranks"))
        at_work.run(bridge, nodes)
        if bridge.report is None or at_work.ended.errors:
            raise error_of(at_work.ended)
        for rank, failure in at_work.ended.failures.items():
            log.warning("rank %d ended with %s after all was done", rank, failure["code"])
        return bridge.report


def agent_command(job: RanksJob, meeting: Meeting, node: int) -> str:
    """torchrun's agent on one node, as a shell command."""
    placement = job.placement
    arguments = [
        *(f"--nproc-per-node={placement.nproc_per_node}", f"--nnodes={placement.nodes}"),
        *(
            *("--max-restarts=0", f"--log-dir={os.devnull}"),  # else it makes an empty one in /tmp
            "--signals-to-handle=SIGQUIT",
            f"--shutdown-timeout={max(LEAST_SHUTDOWN_S, job.shutdown_s)}",
        ),
    ]
    if placement.nodes == 1:
        arguments += ["--standalone"]
    else:
        arguments += [
            *("--rdzv-backend=static", f"--rdzv-id={meeting.name}", f"--node-rank={node}"),
            *(f"--master-addr={meeting.address}", f"--master-port={meeting.port}"),
        ]
    python = [sys.executable, "-P"]
    rank = ["--no-python", *python, "-u", "-m", job.module]
    return "exec " + shlex.join([*python, "-m", "infra.ranks.agent", *arguments, *rank])


@dataclass
class _AtWork:
    """The loop around launched ranks."""

    job: RanksJob
    mark: str
    ended: Ended = field(default_factory=Ended)

    def run(self, bridge: Bridge, nodes: OtherNodes | None) -> None:
        """Start them and wait for the end of all."""
        job, oom_before = self.job, kernel_oom_kills()
        meeting = nodes.meeting if nodes is not None else Meeting()
        order = {**job.order, "placement": asdict(job.placement)}
        shared = {MARK: self.mark, ORDER: json.dumps(order), TALK: secrets.token_hex(32)}
        lines: deque[str] = deque(maxlen=_LINES)
        self.ended = Ended(lines=lines, folder=job.folder)
        text = agent_command(job, meeting, 0)
        log.info("starting %d ranks on %d nodes", job.placement.world, job.placement.nodes)
        own = {**environment(), **rank_settings(job.placement), **shared, **bridge.environment}
        if nodes is not None:
            nodes.start(
                [agent_command(job, meeting, node) for node in range(job.placement.nodes)],
                shared,
            )
        deadline, fence_due = float("inf"), time.monotonic() + _FENCE_S
        with TrainerProcess(text, own, Path.cwd()) as process:
            while process.code is None and time.monotonic() < deadline:
                for line in process.lines(_POLL_S):
                    self._take(line.text, lines)
                if nodes is not None:
                    for told in nodes.lines():
                        self._take(told, lines)
                if self.ended.code is not None and deadline == float("inf"):
                    deadline = time.monotonic() + job.shutdown_s + _LINGER_S
                if time.monotonic() >= fence_due:
                    fence_due = time.monotonic() + _FENCE_S
                    job.check_fence()
            code = process.code
            if code is None:
                log.warning("what the ranks have started does not end; it is killed")
                process.kill()
            for line in process.last_lines():
                self._take(line.text, lines)
        if self.ended.code is None:
            self.ended.code = code
        if nodes is not None:
            for told in nodes.last_lines():
                self._take(told, lines)
        self.ended.oom_kills = kernel_oom_kills() - oom_before

    def _take(self, text: str, lines: deque[str]) -> None:
        event = read_event(self.mark, text)
        if event is None:
            lines.append(text)
            with suppress(OSError):  # a log on a full disk is no reason to end the training
                sys.stdout.write(text + "\n")
                sys.stdout.flush()
        elif event["event"] == "error":
            rank = int(event["rank"])
            self.ended.errors.append((rank, decode(event["error"], f"In rank {rank}")))
        elif event["event"] == "ended":
            self.ended.failures |= {int(rank): f for rank, f in event["failures"].items()}
            if int(event["node"]) == 0 or event["failures"]:
                self.ended.code = 1 if event["failures"] else 0
