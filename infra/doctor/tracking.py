"""Area ``wandb``: the mode, the key, the server, and what waits to be sent.

In: the ``tracking`` section, the environment, the workspace. Out: findings that name whose key it
is, never the key. Imports no wandb.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from infra.doctor.check import Check, Finding, Look, absent, doubtful, fine, found
from infra.store.workspace import Workspace
from infra.tracking import check_server, offline_runs, server_address, shown_address
from refiner_core.contract.errors import RefinerError

_ANSWER_S = 8.0
_VIEWER = {"query": "query Viewer { viewer { username } }"}
_WHY = "tracking.wandb=online, and `refiner track sync`"
_LOGIN = f"{sys.executable} -m wandb login"


def _online(look: Look) -> bool:
    return look.config.tracking.wandb == "online"


def _mode(look: Look) -> Finding:
    mode, variable = look.config.tracking.wandb, os.environ.get("WANDB_MODE", "")
    if variable and variable != mode:
        what = f"WANDB_MODE={variable} in the environment, tracking.wandb={mode} in the "
        return found("warning", what + "configuration counts", "unset WANDB_MODE")
    kept = ": kept in the workspace, sent by `refiner track sync`" if mode == "offline" else ""
    return fine(f"{mode}{kept}")


def _key(look: Look) -> Finding | None:
    if look.config.tracking.wandb == "disabled":
        return None
    address, online = server_address(), _online(look)
    key, shown = _stored_key(address), shown_address(address)
    if key is None:
        return found(absent(online), f"there is none for {shown}", _LOGIN, _WHY)
    if look.offline or look.on_node:
        return fine(f"there is one for {shown}; not tried (offline)")
    try:
        check_server(address)
        name = _viewer(address, key)
    except RefinerError as error:
        mend = f"{look.command('run')} tracking.wandb=offline" if online else ""
        return found(absent(online), error.what, mend, _WHY, name="server")
    except (OSError, ValueError) as error:
        what = f"{shown} does not say whose key it is ({type(error).__name__})"
        return found("warning", what, f"{_LOGIN} --verify")
    if name:
        return fine(f"of {name} at {shown}")
    return found(doubtful(online), f"{shown} does not take it", f"{_LOGIN} --relogin", _WHY)


def _stored_key(address: str) -> str | None:
    """The key where wandb looks: its variable, then a netrc file."""
    if given := os.environ.get("WANDB_API_KEY", "").strip():
        return given
    file = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")  # noqa: PTH111
    try:
        entry = netrc.netrc(file).authenticators(urlsplit(address).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def _viewer(address: str, key: str) -> str:
    """Owner of the key; empty where the server knows nobody by it."""
    word = base64.b64encode(f"api:{key}".encode()).decode()
    request = urllib.request.Request(
        f"{address.rstrip('/')}/graphql",
        json.dumps(_VIEWER).encode(),
        {"Authorization": f"Basic {word}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            value = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return ""
        raise
    return str(((value.get("data") or {}).get("viewer") or {}).get("username") or "")


def _waiting(look: Look) -> Finding | None:
    workspace = Workspace.read_only(look.workspace)
    new = [r for r in offline_runs(workspace, workspace.stage_ids()) if r.is_new]
    if not new:
        return None
    words = ["refiner track sync", *workspace.run_ids()[-1:], f"workspace={look.workspace}"]
    why = "those of the newest run; name others for theirs"
    return found("missing", f"{len(new)} were logged offline and not sent", " ".join(words), why)


CHECKS = (
    Check("wandb", "mode", _mode),
    Check("wandb", "key", _key, limit_s=25, needed=_online),
    Check("wandb", "offline runs", _waiting, limit_s=15),
)
