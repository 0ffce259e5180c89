"""One local Prefect server per user and node: found, or started once, and reused by every run.

In: the environment. Out: a :class:`ServerInfo` whose ``client_env`` lets a process that has *not
yet imported Prefect* talk to it; or one clear refusal before it is used: it does not answer, wants
another key, is of another major version, or is no Prefect server. Only the last check imports
Prefect, whose client knows the user's profile, headers and certificates.

Starting a server takes some ten seconds, so it outlives the run that started it. It listens on
loopback only and asks for a key, because loopback is no protection on a shared node. The key is in
a file of mode 0600, in the environment of the processes that need it, and in the link printed on a
terminal (:func:`terminal_link`), never in an argument list, a log or ``server.json``. With
``PREFECT_API_URL``, that server is used and no other.

Files in the state folder (:func:`state_dir`): ``server.json`` (process and address), ``auth``
(the key), ``start.lock``, ``server.log``, ``prefect/`` (``PREFECT_HOME`` with the SQLite
database). An SQLite database must not be on a network file system (locking is unreliable there, and
its write-ahead log ends processes with SIGBUS when a quota is full). A home directory often is on
one, so the default moves to ``/var/tmp`` then; a folder named by ``REFINER_STATE_DIR`` is used as
it is. Every node has a folder of its own below it, because a server answers only on its own
loopback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any, Literal, TextIO
from urllib.parse import quote

from infra.host.files import mount_of
from infra.host.processes import ProcessId, free_port, host_name, listens, start_apart
from infra.host.secrets import masked
from infra.store import atomic
from infra.store.atomic import read_json, write_json
from infra.store.records import now_text
from refiner_core.contract.errors import (
    ConfigurationError,
    RefinerError,
    UnsupportedError,
    WorkspaceError,
)

_NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs"}
)

#: Below ``PREFECT_HOME``: the server's copy of the files of its pages.
UI = "ui"
_LOG_LIMIT_BYTES = 5_000_000
_GRACE_S = 8.0
#: Limit of starts of a server that ends at once (its port was taken meanwhile).
_STARTS = 2
#: Variables that a server needs. It gets none of our tokens.
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "SSL_CERT_FILE"),
)
_NO_ANALYTICS = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
_NAME = "open.html"
#: Prefect's UI reads the key from this place of its origin's storage.
_PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<title>refiner</title>
<p>This page opens with the link that <code>refiner server</code> prints on a terminal.</p>
<script>
const said = location.hash.slice(1).split(",").map(decodeURIComponent);
history.replaceState(null, "", location.pathname);
const target = new URL(said[1] || "/", location.origin);
if (said[0] && target.origin === location.origin) {
  localStorage.setItem("prefect-password", btoa(said[0]));
  location.replace(target);
}
</script>
"""
_ANSWER_S = 6.0
_START_S = 120.0
#: Prefect Cloud has no such address, and its client checks versions itself.
_CLOUD = "https://api.prefect.cloud/"


