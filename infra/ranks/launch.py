"""The ranks of a stage, from start to end, as the worker sees them, on all nodes of a job.

In: the ranks' order and the attempt's StageIO. Out: rank 0's report, or the error of the rank that
failed first: one rank's failure makes the others fail a moment later, when they wait for it in
vain; users need not read these consequences. While ranks run, their lines go to the attempt's log,
and the attempt's fence is checked. Requests to stop need nothing here: rank 0 asks the attempt
(``should_stop``), and to end it before the next step boundary, the worker is killed, with which all
ranks end.

In a Slurm job of several nodes the worker is on the first (:class:`OtherNodes`), and Slurm has
started the same command once on each of the others (:func:`wait_for_work`), where it runs
the node's agent; the agent's output comes back to the worker. Nothing is started with ``srun``
inside the job: Slurm sends a request to stop (preemption, time limit, ``scancel --signal``) to
every process of a step, and an ``srun`` among them answers by killing its processes before they can
save. So there is one step with a task on each node; all but the first wait for the worker. The
worker listens on the first node's address; the address and the key are in a file beside the attempt
that only its user can read. When the worker is gone, so are its connections, and with them the
ranks on all nodes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from infra.attempt.rank_watch import RankWatch
from infra.external.process import TrainerProcess, kernel_oom_kills
from infra.host.processes import environment, free_port, node_address
from infra.jobs.failures import class_of_text
from infra.jobs.signals import SlurmJob
from infra.process.stacks import stacks_of
from infra.ranks.agent import ignore_stop_signals
from infra.ranks.bridge import Bridge, accept_nodes, receive, send, shut
from infra.ranks.messages import (
    MARK,
    ORDER,
    decode,
    event_line,
    node_settings,
    rank_settings,
    read_event,
)
from infra.store import atomic
from infra.store.atomic import has_room, no_space_error
from infra.store.workspace import Workspace
from refiner_core.contract.errors import (
    Interrupted,
    KilledError,
    LaunchError,
    NodeLost,
    RanksDisagree,
    StageFailed,
    in_rank,
)
from refiner_core.contract.placement import Placement
from refiner_core.contract.types import Progress, StageIO
from refiner_core.training.ranks import TALK

log = logging.getLogger(__name__)

#: File beside an attempt with its worker's address.
_FILE = "nodes.json"
_WAIT_S = 0.5
_LAST_WORDS_S = 15.0
#: More than the number of nodes: other clients on the network connect, too.
_BACKLOG = 512
#: Limit of waiting for the other nodes, seconds: Slurm starts all tasks of a step at once.
_COME_S = 300.0


#: Messages of a process whose partner is gone.
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
_SHOWN = 6
#: The end of a rank later than this after a first failure is a consequence.
_AT_ONCE_S = 1.0
_POLL_S = 0.2
_FENCE_S = 5.0
#: Limit for children of ranks (servers) to end after them, seconds.
_LINGER_S = 10.0
_LINES = 200
#: Limit of a rank's stacks in an event, characters.
_STACKS_LIMIT = 30_000


def node_number(environment: Mapping[str, str] = os.environ) -> int:
    """Index of this process's node within its step, from 0; 0 outside of Slurm."""
    return int(environment.get("SLURM_NODEID") or 0) if "SLURM_JOB_ID" in environment else 0


