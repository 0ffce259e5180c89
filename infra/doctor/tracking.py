"""Area ``wandb``: the mode, the key, the server, and what waits to be sent.

In: the ``tracking`` section, the environment, the workspace. Out: findings that name whose key it
is, never the key. Imports no wandb.
"""

from __future__ import annotations

import base64
import json
import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from infra.doctor.check import Check, Finding, Look, absent, doubtful
from infra.store.workspace import Workspace
from infra.tracking import check_server, offline_runs, server_address, shown_address
from refiner_core.contract.errors import RefinerError

_AREA = "wandb"
_ANSWER_S = 8.0
_VIEWER = {"query": "query Viewer { viewer { username } }"}


def _online(look: Look) -> bool:
    return look.config.tracking.wandb == "online"


def _mode(look: Look) -> Iterator[Finding]:
    mode, variable = look.config.tracking.wandb, os.environ.get("WANDB_MODE", "")
    if variable and variable != mode:
        yield Finding(
            *(_AREA, "mode", "warning"),
            f"WANDB_MODE={variable} in the environment, tracking.wandb={mode} in the configuration "
            "counts",
            mend="unset WANDB_MODE",
        )
    else:
        kept = {"offline": ": kept in the workspace, sent by `refiner track sync`"}.get(mode, "")
        yield Finding(_AREA, "mode", "ok", f"{mode}{kept}")


def _key(look: Look) -> Iterator[Finding]:
    if look.config.tracking.wandb == "disabled":
        return
    address, key = server_address(), _stored_key(server_address())
    shown = shown_address(address)
    if key is None:
        yield Finding(
            *(_AREA, "key", absent(_online(look)), f"there is none for {shown}"),
            mend=f"{_python()} -m wandb login",
            why="tracking.wandb=online, and `refiner track sync`",
        )
        return
    if look.offline or look.on_node:
        yield Finding(_AREA, "key", "ok", f"there is one for {shown}; not tried (offline)")
        return
    try:
        check_server(address)
        name = _viewer(address, key)
    except RefinerError as error:
        yield Finding(
            *(_AREA, "server", absent(_online(look)), error.what),
            mend=f"{look.command('run')} tracking.wandb=offline" if _online(look) else "",
            why="tracking.wandb=online, and `refiner track sync`",
        )
        return
    except (OSError, ValueError) as error:
        what = f"{shown} does not say whose key it is ({type(error).__name__})"
        yield Finding(_AREA, "key", "warning", what, mend=f"{_python()} -m wandb login --verify")
        return
    if name:
        yield Finding(_AREA, "key", "ok", f"of {name} at {shown}")
    else:
        yield Finding(
            *(_AREA, "key", doubtful(_online(look)), f"{shown} does not take it"),
            mend=f"{_python()} -m wandb login --relogin",
            why="tracking.wandb=online, and `refiner track sync`",
        )


def _python() -> str:
    import sys

    return sys.executable


def _stored_key(address: str) -> str | None:
    """Where wandb looks: its variable, then a netrc file."""
    if given := os.environ.get("WANDB_API_KEY", "").strip():
        return given
    file = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")  # noqa: PTH111
    try:
        found = netrc.netrc(file).authenticators(urlsplit(address).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return found[2] if found else None


def _viewer(address: str, key: str) -> str:
    """Whose key it is; empty where the server knows nobody by it."""
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


def _waiting(look: Look) -> Iterator[Finding]:
    workspace = Workspace.read_only(look.workspace)
    new = [r for r in offline_runs(workspace, workspace.stage_ids()) if r.is_new]
    if not new:
        return
    run = workspace.run_ids()[-1:]
    words = ["refiner", "track", "sync", *run, f"workspace={look.workspace}"]
    yield Finding(
        *(_AREA, "offline runs", "missing", f"{len(new)} were logged offline and not sent"),
        mend=" ".join(words),
        why="those of the newest run; name others for theirs",
    )


CHECKS = (
    Check(_AREA, "mode", _mode),
    Check(_AREA, "key", _key, limit_s=25, needed=_online),
    Check(_AREA, "offline runs", _waiting, limit_s=15),
)
