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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from infra.host.files import write_private
from infra.host.processes import ProcessId, host_name
from infra.jobs.dispatch import Router, make_router, router_to_look
from infra.jobs.failures import classify_silent_end, outcome_of
from infra.jobs.protocol import AttemptRef, OpenAttempt
from infra.orchestrator.observe import Observer
from infra.orchestrator.reconcile import Seen
from infra.process.child import kill_leftovers
from infra.services.process import KEY_VARIABLES
from infra.store import atomic
from infra.store.orchestrators import holders
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import DispatchConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import StageRecord, from_json
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
_POLL_S = 0.2


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
    record, _, seen = _look(workspace, service_id, adopt=False)
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


def _look(
    workspace: Workspace, service_id: str, *, adopt: bool
) -> tuple[StageRecord | None, Router, Seen | None]:
    """The record, who knows of its job, and what is seen of its open attempt."""
    stage = workspace.layout.stage(service_id)
    numbers = stage.attempt_numbers()
    config = workspace.part(stage.attempt(numbers[-1]), "config") if numbers else {}
    settings = from_json(DispatchConfig, config.get("dispatch") or {})
    router = (make_router if adopt else router_to_look)(settings, workspace)
    records, observed = Observer(workspace, router).look([service_id])
    return records.get(service_id), router, observed.attempts.get(service_id)


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
    asked_at: float | None = None
    began, killed = time.monotonic(), False
    while time.monotonic() - began < 2 * grace_s + 10:
        record, router, seen = _look(workspace, service_id, adopt=True)
        if record is None or seen is None:
            return True
        ref = AttemptRef(service_id, record.attempts[-1].number)
        started = workspace.read_control(workspace.layout.attempt(*ref).started)
        attempt = OpenAttempt(ref, record.attempts[-1], started)
        if seen.sight == "dead":
            _close(workspace, attempt, seen)
        elif asked_at is None:
            workspace.ask_stop(service_id, seen.number, "interrupted", reason)
            if attempt.started is None:
                if workspace.void_attempt(*attempt.ref) and router.kill(attempt):
                    end = outcome_of("interrupted", f"not begun: {reason}")
                    workspace.close_attempt(*attempt.ref, end)
            elif router.stop(attempt):
                asked_at = time.monotonic()
        elif time.monotonic() - asked_at > grace_s and not killed:
            killed = router.kill(attempt)
            tell(f"{service_id} has not ended in {grace_s:g} s: killed")
        time.sleep(_POLL_S)
    return False


def _close(workspace: Workspace, attempt: OpenAttempt, seen: Seen) -> None:
    """Note the end of a server that was dead before it could be asked."""
    if attempt.started is None and not workspace.void_attempt(*attempt.ref):
        return
    end = seen.silent_end or classify_silent_end(attempt.started is not None, "")
    workspace.close_attempt(*attempt.ref, end)
    worker = (attempt.started or {}).get("process")
    if worker is not None and ProcessId.parse(worker).here:  # its minder may be gone, too
        kill_leftovers(workspace.layout.service(attempt.ref.stage_id))
