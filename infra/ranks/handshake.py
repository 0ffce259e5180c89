"""The first words on a connection between our own processes: who is there, who has the key.

In: a connection that somebody has opened. Out: it is one of ours, or it is refused; one that says
nothing is given up, so that nobody keeps others waiting by silence. Callers greet each connection
in a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

#: How long the other end may take for each of its words, seconds.
PATIENCE_S = 30.0
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def greet(connection: Connection, key: bytes) -> None:
    """Let both ends prove that they have the key, as ``Client(…, authkey=key)`` expects.

    Raises
    ------
    AuthenticationError, EOFError, OSError
        The other end does not, is gone, or says nothing.
    """
    _limit(connection, PATIENCE_S)
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    _limit(connection, 0.0)


def is_own(connection: Connection) -> bool:
    """Whether the process at the other end of a Unix socket is this user's."""
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
