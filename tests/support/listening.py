"""Sockets of a process tree that others may connect to."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import psutil


class Listening(NamedTuple):
    """One of them."""

    pid: int
    address: str
    port: int


def listening(top: int) -> list[Listening]:
    """TCP sockets on which a process and all that it has started listen."""
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
    """Those of them that other machines reach."""
    return [one for one in listening(top) if one.address not in ("127.0.0.1", "::1")]
