"""Areas ``hub``, ``wandb``, ``prefect`` and ``network``: what refiner asks over a network.

In: the environment, the recipe's sections, the profile. Out: findings that name whose token or key
it is, never itself; addresses are shown without names and passwords. What publishing would be
refused for is asked by :func:`infra.hub.target.check_hub`, as before a run. Nothing depends on
Prefect's server: work goes on without. Imports neither wandb nor Prefect.
"""

from __future__ import annotations

import netrc
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from infra.doctor.check import Check, Finding, Look, absent, doubtful, fine, found
from infra.doctor.machine import installed
from infra.host.secrets import masked
from infra.hub.target import check_hub, endpoint_now, open_hub
from infra.prefect_server import (
    KeyRefused,
    ServerInfo,
    http_status,
    server_status,
)
from infra.prefect_server import (
    check_server as check_prefect,
)
from infra.tracking import check_server, server_address, shown_address
from refiner_core.contract.errors import HubOutage, HubRefused, RefinerError

_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ANSWER_S = 8.0
_OF_TOKENS = "publishing to the Hub, and private or gated models"


def _hub_needed(look: Look) -> bool:
    return look.publishes or bool(look.needs_network)


def _switched_off() -> list[str]:
    return [n for n in _SWITCHES if os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE")]


def _switches(look: Look) -> Finding | None:
    if not (off := _switched_off()):
        return None
    stages = look.needs_network or (["publish"] if look.publishes else [])
    needing = f", and {', '.join(stages)} need the network" if stages else ""
    why = "where jobs run without network, refiner sets them itself"
    what = f"{', '.join(off)} set{needing}"
    return found(doubtful(stages), what, f"unset {' '.join(off)}", why)


def _endpoint(look: Look) -> Finding:
    address, needed = masked(endpoint_now()), _hub_needed(look)
    if look.offline or _switched_off():
        return found("missing", f"{address} was not asked (offline)")
    status = http_status(endpoint_now(), _ANSWER_S)
    if isinstance(status, int):
        return fine(f"{address} answers (HTTP {status})")
    why = "models and data from the Hub, publishing; through a proxy: `export https_proxy=…`"
    mend = f"curl --head {address}" if needed else ""
    return found(absent(needed), f"{address}: {masked(status)}", mend, why)


def _token(look: Look) -> Finding:
    from huggingface_hub import get_token

    where = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "what `hf auth login` has stored"
    if get_token() is None:
        return found(absent(look.publishes), "there is none", "hf auth login", _OF_TOKENS)
    if look.offline or _switched_off():
        return fine(f"there is one ({where}); it was not tried (offline)")
    try:
        with open_hub("me/any", look.config.publish, patience_s=_ANSWER_S / 2) as hub:
            return fine(f"{where}: {_owner(hub.whoami())}")
    except HubOutage:
        what = f"there is one ({where}); the Hub gives no answer about it"
        return found(absent(look.publishes), what, "hf auth whoami", _OF_TOKENS)
    except HubRefused as error:
        what = f"{where}: {error.what}"
        return found(doubtful(look.publishes), what, "hf auth login", _OF_TOKENS)


def _owner(who: Mapping[str, Any]) -> str:
    token = (who.get("auth") or {}).get("accessToken") or {}
    role = str(token.get("role") or "of unknown scope")
    return f"{who.get('name')}, {'fine-grained' if role == 'fineGrained' else role}"


def _publishing(look: Look) -> list[Finding]:
    if not look.publishes or look.offline or _switched_off():
        return []
    name = f"publishing to {look.config.publish.repo_id}"
    try:
        warnings = check_hub(look.config)
    except RefinerError as error:
        about_token = "token" in error.what.lower() or "logged in" in error.what.lower()
        mend = f"{look.command('run')} publish.repo_id=OWNER/NAME"
        mend = "hf auth login" if about_token else mend
        return [found("broken", masked(error.what), mend, masked(error.fix), name=name)]
    said = [found("warning", warning, "hf auth whoami", name=name) for warning in warnings]
    return said or [fine("the token may write there", name=name)]


# ---------------------------------------------------------------- W&B

_VIEWER = {"query": "query Viewer { viewer { username } }"}
_OF_TRACKING = "tracking.wandb=online, and `refiner track sync`"
_LOGIN = f"{sys.executable} -m wandb login"


def _online(look: Look) -> bool:
    return look.config.tracking.wandb == "online"


def _wandb_key(look: Look) -> Finding | None:
    if look.config.tracking.wandb == "disabled":
        return None
    address, online = server_address(), _online(look)
    key, shown = _stored_key(address), shown_address(address)
    if key is None:
        return found(absent(online), f"there is none for {shown}", _LOGIN, _OF_TRACKING)
    if look.offline or look.on_node:
        return fine(f"there is one for {shown}; not tried (offline)")
    try:
        check_server(address)
        name = _viewer(address, key)
    except RefinerError as error:
        mend = f"{look.command('run')} tracking.wandb=offline" if online else ""
        return found(absent(online), error.what, mend, _OF_TRACKING, name="server")
    except (httpx.HTTPError, ValueError) as error:
        what = f"{shown} does not say whose key it is ({type(error).__name__})"
        return found("warning", what, f"{_LOGIN} --verify")
    if name:
        return fine(f"of {name} at {shown}")
    return found(doubtful(online), f"{shown} does not take it", f"{_LOGIN} --relogin", _OF_TRACKING)


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
    url, auth = f"{address.rstrip('/')}/graphql", ("api", key)
    answer = httpx.post(url, json=_VIEWER, auth=auth, timeout=_ANSWER_S)
    if answer.status_code in (401, 403):
        return ""
    value = answer.raise_for_status().json()
    return str(((value.get("data") or {}).get("viewer") or {}).get("username") or "")


# ---------------------------------------------------------------- Prefect

_OF_PREFECT = "flow runs; the work itself goes on without them"


def _server(look: Look) -> Finding:
    status = server_status()
    if status.state == "yours" and status.info is not None:
        return _users(status.info)
    if status.state == "running" and status.info is not None:
        return _ours(status.info)
    if status.state == "starting":
        what = f"it lives and does not answer (yet); its log: {status.log}"
        return found("warning", what, "refiner server stop", _OF_PREFECT)
    return fine("none runs; `refiner run` starts one")


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
        check_prefect(info)
    except KeyRefused as error:
        return found(
            "warning", error.what, "export PREFECT_API_AUTH_STRING=USER:PASSWORD", _OF_PREFECT
        )
    except RefinerError as error:
        return found("warning", error.what, "unset PREFECT_API_URL", _OF_PREFECT)
    return fine(f"{masked(info.api_url)} (PREFECT_API_URL) answers")


# ---------------------------------------------------------------- network

_CONNECT_S = 6.0


def _compute_nodes(look: Look) -> Finding | None:
    if not look.on_slurm:
        return None
    if look.on_node:
        return _internet(look)
    if look.profile.network:
        return fine("reach the internet, says the profile (`network: true`)")
    local = ", ".join(look.needs_network) or "none of this recipe"
    return fine(
        "are taken to have no internet (profile: `network: false`): stages that need it run "
        f"on this machine ({local}), jobs have the offline switches set"
    )


def _internet(look: Look) -> Finding:
    """From a compute node: can it reach the Hub, whatever the profile says?"""
    address = urlsplit(endpoint_now())
    port = address.port or (443 if address.scheme == "https" else 80)
    says, shown = look.profile.network, masked(endpoint_now())
    try:
        socket.create_connection((address.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        what = f"{shown} is not reached ({error})"
        if says:
            return found("broken", what, "network: false", "a line of the profile", name="internet")
        return found(
            "missing", what, why="stages that need it run where `refiner` does", name="internet"
        )
    hint = "" if says else "; `network: true` in the profile would let stages use it"
    return fine(f"{shown} is reached{hint}", name="internet")


NETWORK = (Check("network", "compute nodes", _compute_nodes, limit_s=10),)
_STOP, _WHO = "refiner server stop", "hf auth whoami"
CHECKS = (
    Check("prefect", "server", _server, limit_s=15, hung=_STOP),
    Check("hub", "offline switches", _switches),
    Check("hub", "address", _endpoint, limit_s=12, needed=_hub_needed),
    Check("hub", "token", _token, limit_s=25, needed=lambda x: x.publishes, hung=_WHO),
    Check("hub", "publishing", _publishing, limit_s=30, needed=lambda x: x.publishes),
    Check("wandb", "key", _wandb_key, limit_s=25, needed=_online),
    *NETWORK,
)
