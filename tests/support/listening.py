"""Listening sockets of a process tree."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import psutil


class Listening(NamedTuple):
    """A listening socket."""

    pid: int
    address: str
    port: int


def listening(top: int) -> list[Listening]:
    """Listening TCP sockets of a process and its descendants."""
    found = set()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(top)
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                for socket in one.net_connections(kind="tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        found.add(Listening(one.pid, *socket.laddr))
    return sorted(found)


def beyond_loopback(top: int) -> list[Listening]:
    """Listening sockets that other machines reach."""
    return [one for one in listening(top) if one.address not in ("127.0.0.1", "::1")]
