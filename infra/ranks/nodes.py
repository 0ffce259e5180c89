"""The other nodes of a job: who waits there, and what the worker has them do.

In, on the first node: a Slurm job of several nodes (:class:`OtherNodes`, in the worker). In, on the
others: the same command, which Slurm has started once per node (:func:`wait_for_work`). Out: each
runs torchrun's agent for its node, and what that prints comes back to the worker.

Nobody starts anything with ``srun`` from inside the job: Slurm sends a request to stop (preemption,
time limit, ``scancel --signal``) to every process of a step, and an ``srun`` among them answers it
by killing all that it has started, before anybody can save. So there is one step with a task on
each node; all but the first wait for the worker's word.

The worker listens on the first node's address; where, and with which key, stands in a file beside
the attempt that only its user can read. When the worker is gone its connections are, and with them
the ranks on all nodes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from infra.foreign.process import TrainerProcess
from infra.host.files import write_private
from infra.host.processes import environment, free_port, node_address
from infra.jobs.signals import SlurmJob
from infra.ranks.agent import ignore_stop_signals
from infra.ranks.bridge import greet, shut
from infra.ranks.settings import node_settings
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.errors import LaunchError

log = logging.getLogger(__name__)

#: Beside an attempt: where its worker listens.
_FILE = "nodes.json"
_POLL_S = 0.5
_LAST_WORDS_S = 15.0
#: More than there are nodes: others on the network knock, too.
_BACKLOG = 512
#: How long the others may take to come: Slurm starts all tasks of a step at once.
_COME_S = 300.0


@dataclass(frozen=True)
class Meeting:
    """Meeting place of torchrun's agents of several nodes; one node needs none."""

    address: str = ""
    port: int = 0
    name: str = ""


def node_number(environment: Mapping[str, str] = os.environ) -> int:
    """Number of the node of its step that this process is on, from 0: 0 outside of Slurm, too."""
    return int(environment.get("SLURM_NODEID") or 0) if "SLURM_JOB_ID" in environment else 0


class OtherNodes:
    """The worker's end; a context manager, after which nothing runs on other nodes.

    Parameters
    ----------
    control
        The attempt's folder of small files, which all nodes see.
    job
        The Slurm job.
    count
        How many other nodes there are.
    """

    def __init__(self, control: Path, job: SlurmJob, count: int) -> None:
        self._path, self._count = control / _FILE, count
        address = node_address()
        self._key = secrets.token_bytes(32)
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._listener.settimeout(_POLL_S)
        self.meeting = Meeting(address, free_port(address), secrets.token_hex(8))
        self._note = {
            "address": address,
            "port": self._listener.getsockname()[1],
            "key": self._key.hex(),
            "job_id": job.id,
            "restart": job.restart,
        }
        self._nodes: dict[int, Connection] = {}
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> OtherNodes:
        temporary = atomic.temporary_name(self._path)
        write_private(temporary, json.dumps(self._note))  # it holds a key
        temporary.replace(self._path)
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
            Not all came.
        """
        self._wait_for_all()
        for node, connection in list(self._nodes.items()):
            _send(connection, {"command": commands[node], "settings": dict(settings)})
            reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
            self._readers.append(reader)
            reader.start()

    def lines(self) -> Iterator[str]:
        """Lines printed elsewhere since the last call."""
        while not self._lines.empty():
            yield self._lines.get_nowait()

    def last_lines(self) -> Iterator[str]:
        """Lines that are left, once this node's ranks have ended: those of others get a moment."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        yield from self.lines()

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + _COME_S
        while len(self._nodes) < self._count:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Only {len(self._nodes)} of the job's {self._count} other nodes came within "
                    f"{_COME_S:.0f} s",
                    expected="a task of the job on every node, which reaches the first node",
                    fix="look at the job's logs in the attempt's `submitit` folder",
                )
            with contextlib.suppress(TimeoutError):
                accepted, _ = self._listener.accept()
                knocked = (Connection(accepted.detach()),)
                threading.Thread(target=self._greet, args=knocked, daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Hear who has connected; in a thread of its own, so that silence holds up nobody else."""
        try:
            greet(connection, self._key)
            hello = _receive(connection)
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("somebody without the key has connected to the worker: %r", error)
            connection.close()
        else:
            log.info("node %s (%s) is ready", hello["node"], hello["host"])
            self._nodes[int(hello["node"])] = connection

    def _read(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while "line" in (told := _receive(connection)):
                self._lines.put(told["line"])
        # Its agent has ended, or it is gone; the connection stays until the worker is done.


# ---------------------------------------------------------------- the others


def wait_for_work(workspace: Workspace, stage_id: str, job: SlurmJob, node: int) -> int:
    """Work on a node other than the first; returns the exit code when the worker is done."""
    ignore_stop_signals()  # the worker hears them, and says when to end
    connection = _connect(workspace, stage_id, job)
    if connection is None:
        return 0
    with connection:
        _send(connection, {"node": node, "host": socket.gethostname()})
        try:
            order = _receive(connection)
        except (EOFError, OSError):
            return 0  # the worker ended before it came to that
        _work(connection, order["command"], order["settings"])
    return 0


def _work(connection: Connection, command: str, settings: Mapping[str, str]) -> None:
    gone = threading.Event()
    watcher = threading.Thread(target=_watch, args=(connection, gone), daemon=True)
    watcher.start()
    own = {**environment(), **node_settings(settings), **settings}
    with TrainerProcess(command, own, Path.cwd()) as process:
        try:
            while process.code is None and not gone.is_set():
                for line in process.lines(_POLL_S):
                    _send(connection, {"line": line.text})
            if not gone.is_set():
                for line in process.last_lines():
                    _send(connection, {"line": line.text})
                _send(connection, {"code": process.code})
        except OSError:
            return  # the worker is gone, and with it what it has asked for
    gone.wait()


def _watch(connection: Connection, gone: threading.Event) -> None:
    """The worker sends nothing more: what comes is its end."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    gone.set()


def _connect(workspace: Workspace, stage_id: str, job: SlurmJob) -> Connection | None:
    """The way to the worker of this start of the job; None where it has ended already."""
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
        time.sleep(_POLL_S)


def _is_of(note: Mapping[str, Any], job: SlurmJob) -> bool:
    return job.is_called(note.get("job_id")) and int(note.get("restart") or 0) == job.restart


# ---------------------------------------------------------------- parts


def _send(connection: Connection, value: Mapping[str, Any]) -> None:
    connection.send_bytes(json.dumps(value).encode())


def _receive(connection: Connection) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(connection.recv_bytes())
    return value
