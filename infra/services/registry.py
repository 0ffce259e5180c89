"""The servers of a workspace: which there are, where they answer, their keys, and ending them.

In: a workspace. Out: :class:`ServiceStatus` values, for people and scripts; the address and key of
a server that runs, for those who ask it. What a server is stands in its stage's record, where it
answers in its newest attempt's ``endpoint.json``.

A key is in no record, log or command line. It is that in ``REFINER_SERVER_KEY`` of the
environment, with which the users of a group share a server, or a random one, made once, in a file
that only its owner can read, and used by every server of that service from then on. The key of the
user's own judge (``judge.api_key_env``) is for the address that they name, and goes to no server
of ours.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from infra.host.files import write_private
from infra.host.processes import host_name
from infra.jobs.dispatch import router_to_look
from infra.jobs.protocol import AttemptRef
from infra.orchestrator.ending import Ending
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import Seen
from infra.process.child import kill_leftovers
from infra.services.process import KEY_VARIABLES
from infra.store import atomic
from infra.store.layout import StagePaths
from infra.store.orchestrators import holders
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import from_json
from refiner_core.contract.services import is_service
from refiner_core.contract.types import Endpoint

#: Where users may set a key of their choice.
VARIABLE = KEY_VARIABLES["command"]
_NAME = "key"
#: How often the making of a key is tried, should somebody else's be half there.
_TRIES = 3

ServiceState = Literal[
    "queued",  # its job waits for the scheduler
    "starting",
    "serving",  # somebody holds a lease
    "idle",  # it answers, and nobody needs it just now
    "ended",
    "killed",  # its job is gone, and nobody has noted that yet
    "unknown",  # its scheduler cannot be asked from here
]
RUNNING: tuple[ServiceState, ...] = ("queued", "starting", "serving", "idle", "unknown")


def service_key(folder: Path, given: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The key, and where it comes from: ``environment`` or ``file``.

    Raises
    ------
    ConfigurationError
        The file is another user's, or the variable's value can be no key.
    """
    if own := given.get(VARIABLE, "").strip():
        if not (own.isascii() and own.isprintable() and " " not in own):
            raise ConfigurationError(
                f"The key in {VARIABLE} has characters that no header may carry.",
                expected="printable ASCII without blanks",
                fix=f"export {VARIABLE}=…, or unset it for a key that refiner makes",
            )
        return own, "environment"
    path = folder / _NAME
    for _ in range(_TRIES):
        if key := _read(path):
            return key, "file"
        _make(path)
    raise ConfigurationError(
        f"{path} holds no key.",
        expected="the key that refiner has made",
        fix=f"delete {path}, and the next server gets a new one",
    )


def known_key(folder: Path, source: str) -> str:
    """The key of a server that runs, by where it says that its key comes from; nothing is made.

    Raises
    ------
    ConfigurationError
        It cannot be had here.
    """
    if source == "file":
        return _read(folder / _NAME)
    if source != "environment":
        return ""
    own = os.environ.get(VARIABLE, "").strip()
    if not own:
        raise ConfigurationError(
            f"The judge's server was started with the key in {VARIABLE}, which is not set here.",
            expected="the same key for who asks it",
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
            expected="to be who has started the server, or to share a key with them",
            fix=f"export {VARIABLE}=… with a key that is for this alone, the same for all who "
            "share the server, and end the one that runs",
        ) from error


def _make(path: Path) -> None:
    """Write a new key, unless there is one by then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = atomic.temporary_name(path)
    try:
        write_private(temporary, secrets.token_urlsafe(32) + "\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # another was faster, and its key is the one
        except OSError as error:
            if error.errno not in atomic.LINKS_UNSUPPORTED:
                raise
            temporary.replace(path)  # one worker at a time starts a service
    finally:
        atomic.remove_quietly(temporary)


@dataclass(frozen=True)
class ServiceStatus:
    """One server.

    Attributes
    ----------
    id, model, engine
        What it is.
    state, reason
        How it is, and how its last attempt ended.
    url, node
        Where it answers, once it does; empty otherwise.
    leases
        Who needs it: attempts at stages (``grpo-0123…-0001``) and calls (``run-…``).
    idle_s
        For how long nobody has, by its own clock; None where it does not run.
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
    """Say where a server answers. This makes its attempt ready."""
    value = {"version": 1, "url": endpoint.url, "node": host_name(), "at": now_text(), **more}
    atomic.create_json(workspace.layout.attempt(*ref).endpoint, value)


