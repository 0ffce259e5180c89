"""Judges' servers: one as a process, and those of a workspace, with their keys and ends.

In: a :class:`JudgeServerProcess` (its command, address and key). Out: an :class:`Endpoint`, once it
has answered a chat request; or an error that quotes the line of its log with the reason. It runs
under :mod:`infra.process.watchdog` in a session of its own: when this process is gone, by kill -9
or with its node, the watchdog kills all processes of the server. Its output goes, without the key,
to this process's output.

For a workspace: :class:`ServiceStatus` values, for people and scripts; the address and key of a
running server, for its users. The server's definition is in its stage's record, its address in its
newest attempt's ``endpoint.json``.

A key is in no record, log or command line. It is the value of ``REFINER_SERVER_KEY`` in the
environment, with which the users of a group share a server, or a random one, made once, in a file
that only its owner can read, and used by every server of that service from then on. The key of the
user's own judge (``judge.api_key_env``) is for the address that they name, and goes to no server
of ours.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from infra.host.gpus import VISIBLE
from infra.host.processes import host_name
from infra.host.secrets import MASK, masked
from infra.jobs.dispatch import read_only_router
from infra.jobs.dispatcher import AttemptRef
from infra.orchestrator.executor import end_jobs
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import AttemptStatus
from infra.process.child import kill_stale_processes
from infra.services.process import (
    KEY_VARIABLES,
    NotReady,
    ServerProcess,
    ask_server,
    server_environment,
    server_text,
)
from infra.store import atomic
from infra.store.layout import StagePaths
from infra.store.orchestrators import holders
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import DispatchConfig, JudgeConfig, ServeConfig
from refiner_core.contract.errors import ConfigurationError, KilledError
from refiner_core.contract.records import from_json
from refiner_core.contract.services import engine_of, is_service
from refiner_core.contract.types import Endpoint

_QUOTED = 300
#: Answers that a retry may fix: the server is still starting, or busy.
_NOT_YET = frozenset({408, 425, 429, *range(500, 600)})
_NO_KEY = (401, 403)
_HEALTH_S, _CHAT_S = 10.0, 120.0
#: A server that has answered before counts as hung after this silence, seconds.
SILENCE_S = 120.0


class ServerRefusal(Exception):
    """It answers with a refusal that waiting does not fix."""


def check_health(endpoint: Endpoint, engine: str) -> None:
    """Check that the server is up: by its health route, or else by the list of models.

    Raises
    ------
    NotReady
        There is no answer, or the engine reports itself as unhealthy.
    """
    path = "/models" if engine == "command" else "/../health"
    status, body = ask_server(endpoint, path, _HEALTH_S)
    if status >= 500 and engine != "command":
        raise NotReady(f"HTTP {status} for its health{_quoted(body, endpoint)}")


def check_chat(
    endpoint: Endpoint, model: str, limit_field: str = "max_tokens", timeout_s: float = _CHAT_S
) -> None:
    """Request one token; ``limit_field`` is the server's name for the limit.

    Raises
    ------
    NotReady
        No answer within ``timeout_s``, or a temporary refusal.
    ServerRefusal
        Any other answer than a chat completion.
    """
    status, body = _chat(endpoint, model, limit_field, timeout_s)
    said = _quoted(body, endpoint)
    if status in _NOT_YET:
        raise NotReady(f"HTTP {status} for a chat request{said}")
    if status != 200:
        raise ServerRefusal(f"HTTP {status} for a chat request{said}")
    try:
        json.loads(body)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise ServerRefusal(
            f"its answer to a chat request is not a chat completion{said}"
        ) from error


def _chat(endpoint: Endpoint, model: str, limit_field: str, timeout_s: float) -> tuple[int, bytes]:
    message = {"role": "user", "content": "Answer with one word: ready?"}
    question = {"model": model, "messages": [message], limit_field: 1}
    return ask_server(endpoint, "/chat/completions", timeout_s, question)


def _quoted(body: bytes, endpoint: Endpoint) -> str:
    text = " ".join(body[: 4 * _QUOTED].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, MASK)
    return f": {masked(text)[:_QUOTED]}" if text else ""


@dataclass(eq=False)
class JudgeServerProcess(ServerProcess):
    """A judge's server; a context manager that ends all of its processes.

    Attributes
    ----------
    judge
        The judge's configuration.
    mark
        Folder that marks the server's processes: leftovers under the same mark on this machine are
        ended first.
    weights
        Folder or Hub id behind ``judge.model``.
    gpus
        Its GPUs, in the form of ``CUDA_VISIBLE_DEVICES``; empty: those of this process.
    """

    judge: JudgeConfig
    mark: Path
    weights: str | None = None
    gpus: str = ""
    name: str = field(default="The judge's server", kw_only=True)
    section: ClassVar[str] = "judge.serve"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine = engine_of(self.judge)
        self._answered_at = 0.0

    def __enter__(self) -> JudgeServerProcess:
        kill_stale_processes(self.mark)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def settings(self) -> ServeConfig:
        """See :class:`ServerProcess`."""
        return self.judge.serve

    @property
    def by_daemon(self) -> bool:
        """See :class:`ServerProcess`."""
        return super().by_daemon or self._engine == "command"

    def command(self) -> tuple[str, dict[str, str]]:
        """See :class:`ServerProcess`."""
        environment = server_environment(self._engine, self.key, str(self.mark))
        environment |= {VISIBLE: self.gpus} if self.gpus else {}
        return server_text(self.judge, self.at, self.weights), environment

    def check(self) -> None:
        """See :class:`ServerProcess`; refuses a server that rejects chat requests, or accepts them
        without its key.

        Raises
        ------
        ConfigurationError
            It is such a server.
        """
        judge = self.judge
        try:
            check_health(self.endpoint, self._engine)
            check_chat(self.endpoint, judge.model, judge.max_tokens_field)
        except ServerRefusal as error:
            raise ConfigurationError(
                f"The judge's server runs, but {error}{self.where() or '.'}",
                expected=f"a server that accepts chat requests for judge.model {judge.model!r}",
                fix="correct judge.model, judge.serve.args or judge.serve_command",
            ) from error
        reached = not self.host.startswith(("127.", "localhost", "::1"))
        stranger = Endpoint(self.at.url)
        question = (judge.model, judge.max_tokens_field, _CHAT_S)
        if self.key and reached and _chat(stranger, *question)[0] not in _NO_KEY:
            raise ConfigurationError(
                f"The judge's server at {self.at.url} answers without a key, and everyone "
                "on the cluster can reach it.",
                expected="a server that asks for the key in REFINER_SERVER_KEY",
                fix="let judge.serve_command pass it on, or set judge.serve.where=beside",
            )
        self._answered_at = time.monotonic()

    def check_alive(self, *, ask: bool = True) -> None:
        """Raise unless it runs and, if checked now, has answered lately.

        Raises
        ------
        KilledError, StageFailed
            It has ended, has not answered for too long, or lost its port.
        """
        if self.code is not None:
            raise self.ended("while it served")
        if not ask:
            return
        try:
            self.check_port()
            check_health(self.endpoint, self._engine)
            self._answered_at = time.monotonic()
        except NotReady as error:
            silent_s = time.monotonic() - self._answered_at
            if silent_s > SILENCE_S:
                raise KilledError(
                    f"The judge's server runs, but has not answered for {silent_s:.0f} s: {error}",
                    fix="nothing; another one is started",
                ) from error


# ---------------------------------------------------------------- those of a workspace

#: Variable for a key chosen by users.
VARIABLE = KEY_VARIABLES["command"]
_NAME = "key"

ServiceState = Literal[
    "queued",  # its job waits for the scheduler
    "starting",
    "serving",  # it has a lease
    "idle",  # it answers, without a lease
    "ended",
    "killed",  # its job is gone, which is not recorded yet
    "unknown",  # its scheduler cannot be queried from here
]
RUNNING: tuple[ServiceState, ...] = ("queued", "starting", "serving", "idle", "unknown")


def service_key(folder: Path, given: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The key, and its source: ``environment`` or ``file``.

    Raises
    ------
    ConfigurationError
        The file is another user's, or the variable's value is not a valid key.
    """
    if own := given.get(VARIABLE, "").strip():
        if not (own.isascii() and own.isprintable() and " " not in own):
            raise ConfigurationError(
                f"The key in {VARIABLE} has characters that are invalid in a header.",
                expected="printable ASCII without blanks",
                fix=f"export {VARIABLE}=…, or unset it for a key made by refiner",
            )
        return own, "environment"
    path = folder / _NAME
    if not (key := _read(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.create_bytes(path, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
        key = _read(path)  # another process may have been faster, and its key counts
    if key:
        return key, "file"
    raise ConfigurationError(
        f"{path} has no key.",
        expected="the key made by refiner",
        fix=f"delete {path}, and the next server gets a new one",
    )


def known_key(folder: Path, source: str) -> str:
    """The key of a running server, from its recorded ``source``; none is made.

    Raises
    ------
    ConfigurationError
        It is not available here.
    """
    if source == "file":
        return _read(folder / _NAME)
    if source != "environment":
        return ""
    own = os.environ.get(VARIABLE, "").strip()
    if not own:
        raise ConfigurationError(
            f"The judge's server was started with the key in {VARIABLE}, which is not set here.",
            expected="the same key for all users of the server",
            fix=f"export {VARIABLE}=…, or end the server with `refiner judge stop`",
        )
    return own


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        raise ConfigurationError(
            f"The key of the judge's server in {path} is another user's.",
            expected="your own server, or a key shared with its owner",
            fix=f"export {VARIABLE}=… with a key for this purpose alone, the same for all who "
            "share the server, and end the running one",
        ) from error


@dataclass(frozen=True)
class ServiceStatus:
    """One server.

    Attributes
    ----------
    id, model, engine
        Its definition.
    state, reason
        Its state, and the end of its last attempt.
    url, node
        Its address once it answers; else empty.
    leases
        Its users: attempts at stages (``grpo-0123…-0001``) and calls (``run-…``).
    idle_s
        Seconds without a user, by its own clock; None if it does not run.
    """

    id: str
    model: str
    engine: str
    state: ServiceState
    reason: str = ""
    url: str = ""
    node: str = ""
    job_id: str | None = None
    attempt: int = 0
    leases: tuple[str, ...] = ()
    idle_s: float | None = None
    log: str = ""


def write_endpoint(workspace: Workspace, ref: AttemptRef, endpoint: Endpoint, **more: Any) -> None:
    """Record the address of a server. This makes its attempt ready."""
    value = {"version": 1, "url": endpoint.url, "node": host_name(), "at": now_text(), **more}
    atomic.create_json(workspace.layout.attempt(*ref).endpoint, value)


def live_endpoints(workspace: Workspace, service_id: str) -> list[Endpoint]:
    """Present addresses of a service; empty while it is being started or replaced.

    Raises
    ------
    ConfigurationError
        Its key is not available here.
    """
    numbers = workspace.layout.stage(service_id).attempt_numbers()
    if not numbers:
        return []
    paths = workspace.layout.attempt(service_id, numbers[-1])
    found = workspace.read_control(paths.endpoint)
    if found is None or paths.outcome.exists():
        return []
    folder = workspace.layout.service(service_id)
    key = known_key(folder, str(found.get("key_from")))
    return [Endpoint(str(found["url"]), key)]


def services_of(workspace: Workspace, wanted: str | None = None) -> list[ServiceStatus]:
    """All servers that were ever started here, or those whose id begins with ``wanted``."""
    ids = [i for i in workspace.stage_ids() if is_service(i)]
    begins = wanted or ""
    named = [i for i in ids if i.startswith(begins) or i.partition("-")[2].startswith(begins)]
    return [_status(workspace, i) for i in named]


def _status(workspace: Workspace, service_id: str) -> ServiceStatus:
    settings = _settings(workspace, workspace.layout.stage(service_id))
    observer = Observer(workspace, read_only_router(settings, workspace), settings)
    records, observed = observer.observe([service_id])
    record, seen = records.get(service_id), observed.attempts.get(service_id)
    identity = record.spec.identity if record is not None else {}
    model, engine = (str(identity.get(f"serve.{name}") or "") for name in ("model", "engine"))
    if record is None or not record.attempts:
        return ServiceStatus(service_id, model, engine, "ended")
    last = record.attempts[-1]
    paths = workspace.layout.attempt(service_id, last.number)
    endpoint = workspace.read_control(paths.endpoint) or {}
    needed_by = tuple(holders(workspace, service_id))
    state = _state(seen, bool(endpoint), bool(needed_by))
    runs = state in RUNNING
    beat = workspace.read_heartbeat(service_id, last.number) or {}
    idle_s = ((beat.get("progress") or {}).get("values") or {}).get("idle_s")
    return ServiceStatus(
        service_id,
        model,
        engine,
        state,
        reason=last.outcome.message if last.outcome is not None else seen.note if seen else "",
        url=str(endpoint.get("url") or "") if runs else "",
        node=str(endpoint.get("node") or last.node),
        job_id=last.job_id,
        attempt=last.number,
        leases=needed_by,
        idle_s=idle_s if runs and endpoint else None,
        log=str(paths.log),
    )


def _state(seen: AttemptStatus | None, answers: bool, needed: bool) -> ServiceState:
    if seen is None:
        return "ended"
    if seen.liveness in ("dead", "hung"):
        return "killed"
    if seen.liveness == "unknown":
        return "unknown"
    if not seen.running:
        return "queued"
    if not answers:
        return "starting"
    return "serving" if needed else "idle"


def _settings(workspace: Workspace, stage: StagePaths) -> DispatchConfig:
    """Dispatch settings of its newest job."""
    numbers = stage.attempt_numbers()
    config = workspace.part(stage.attempt(numbers[-1]), "config") if numbers else {}
    return from_json(DispatchConfig, config.get("dispatch") or {})


# ---------------------------------------------------------------- ending


def end_service(
    workspace: Workspace,
    service_id: str,
    reason: str,
    tell: Callable[[str], None] = lambda message: None,
) -> bool:
    """End a server, whoever started it; True when none of its processes runs any more.

    Its worker is asked first, and killed after a minute. A call that still needs it starts another.
    """
    stage = workspace.layout.stage(service_id)
    settings = replace(_settings(workspace, stage), grace_s=60.0)
    ids = {service_id: service_id}
    if end_jobs(workspace, settings, ids, "interrupted", reason, tell, patience_s=130.0):
        return False
    kill_stale_processes(
        workspace.layout.service(service_id)
    )  # its watchdog may have been killed, too
    return True