def state_dir(env: Mapping[str, str] | None = None) -> Path:
    """This user's state folder on this node; created with mode 0700 if it is missing.

    Raises
    ------
    WorkspaceError
        It cannot be created, or it belongs to another user.
    """
    env = os.environ if env is None else env
    base = _base_dir(env)
    folder = base / host_name()
    try:
        for path in (base, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        # The owner of the parent could replace our folder by another one.
        if found.st_uid != os.getuid() or base.stat().st_uid not in (os.getuid(), 0):
            raise PermissionError("it or its parent belongs to another user")
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise WorkspaceError(
            f"The state folder {folder} cannot be used: {error}.",
            expected="a folder of your own on a disk of this node",
            fix="set REFINER_STATE_DIR to one",
        ) from error
    return folder


def _base_dir(env: Mapping[str, str]) -> Path:
    if named := env.get("REFINER_STATE_DIR"):
        return Path(named).expanduser().absolute()
    home = env.get("XDG_STATE_HOME") or "~/.local/state"
    base = Path(home).expanduser() / "refiner"
    is_remote = mount_of(base).type.lower() in _NETWORK_FILE_SYSTEMS
    return Path(f"/var/tmp/refiner-{os.getuid()}") if is_remote else base


class ServerError(RefinerError, RuntimeError):
    """The local Prefect server is not available. Runs continue without it."""

    resumable = True


@dataclass(frozen=True)
class ServerInfo:
    """A server that answers. ``auth`` is not part of ``repr``, and in no file but its own."""

    url: str  # of the UI: http://127.0.0.1:PORT
    api_url: str
    ours: bool  # False: the user's own, named by PREFECT_API_URL
    pid: int = 0
    port: int = 0
    version: str = ""
    started_at: str = ""
    home: str = ""
    auth: str = field(default="", repr=False)

    def client_env(self) -> dict[str, str]:
        """Settings that a client process needs before it imports Prefect."""
        if not self.ours:
            return {}
        return {
            "PREFECT_API_URL": self.api_url,
            "PREFECT_API_AUTH_STRING": self.auth,
            "PREFECT_HOME": self.home,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            **_NO_ANALYTICS,
        }


@dataclass(frozen=True)
class ServerStatus:
    """Status shown by ``refiner server``; ``starting``: alive, but not answering yet."""

    state: Literal["running", "starting", "stopped", "yours"]
    info: ServerInfo | None
    folder: str
    log: str


class _Files:
    """The paths in the state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.json = folder / "server.json"
        self.auth = folder / "auth"
        self.lock = folder / "start.lock"
        self.log = folder / "server.log"
        self.home = folder / "prefect"


def ensure_server(wait_s: float = 60.0, *, env: Mapping[str, str] | None = None) -> ServerInfo:
    """A server that answers: the user's own, a running one, or a new one.

    Two callers at once start one server: the second waits for the first.

    Raises
    ------
    ServerError
        None answered within ``wait_s`` seconds; the message names the log.
    """
    env = os.environ if env is None else env
    if theirs := _users_server(env):
        return theirs
    files = _Files(state_dir(env))
    deadline = time.monotonic() + wait_s
    if info := _running(files):
        return info
    with _exclusive(files.lock, deadline):
        tries = _STARTS
        while time.monotonic() < deadline:
            process = _recorded(files)
            if process is None or not process.alive:
                if tries == 0:
                    break
                _start(files, env)
                tries -= 1
            elif info := _running(files):
                return info
            time.sleep(0.1)
    raise ServerError(
        f"Prefect's server did not answer within {wait_s:.0f} s.",
        expected="it to answer; work continues without it",
        fix=f"see {files.log}, or run `refiner server stop`",
    )


def server_status(*, env: Mapping[str, str] | None = None) -> ServerStatus:
    """State and address of the local Prefect server, and the places of its key and log. Starts
    nothing.

    Parameters
    ----------
    env
        Variables that locate it (default: this process's).

    Raises
    ------
    OSError
        Its folder cannot be read.
    """
    env = os.environ if env is None else env
    files = _Files(state_dir(env))
    where = (str(files.folder), str(files.log))
    if theirs := _users_server(env):
        return ServerStatus("yours", theirs, *where)
    if info := _running(files):
        return ServerStatus("running", info, *where)
    process = _recorded(files)
    return ServerStatus("starting" if process and process.alive else "stopped", None, *where)


def stop_server(*, env: Mapping[str, str] | None = None, grace_s: float = _GRACE_S) -> bool:
    """End our server, and only that process: TERM, a grace period, KILL of its group.

    Parameters
    ----------
    env
        As in :func:`server_status`.
    grace_s
        Its grace period, seconds.

    Returns
    -------
    bool
        False if there is none of ours.

    Raises
    ------
    OSError
        Its folder cannot be read.
    """
    files = _Files(state_dir(os.environ if env is None else env))
    with _exclusive(files.lock, time.monotonic() + grace_s):
        process = _recorded(files)
        if process is None or not process.alive:
            return False
        # Before its end, so that no follower takes this for a crash and starts another one.
        write_json(files.json, {**(read_json(files.json) or {}), "stopped_at": now_text()})
        if not process.terminate():
            return False
        if not process.wait_ended(grace_s):
            process.kill_group()
        return True


def was_stopped() -> bool:
    """True if our last server was ended by :func:`stop_server`."""
    return "stopped_at" in (read_json(_Files(state_dir()).json) or {})


def passed_on(env: Mapping[str, str]) -> dict[str, str]:
    """Our settings for a client process; with the user's own server, its settings, too."""
    names = {*_PASSED_ON, "REFINER_STATE_DIR", "XDG_STATE_HOME"}
    if _users_server(env):
        proxies = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
        names |= {k for k in env if k.startswith("PREFECT_") or k.lower() in proxies}
    return {k: env[k] for k in names if k in env}


# ---------------------------------------------------------------- finding


def _users_server(env: Mapping[str, str]) -> ServerInfo | None:
    api_url = env.get("PREFECT_API_URL", "").strip().rstrip("/")
    if not api_url:
        return None
    return ServerInfo(url=api_url.removesuffix("/api"), api_url=api_url, ours=False)


def _recorded(files: _Files) -> ProcessId | None:
    found = read_json(files.json)
    return ProcessId.parse(found["process"]) if found else None


def _running(files: _Files) -> ServerInfo | None:
    """The recorded server, if it is alive, holds its port and answers."""
    found, process = read_json(files.json), _recorded(files)
    if not found or process is None:
        return None
    port = int(found["port"])
    url = f"http://127.0.0.1:{port}"
    # This very process has to listen there, so that our key is sent to no other.
    if not (process.alive and listens(process.pid, port)):
        return None
    if http_status(f"{url}/api/health") != 200:  # not up yet; the caller decides how long to wait
        return None
    return ServerInfo(
        url=url,
        api_url=f"{url}/api",
        ours=True,
        pid=process.pid,
        port=port,
        version=str(found.get("version", "")),
        started_at=str(found.get("started_at", "")),
        home=str(files.home),
        auth=files.auth.read_text().strip(),
    )


def http_status(url: str, timeout_s: float = 5.0) -> int | str:
    """The status of a GET without a key, or an error text; proxies are for other hosts."""
    proxies = urllib.request.ProxyHandler({} if url.startswith("http://127.") else None)
    opener = urllib.request.build_opener(proxies)
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError) as error:
        return f"no answer ({getattr(error, 'reason', error)})"


# ---------------------------------------------------------------- starting


def _start(files: _Files, env: Mapping[str, str]) -> None:
    """Start a server in a session of its own and record its process. Does not wait."""
    files.home.mkdir(mode=0o700, exist_ok=True)
    (files.home / UI).mkdir(exist_ok=True)
    if not files.auth.exists():
        key = f"refiner:{secrets.token_urlsafe(24)}\n"
        atomic.write_bytes(files.auth, key.encode(), mode=0o600)
    port = _free_port(files)
    if files.log.exists() and files.log.stat().st_size > _LOG_LIMIT_BYTES:
        files.log.replace(files.log.with_suffix(".log.1"))
    descriptor = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        child = start_apart(_command(port), output, _server_env(files, port, env), cwd=files.folder)
    record: dict[str, Any] = {
        # Not reaped before its number is recorded, so that the number cannot be reused.
        "process": str(ProcessId.of(child.pid)),
        "port": port,
        "url": f"http://127.0.0.1:{port}",
        "version": package_version("prefect"),
        "started_at": now_text(),
    }
    write_json(files.json, record)


def _command(port: int) -> list[str]:
    command = [sys.executable, "-P", "-m", "prefect", "server", "start"]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def _server_env(files: _Files, port: int, env: Mapping[str, str]) -> dict[str, str]:
    url, key = f"http://127.0.0.1:{port}/api", files.auth.read_text().strip()
    return {
        **{k: env[k] for k in _PASSED_ON if k in env},
        **_NO_ANALYTICS,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "PREFECT_HOME": str(files.home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_UI_API_URL": url,  # without it the UI asks port 4200 and stays blank
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(files.home / UI),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{files.home}/prefect.db",
        "PREFECT_SERVER_API_AUTH_STRING": key,
        "PREFECT_API_AUTH_STRING": key,
    }


def _free_port(files: _Files) -> int:
    """The port of the last server if it is free, so that bookmarks stay valid; else a free one."""
    before = int((read_json(files.json) or {}).get("port", 0))
    with contextlib.suppress(OSError), socket.socket() as probe:  # taken since: another one
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", before))
        return int(probe.getsockname()[1])
    return free_port("127.0.0.1")


@contextlib.contextmanager
def _exclusive(path: Path, deadline: float) -> Iterator[None]:
    """Hold the start lock. The kernel frees it when its holder dies, so it is never stale; the
    folder is on a disk of this node, where locks are reliable."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=max(0.0, deadline - time.monotonic()), mode=0o600)
    try:
        with lock:
            yield
    except Timeout as error:
        raise ServerError(
            "Another process is still starting Prefect's server.",
            expected="it to be done by now; work continues without it",
            fix="run the same command again, or `refiner server stop`",
        ) from error


def terminal_link(info: ServerInfo, path: str, stream: TextIO) -> str:
    """The address of a page of the UI, with the key only if ``stream`` is a terminal.

    Parameters
    ----------
    info
        The server.
    path
        Such as ``/runs/flow-run/ID``.
    stream
        Where the link will be printed.
    """
    folder = Path(info.home) / UI / "v1"
    if not (info.ours and info.auth and stream.isatty() and folder.is_dir()):
        return f"{info.url}{path}"
    page = folder / _NAME
    if not page.is_file() or page.read_text() != _PAGE:  # the server copies its files afresh
        atomic.write_text(page, _PAGE)
    return f"{info.url}/{_NAME}#{quote(info.auth, safe=':')},{quote(path)}"


class KeyRefused(ConfigurationError):
    """The server wants a key, or another one."""


def usable_server(wait_s: float = _START_S) -> ServerInfo:
    """A usable server: the user's own, or ours, which is started if necessary.

    From here on Prefect, once imported, uses this one.

    Raises
    ------
    RefinerError
        There is none; as in :func:`check_server`.
    """
    info = ensure_server(wait_s)
    os.environ.update(info.client_env())
    check_server(info)
    return info


def check_server(info: ServerInfo) -> None:
    """Refuse a server that Prefect's own client cannot work with. Imports Prefect.

    Raises
    ------
    ServerError
        It does not answer, or not now.
    KeyRefused
        It wants a key, or another one.
    ConfigurationError
        It is no Prefect server.
    UnsupportedError
        Its major version differs from that of the client here.
    """
    if info.api_url.startswith(_CLOUD):
        return
    import httpx
    from prefect import settings
    from prefect.client.orchestration import get_client

    named = masked(info.api_url) + ("" if info.ours else " (PREFECT_API_URL)")
    fix = "run `refiner server stop`" if info.ours else "correct PREFECT_API_URL, or unset it"
    ours: dict[Any, Any] = {settings.PREFECT_API_AUTH_STRING: info.auth} if info.ours else {}
    asked = {settings.PREFECT_API_URL: info.api_url, settings.PREFECT_CLIENT_MAX_RETRIES: 0}
    there, here, code, trouble = "", package_version("prefect"), 200, ""
    try:
        with settings.temporary_settings(asked | ours):
            client = get_client(httpx_settings={"timeout": _ANSWER_S}, sync_client=True)
            there = str(client.api_version())
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        trouble = f"answers {code}" if code == 429 or code >= 500 else ""
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        trouble = f"does not answer: {masked(str(error)) or type(error).__name__}"
    except ValueError:  # no JSON
        there = ""
    if trouble:
        raise ServerError(
            f"The Prefect server {named} {trouble}.",
            expected=f"an answer within {_ANSWER_S:.0f} s",
            fix=f"start it, or {fix}",
        )
    if code in (401, 403):
        raise KeyRefused(
            f"The Prefect server {named} answers {code}: it wants a key, or another one.",
            expected="a key that it accepts",
            fix=fix
            if info.ours
            else "export PREFECT_API_AUTH_STRING=USER:PASSWORD "
            "(or PREFECT_API_KEY), as the server has it",
        )
    if not there[:1].isdigit():
        raise ConfigurationError(
            f"The server at {named} is not a Prefect server ({code}).",
            expected="the address of its API, which ends in /api",
            fix=fix,
        )
    if there.partition(".")[0] != here.partition(".")[0]:
        raise UnsupportedError(
            f"The Prefect server {named} has version {there}, but the client has {here}.",
            expected="the same major version",
            fix=f"{fix}; or install prefect of the server's major version",
        )
