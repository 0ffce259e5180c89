"""The processes that listen at a port of this machine: ours, or somebody else's.

In: a port, and the process whose descendants should listen there. Out: whether they do. A port that
was free when a server was told to take it may be another user's by the time the server comes to
that, and whoever has it is sent what is meant for the server.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

Holder = Literal["nobody", "ours", "another"]
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"


def holder_of(port: int, top: int, *, by_daemon: bool = False) -> Holder:
    """The holder of a port: ``ours`` where all who listen there descend from process ``top``.

    ``by_daemon`` is for servers that a container's daemon starts (docker): they descend from
    nothing of ours, and it is enough that they are this user's or root's.
    """
    if not _TABLES[0].exists():  # another system than Linux tells only of what one has started
        return "ours" if _listen(_family(top), port) else "nobody"
    sockets = _listening(port)
    if not sockets:
        return "nobody"
    own = _open_in(_family(top))
    others = {uid for inode, uid in sockets.items() if inode not in own}
    return "ours" if not others or (by_daemon and others <= {0, os.getuid()}) else "another"


def _listening(port: int) -> dict[int, int]:
    """Sockets that listen at a port, on any address: their numbers, and whose they are."""
    found = {}
    for table in _TABLES:
        with suppress(FileNotFoundError):  # no IPv6
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                at = int(fields[1].rpartition(":")[2], 16)
                if (at, fields[3]) == (port, _LISTENS):
                    found[int(fields[9])] = int(fields[7])
    return found


def _family(top: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(top)
        return [process, *process.children(recursive=True)]
    return []


def _open_in(processes: list[psutil.Process]) -> set[int]:
    """Numbers of the sockets that processes have open."""
    found = set()
    for process in processes:
        with suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    kind, _, number = str(entry.readlink()).partition(":[")
                    if kind == "socket":
                        found.add(int(number.rstrip("]")))
    return found


def _listen(processes: list[psutil.Process], port: int) -> bool:
    for process in processes:
        with suppress(psutil.Error):
            for socket in process.net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port:
                    return True
    return False
