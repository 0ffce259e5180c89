"""Rank 0's connection to its attempt: the StageIO protocol between two processes of one node.

In: the attempt's :class:`~refiner_core.contract.types.StageIO`, in the worker (:class:`Bridge`).
Out: the same protocol in rank 0 (:class:`RemoteIO`), for several threads at once: every thread has
a connection of its own, so that a save of minutes blocks no other thread. Exceptions of the attempt
are raised in rank 0, and errors of rank 0 while it writes a checkpoint reach the store.

The socket has no name in the file system, so that nothing is left of it. All users of the machine
can connect: a client has to be a process of this user, and to have a random key, which travels in
the environment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

from infra.ranks.messages import decode, encode
from refiner_core.contract.errors import KilledError, LaunchError, NoSpaceError
from refiner_core.contract.types import StageIO

#: Limit of waiting for each message of the other end, seconds.
PATIENCE_S = 30.0
_ACCEPT_S = 0.2
_CREDENTIALS = struct.Struct("3i")  # process, user, group

log = logging.getLogger(__name__)
#: Settings of rank 0: the attempt's address, and the key. The name marks it as a secret.
ADDRESS, KEY = "REFINER_RANKS_ADDRESS", "REFINER_RANKS_TOKEN"
#: Limit of a running call when everything else has ended: a commit is completed, a wait for space
#: is not.
_END_S = 60.0
#: Calls that are passed to the attempt unchanged.
_PLAIN = (
    *("log_metrics", "save_rollouts", "latest_checkpoint", "pass_over"),
    *("keep_checkpoints", "progress", "should_stop"),
)


def greet(connection: Connection, key: bytes) -> None:
    """Authenticate both ends by the key, as ``Client(…, authkey=key)`` expects.

    Raises
    ------
    AuthenticationError, EOFError, OSError
        The other end does not have it, is gone, or is silent.
    """
    _limit(connection, PATIENCE_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    _limit(connection, 0.0)


def send(connection: Connection, value: Mapping[str, Any]) -> None:
    """Send a JSON value."""
    connection.send_bytes(json.dumps(value).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """The next JSON value."""
    value: dict[str, Any] = json.loads(connection.recv_bytes())
    return value


def accept_nodes(
    listener: socket.socket, key: bytes, count: int, limit_s: float
) -> dict[int, tuple[Connection, dict[str, Any]]]:
    """Connections of a job's other nodes by number, each with its first message; clients without
    the key are turned away.

    Raises
    ------
    LaunchError
        Not all came within the limit.
    """
    found: dict[int, tuple[Connection, dict[str, Any]]] = {}

    def answer(connection: Connection) -> None:
        try:
            greet(connection, key)
            hello = receive(connection)
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("a client without the key has connected to the first node: %r", error)
            connection.close()
        else:
            found[int(hello["node"])] = (connection, hello)

    listener.settimeout(_ACCEPT_S)
    deadline = time.monotonic() + limit_s
    while len(found) < count:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Only {len(found)} of the job's {count} other nodes connected in {limit_s:.0f} s",
                expected="a task of the job on every node, which can reach the first node",
                fix="see the stage's log (`refiner logs STAGE`), and the job's in the attempt's "
                "`submitit` folder",
            )
        with suppress(TimeoutError):
            accepted, _ = listener.accept()
            # A silent client must not delay the others.
            client = (Connection(accepted.detach()),)
            threading.Thread(target=answer, args=client, daemon=True).start()
    return found


def is_own(connection: Connection) -> bool:
    """True if the process at the other end of a Unix socket is this user's."""
    with _socket(connection) as other:
        raw = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


def shut(connection: Connection) -> None:
    """Wake the thread that reads from it; it closes the connection itself."""
    with contextlib.suppress(OSError), _socket(connection) as other:
        other.shutdown(socket.SHUT_RDWR)


def _limit(connection: Connection, seconds: float) -> None:
    """End reads and writes with an error after this time; 0 for never."""
    whole, part = divmod(seconds, 1.0)
    value = struct.pack("ll", int(whole), int(part * 1e6))
    with _socket(connection) as other:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            other.setsockopt(socket.SOL_SOCKET, option, value)