class OtherNodes:
    """The worker's end; a context manager that leaves nothing running on other nodes.

    Parameters
    ----------
    control
        The attempt's folder of small files, visible to all nodes.
    job
        The Slurm job.
    count
        Number of other nodes.
    """

    def __init__(self, control: Path, job: SlurmJob, count: int) -> None:
        self._path, self._count = control / _FILE, count
        address = node_address()
        self._key = secrets.token_bytes(32)
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        #: Address of rank 0.
        self.meeting = f"{address}:{free_port(address)}"
        self._note = {
            "address": address,
            "port": self._listener.getsockname()[1],
            "key": self._key.hex(),
            "job_id": job.id,
            "restart": job.restart,
        }
        self._nodes: dict[int, Connection] = {}
        #: Names of nodes whose connection ended before their agent had, by number.
        self.lost: dict[int, str] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> OtherNodes:
        note = json.dumps(self._note).encode()
        atomic.write_bytes(self._path, note, mode=0o600)  # it contains a key
        return self

    def __exit__(self, *_: object) -> None:
        atomic.remove_quietly(self._path)
        for connection in self._nodes.values():
            shut(connection)
        for reader in self._readers:
            reader.join(_LAST_WORDS_S)
        self._listener.close()

    def start(self, commands: Sequence[str], settings: Mapping[str, str]) -> None:
        """Have every node run its command, by its number; the first is the worker's own.

        Raises
        ------
        LaunchError
            Not all nodes connected.
        """
        joined = accept_nodes(self._listener, self._key, self._count, _COME_S)
        for node, (connection, hello) in joined.items():
            log.info("node %d (%s) is ready", node, hello["host"])
            self._nodes[node] = connection
            send(connection, {"command": commands[node], "settings": dict(settings)})
            values = (connection, node, str(hello["host"]))
            reader = threading.Thread(target=self._read, args=values, daemon=True)
            self._readers.append(reader)
            reader.start()

    def ask_stacks(self, processes: Mapping[int, int]) -> None:
        """Have the other nodes send the stacks of ranks, by rank and process number; they come
        among the lines."""
        for connection in list(self._nodes.values()):
            with suppress(OSError):  # a node that is gone sends nothing
                send(connection, {"stacks": processes})

    def lines(self) -> Iterator[str]:
        """Lines printed elsewhere since the last call."""
        while not self._lines.empty():
            yield self._lines.get_nowait()

    def last_lines(self) -> Iterator[str]:
        """Remaining lines once this node's ranks have ended: other nodes' get a moment."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        yield from self.lines()

    def _read(self, connection: Connection, node: int, host: str) -> None:
        try:
            while "line" in (message := receive(connection)):
                self._lines.put(message["line"])
        except (EOFError, OSError):
            self.lost[node] = host  # unless the worker itself has ended the connection
        # Its agent has ended, or is gone; the connection stays until the worker is done.


# ---------------------------------------------------------------- the others


def wait_for_work(workspace: Workspace, stage_id: str, job: SlurmJob, node: int) -> int:
    """Work on a node other than the first; returns the exit code when the worker is done."""
    ignore_stop_signals()  # the worker handles them, and ends this process
    connection = _connect(workspace, stage_id, job)
    if connection is None:
        return 0
    with connection:
        send(connection, {"node": node, "host": job.node})
        try:
            order = receive(connection)
        except (EOFError, OSError):
            return 0  # the worker ended before it sent any work
        _work(connection, order["command"], order["settings"])
    return 0


def _work(connection: Connection, command: str, settings: Mapping[str, str]) -> None:
    gone = threading.Event()
    stacks: queue.SimpleQueue[str] = queue.SimpleQueue()
    watched = (connection, gone, settings[MARK], stacks)
    watcher = threading.Thread(target=_watch, args=watched, daemon=True)
    watcher.start()
    own = {**environment(), **node_settings(settings), **settings}
    with TrainerProcess(command, own, Path.cwd()) as process:
        try:
            while process.code is None and not gone.is_set():
                for line in process.lines(_WAIT_S):
                    send(connection, {"line": line.text})
                while not stacks.empty():
                    send(connection, {"line": stacks.get_nowait()})
            if not gone.is_set():
                for line in process.last_lines():
                    send(connection, {"line": line.text})
                send(connection, {"code": process.code})
        except OSError:
            return  # the worker is gone, and its request with it
    gone.wait()


def _watch(
    connection: Connection, gone: threading.Event, mark: str, found: queue.SimpleQueue[str]
) -> None:
    """Wait for the end of the connection; collect the stacks of ranks when the worker asks for
    them."""
    with contextlib.suppress(EOFError, OSError):
        while processes := receive(connection).get("stacks"):
            ranks = {int(pid): rank for rank, pid in processes.items()}
            for pid, text in stacks_of(ranks).items():
                event = {"event": "stacks", "rank": ranks[pid], "text": text[:_STACKS_LIMIT]}
                found.put(event_line(mark, event))
    gone.set()


def _connect(workspace: Workspace, stage_id: str, job: SlurmJob) -> Connection | None:
    """Connection to the worker of this start of the job; None if it has ended already."""
    stage = workspace.layout.stage(stage_id)
    while True:
        for number in reversed(stage.attempt_numbers()):
            paths = stage.attempt(number)
            note = atomic.read_json(paths.control / _FILE)
            if note is not None and _is_of(note, job):
                with contextlib.suppress(OSError, EOFError, AuthenticationError):
                    key = bytes.fromhex(note["key"])
                    return Client((note["address"], note["port"]), "AF_INET", authkey=key)
            started = workspace.read_control(paths.started)
            if started is not None and _is_of(started, job) and paths.outcome.exists():
                return None
        if stage.result.exists():
            return None
        time.sleep(_WAIT_S)


def _is_of(note: Mapping[str, Any], job: SlurmJob) -> bool:
    return job.is_called(note.get("job_id")) and int(note.get("restart") or 0) == job.restart


# ---------------------------------------------------------------- parts


@dataclass
class LaunchFailure:
    """Traces of a failed launch.

    ``errors`` are pairs of rank and error, oldest first; ``failures`` the agents', by rank, oldest
    first (``code``, ``pid``, ``late_s`` after the first); ``lines`` the last lines of output;
    ``code`` is an agent's exit code; ``lost`` are the names of nodes that are gone, by first rank.
    """

    errors: list[tuple[int, Exception]] = field(default_factory=list)
    failures: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES))
    code: int | None = None
    oom_kills: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)
    folder: Path = Path()
    watch: RankWatch = field(default_factory=RankWatch)

    def take(self, mark: str, printed: Iterable[str]) -> None:
        """Collect the events among lines, and pass the others on to the log."""
        for text in printed:
            event = read_event(mark, text)
            if event is None:
                self.lines.append(text)
                with suppress(OSError):  # a full disk of the log must not end the training
                    sys.stdout.write(f"{text}\n")
                    sys.stdout.flush()
            elif event["event"] == "error":
                rank = int(event["rank"])
                error = {"rank": rank, **event["error"]}
                self.errors.append((rank, decode(error, f"In rank {rank}")))
            elif event["event"] in ("beat", "stacks"):
                self.watch.take(event)
            elif event["event"] == "ended":
                self.failures |= {int(rank): f for rank, f in event["failures"].items()}
                if int(event["node"]) == 0 or event["failures"]:
                    self.code = 1 if event["failures"] else 0


def error_of(ended: LaunchFailure) -> Exception:
    """The error to raise."""
    failures = ended.failures.items()
    killed = [(rank, f) for rank, f in failures if f["code"] < 0 and f["late_s"] <= _AT_ONCE_S]
    own = [error for _, error in ended.errors if not is_consequence(error)]
    hard = [(r, f) for r, f in killed if -f["code"] != signal.SIGABRT]
    if hard and not any(isinstance(error, Interrupted) for error in own):
        return in_rank(_killed(ended, *hard[0]), hard[0][0])
    for error in sorted(own, key=lambda e: isinstance(e, Interrupted)):  # sorted() keeps the order
        return error
    for rank, host in ended.lost.items():
        error = NodeLost(
            f"Node {host} of the job is gone: its connection ended without a last message",
            expected="all nodes to live until the stage ends",
            fix="nothing: the next attempt avoids it, and resumes from the last checkpoint",
        )
        return in_rank(error, rank)
    if killed:  # a library aborted (NCCL's watchdog, a failed check in C++)
        return in_rank(_killed(ended, *killed[0]), killed[0][0])
    spoke = {rank for rank, _ in ended.errors}
    if ended.errors and all(rank in spoke for rank in ended.failures):
        return ended.errors[0][1]
    return _unknown(ended, [rank for rank in ended.failures if rank not in spoke])


def is_consequence(error: BaseException) -> bool:
    """True if an error only means that a partner is gone, or does something else."""
    if isinstance(error, RanksDisagree):
        return True
    return bool(_CONSEQUENCE.search(str(error))) and not isinstance(error, KilledError)


def _killed(ended: LaunchFailure, rank: int, failure: Mapping[str, Any]) -> Exception:
    number = -failure["code"]
    if number == signal.SIGKILL and ended.oom_kills:
        return MemoryError(f"The kernel killed rank {rank} for lack of memory")
    if number == signal.SIGBUS and not has_room(ended.folder):
        return no_space_error(ended.folder, f"rank {rank} was writing")
    spoken = [line for line in ended.lines if class_of_text(line) is not None]
    gave_up = number == signal.SIGABRT and spoken
    said = f"gave up (SIGABRT): {spoken[-1].strip()}" if gave_up else ""
    return KilledError(
        f"Rank {rank} (process {failure['pid']}) "
        + (said or f"was ended by {signal.Signals(number).name}"),
        expected="all ranks to live until the stage ends",
        fix="nothing, if that was an accident: the next attempt resumes from the last checkpoint; "
        "else see `refiner logs STAGE`",
    )


def _unknown(ended: LaunchFailure, silent: Sequence[int] = ()) -> Exception:
    """The error for an end without a message of its own; ``silent`` are the ranks that sent
    none."""
    lines = [line.strip() for line in ended.lines if line.strip()]
    last = (lines or ["it printed nothing"])[-1]
    if ended.code == 128 + signal.SIGKILL:
        return KilledError(
            "The process that starts the ranks was ended by SIGKILL",
            expected="it to live until the stage ends",
            fix="nothing, if that was an accident: the next attempt resumes from the last "
            "checkpoint",
        )
    if any(_NO_MEETING.search(line) for line in lines):
        return LaunchError(
            f"The ranks did not find each other: {last}",
            expected="nodes that can reach each other",
            fix="nothing, if that was an accident: it is tried again; else name the network with "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    shown = "\n".join(lines[-_SHOWN:])
    failures = {r: f for r, f in ended.failures.items() if r in silent} or ended.failures
    ranks = ", ".join(f"{rank}: {f['code']}" for rank, f in sorted(failures.items()))
    codes = f"rank {ranks}" if ranks else f"their agent: {ended.code}"
    error = StageFailed(
        f"The ranks ended without a message (exit code of {codes}): {last}",
        expected="ranks that end well, or with an error message",
        fix=f"look at the log (`refiner logs STAGE`). Its last lines:\n{shown}",
    )
    return in_rank(error, next(iter(failures))) if failures else error


def run_ranks(
    placement: Placement,
    module: str,
    order: Mapping[str, Any],
    io: StageIO,
    folder: Path,
    *,
    check_fence: Callable[[], None] = lambda: None,
    shutdown_s: int = 10,
    nodes: OtherNodes | None = None,
    watch: RankWatch | None = None,
) -> dict[str, Any]:
    """Launch the ranks and wait for their end.

    Parameters
    ----------
    module, order
        Module that each rank runs (``python -m``), and its order.
    folder
        Output folder of the stage.
    check_fence
        Raises if the attempt is no longer the newest.
    shutdown_s
        Limit for the other ranks to end when one has failed, seconds.
    nodes
        The job's other nodes, if any.
    watch
        Takes the ranks' signs of life.

    Raises
    ------
    RefinerError, Exception
        The error of the first rank that failed.
    KilledError, MemoryError
        A rank was ended from outside.
    LaunchError
        The ranks did not find each other.
    """
    with ExitStack() as stack:
        bridge = stack.enter_context(Bridge(io))
        stack.enter_context(nodes or nullcontext())
        io.progress(Progress(0, 0, "starting ranks"))
        watch = watch or RankWatch()
        watch.start()
        ended, mark = LaunchFailure(folder=folder, watch=watch), secrets.token_hex(16)
        meet_at = "" if nodes is None else nodes.meeting
        common = {"placement": asdict(placement), "meet": meet_at, "patience_s": shutdown_s}
        text = json.dumps({**order, **common})
        shared = {MARK: mark, ORDER: text, TALK: secrets.token_hex(32)}
        commands = [agent_command(module, node) for node in range(placement.nodes)]
        log.info("starting %d ranks on %d nodes", placement.world, placement.nodes)
        own = {**environment(), **rank_settings(placement), **shared, **bridge.environment}
        if nodes is not None:
            nodes.start(commands, shared)
            watch.ask_elsewhere = nodes.ask_stacks
        oom_before = kernel_oom_kills()
        with TrainerProcess(commands[0], own, Path.cwd()) as process:
            _follow(process, ended, mark, nodes, check_fence, shutdown_s)
        ended.code = process.code if ended.code is None else ended.code
        ended.take(mark, nodes.last_lines() if nodes is not None else ())
        ended.oom_kills = kernel_oom_kills() - oom_before
        lost = {} if nodes is None else nodes.lost
        ended.lost = {node * placement.nproc_per_node: host for node, host in lost.items()}
        if bridge.report is None or ended.errors:
            raise error_of(ended)
        for rank, failure in ended.failures.items():
            log.warning("rank %d ended with %s after all work was done", rank, failure["code"])
        return bridge.report


def agent_command(module: str, node: int) -> str:
    """The agent of one node, as a shell command."""
    words = [sys.executable, "-P", "-m", "infra.ranks.agent", str(node), module]
    return "exec " + shlex.join(words)


def _follow(
    process: TrainerProcess,
    ended: LaunchFailure,
    mark: str,
    nodes: OtherNodes | None,
    check_fence: Callable[[], None],
    shutdown_s: int,
) -> None:
    """Take the output of ranks until all have ended."""
    deadline, fence_due = float("inf"), time.monotonic() + _FENCE_S
    while process.code is None and time.monotonic() < deadline:
        ended.take(mark, (line.text for line in process.lines(_POLL_S)))
        ended.take(mark, nodes.lines() if nodes is not None else ())
        if ended.code is not None and deadline == float("inf"):
            deadline = time.monotonic() + shutdown_s + _LINGER_S
        if time.monotonic() >= fence_due:
            fence_due = time.monotonic() + _FENCE_S
            check_fence()
    if process.code is None:
        log.warning("children of the ranks do not end; they are killed")
        process.end()
    ended.take(mark, (line.text for line in process.last_lines()))
