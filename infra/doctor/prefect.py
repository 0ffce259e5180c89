"""Area ``prefect``: the server that draws runs. Nothing depends on it: work goes on without.

In: the environment and the state folder. Out: findings. Prefect is imported for a server of the
user's own alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from infra.doctor.check import Check, Finding, Look, fine, found
from infra.doctor.packages import installed
from infra.host.secrets import masked
from infra.prefect_server import (
    KeyRefused,
    ServerInfo,
    check_server,
    http_status,
    is_network_file_system,
    server_status,
    state_dir,
)
from refiner_core.contract.errors import RefinerError

_ANSWER_S = 6.0
#: A server takes some ten seconds to start, on a machine that has other work some more.
_STARTS_S = 60.0
_WHY = "flow runs; the work itself goes on without them"

_MOVE = "export REFINER_STATE_DIR=/var/tmp/refiner"


def _server(look: Look) -> Iterator[Finding]:
    status = server_status()
    if status.state == "yours" and status.info is not None:
        yield _users(status.info)
    elif status.state == "running" and status.info is not None:
        yield _ours(status.info)
    elif status.state == "starting":
        silent_s = float("inf")
        with contextlib.suppress(OSError):
            silent_s = time.time() - Path(status.log).stat().st_mtime
        if silent_s < _STARTS_S:  # one that starts says something, one that hangs does not
            yield fine(f"it starts; its log: {status.log}")
        else:
            what = f"it lives and does not answer (yet); its log: {status.log}"
            yield found("warning", what, "refiner server stop", _WHY)
    else:
        yield fine("none runs; `refiner run` starts one")
        yield _port()


def _ours(info: ServerInfo) -> Finding:
    there, mend = installed("prefect"), "refiner server stop"
    what = f"Prefect {info.version} answers at {info.url}, and asks for a key"
    if info.version != there:
        why = "the next run starts one of the installed version"
        return found("warning", f"{what}; installed here is {there}", mend, why)
    status = http_status(f"{info.api_url}/admin/version", _ANSWER_S)
    if status != 401:
        what = f"{what} at the door, yet answers {status} without one"
        return found("warning", what, mend, "others on this machine could read your runs")
    return fine(what)


def _users(info: ServerInfo) -> Finding:
    """The user's own server: PREFECT_API_URL."""
    try:
        check_server(info)
    except KeyRefused as error:
        return found("warning", error.what, "export PREFECT_API_AUTH_STRING=USER:PASSWORD", _WHY)
    except RefinerError as error:
        return found("warning", error.what, "unset PREFECT_API_URL", _WHY)
    return fine(f"{masked(info.api_url)} (PREFECT_API_URL) answers")


def _port() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
    except OSError as error:
        what = f"no port of 127.0.0.1 can be bound ({error})"
        return found("warning", what, "refiner run RECIPE --no-server", _WHY, name="port")
    return fine(f"127.0.0.1 can be listened on (tried {number})", name="port")


def _database(look: Look) -> Finding:
    folder = state_dir()
    if kind := is_network_file_system(folder):
        mend = f"export REFINER_STATE_DIR=/var/tmp/refiner-{os.getuid()}"
        why = "SQLite must not live on a network file system"
        return found("warning", f"{folder} lies on {kind}", mend, why)
    return fine(f"{folder}, on a disk of this machine, mode 0700")


CHECKS = (
    Check("prefect", "server", _server, limit_s=15, hung="refiner server stop"),
    Check("prefect", "database", _database, limit_s=10, hung=_MOVE),
)