def live_endpoints(workspace: Workspace, service_id: str) -> list[Endpoint]:
    """Addresses at which a service answers now; empty while it is being started or replaced.

    Raises
    ------
    ConfigurationError
        Its key cannot be had here.
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
    """All servers that were ever started here, or those whose id begins as ``wanted`` says."""
    ids = [i for i in workspace.stage_ids() if is_service(i)]
    begins = wanted or ""
    named = [i for i in ids if i.startswith(begins) or i.partition("-")[2].startswith(begins)]
    return [_status(workspace, i) for i in named]


def _status(workspace: Workspace, service_id: str) -> ServiceStatus:
    settings = _settings(workspace, workspace.layout.stage(service_id))
    records, observed = Observer(workspace, router_to_look(settings, workspace)).look([service_id])
    record, seen = records.get(service_id), observed.attempts.get(service_id)
    identity = record.spec.identity if record is not None else {}
    last = record.attempts[-1] if record is not None and record.attempts else None
    status = ServiceStatus(
        service_id,
        model=str(identity.get("serve.model") or ""),
        engine=str(identity.get("serve.engine") or ""),
        state="ended",
    )
    if last is None:
        return status
    paths = workspace.layout.attempt(service_id, last.number)
    endpoint = workspace.read_control(paths.endpoint) or {}
    needed_by = tuple(holders(workspace, service_id))
    state = _state(seen, bool(endpoint), bool(needed_by))
    runs = state in RUNNING
    beat = workspace.read_heartbeat(service_id, last.number) or {}
    idle_s = ((beat.get("progress") or {}).get("values") or {}).get("idle_s")
    return replace(
        status,
        state=state,
        reason=last.outcome.message if last.outcome is not None else seen.note if seen else "",
        url=str(endpoint.get("url") or "") if runs else "",
        node=str(endpoint.get("node") or last.node),
        job_id=last.job_id,
        attempt=last.number,
        leases=needed_by,
        idle_s=idle_s if runs and endpoint else None,
        log=str(paths.log),
    )


def _state(seen: Seen | None, answers: bool, needed: bool) -> ServiceState:
    if seen is None:
        return "ended"
    if seen.sight in ("dead", "hung"):
        return "killed"
    if seen.sight == "unknown":
        return "unknown"
    if not seen.running:
        return "queued"
    if not answers:
        return "starting"
    return "serving" if needed else "idle"


def _settings(workspace: Workspace, stage: StagePaths) -> DispatchConfig:
    """How its newest job was asked for."""
    numbers = stage.attempt_numbers()
    config = workspace.part(stage.attempt(numbers[-1]), "config") if numbers else {}
    return from_json(DispatchConfig, config.get("dispatch") or {})


# ---------------------------------------------------------------- ending


def end_service(
    workspace: Workspace,
    service_id: str,
    reason: str,
    *,
    grace_s: float = 60.0,
    tell: Callable[[str], None] = lambda message: None,
) -> bool:
    """End a server, whoever has started it; True when nothing of it runs any more.

    Its worker is asked first, and killed after ``grace_s``. Who still needs it starts another one.
    """
    stage = workspace.layout.stage(service_id)
    settings = replace(_settings(workspace, stage), grace_s=grace_s)
    ending = Ending(workspace, settings, {service_id: service_id}, "interrupted", reason, tell)
    if ending.work(2 * grace_s + 10):
        return False
    kill_leftovers(workspace.layout.service(service_id))  # its minder may be gone, too
    return True