def _socket(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class Bridge:
    """The attempt's end; a context manager.

    Attributes
    ----------
    report
        Rank 0's report when it was done; None before that.
    """

    def __init__(self, io: StageIO) -> None:
        self._io = io
        self._key = secrets.token_bytes(32)
        self._address = f"\0refiner-ranks-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = Listener(self._address, "AF_UNIX", backlog=16)
        self._lock, self._closed = threading.Lock(), False
        self._open: dict[str, AbstractContextManager[Path]] = {}
        self._connections: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self.report: dict[str, Any] | None = None
        self._calls: Mapping[str, Callable[..., Any]] = {
            **{name: getattr(io, name) for name in _PLAIN},
            "room_again": lambda value: io.room_again(decode(value)),  # type: ignore[arg-type]
            "enter": self._enter,
            "leave": self._leave,
            "finish": lambda report: setattr(self, "report", report),
        }

    @property
    def environment(self) -> dict[str, str]:
        """Settings for rank 0. Not for command lines or files that others read."""
        return {ADDRESS: self._address.replace("\0", "@", 1), KEY: self._key.hex()}

    def __enter__(self) -> Bridge:
        self._start(self._accept, "ranks-bridge")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all service, and remove incomplete checkpoints."""
        self._closed = True
        with suppress(OSError):
            Client(self._address, "AF_UNIX").close()  # wakes the accepting thread
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                shut(connection)
        deadline = time.monotonic() + _END_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        for step in list(self._open):
            gone = KilledError("Rank 0 ended before its checkpoint was complete")
            with suppress(Exception):  # the store has cleaned up; the rank's own error matters more
                self._open.pop(step).__exit__(KilledError, gone, None)

    # ------------------------------------------------------------ serving

    def _start(self, target: Callable[..., None], name: str, *args: Any) -> None:
        thread = threading.Thread(target=target, name=name, args=args, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            if self._closed or not is_own(connection):
                connection.close()
                continue
            with self._lock:
                self._connections.add(connection)
            self._start(self._serve, "ranks-bridge-call", connection)

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                greet(connection, self._key)
            except (AuthenticationError, EOFError, OSError) as error:
                log.warning("a client without the key connected to the ranks' bridge: %r", error)
                self._forget(connection)
                return
            while not self._closed:
                try:
                    name, args = connection.recv()
                except (EOFError, OSError):
                    break
                try:
                    answer = (True, self._calls[name](*args))
                except BaseException as error:
                    answer = (False, encode(error))
                try:
                    connection.send(answer)
                except OSError:
                    break
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    # ------------------------------------------------------------ special calls

    def _enter(self, token: str, step: int) -> Path:
        context = self._io.new_checkpoint(step)
        folder = context.__enter__()
        self._open[token] = context
        return folder

    def _leave(self, token: str, error: dict[str, Any] | None) -> bool:
        context = self._open.pop(token)
        if error is None:
            context.__exit__(None, None, None)
            return True
        met = decode(error, "In rank 0")
        try:
            context.__exit__(type(met), met, met.__traceback__)
        except BaseException as raised:
            if raised is not met:
                raise
        return False


class RemoteIO:
    """Rank 0's end: a StageIO. Raises :class:`KilledError` if the attempt's worker is gone."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._own = threading.local()

    @classmethod
    def from_environment(cls) -> RemoteIO:
        """The bridge in this process's environment; the key is removed there, so that rank 0's
        children do not get it."""
        address = os.environ[ADDRESS].replace("@", "\0", 1)
        return cls(address, bytes.fromhex(os.environ.pop(KEY)))

    def __getattr__(self, name: str) -> Any:
        """Pass a call to the attempt unchanged."""
        if name not in _PLAIN:
            raise AttributeError(name)
        return partial(self._call, name)

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write into; the store is in the worker."""
        token = secrets.token_hex(8)
        folder: Path = self._call("enter", token, step)
        try:
            yield folder
        except BaseException as error:
            self._call("leave", token, encode(error))
            raise
        self._call("leave", token, None)

    def room_again(self, error: NoSpaceError) -> bool:
        """Wait a while for space."""
        return bool(self._call("room_again", encode(error)))

    def finish(self, report: Mapping[str, Any]) -> None:
        """Hand in the stage's report."""
        self._call("finish", dict(report))

    def _call(self, name: str, *args: Any) -> Any:
        try:
            connection = self._connection()
            connection.send((name, args))
            good, value = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise KilledError(
                "The worker of this attempt is gone",
                fix="nothing: the next attempt resumes from the last checkpoint",
            ) from error
        if not good:
            raise decode(value, "In the attempt's worker")
        return value

    def _connection(self) -> Connection:
        known: Connection | None = getattr(self._own, "connection", None)
        if known is None:
            known = Client(self._address, "AF_UNIX", authkey=self._key)
            self._own.connection = known
        return known
