"""Area ``network``: proxies, loopback, and what compute nodes do not reach.

In: the environment and the profile. Out: findings; addresses are shown without names and passwords.
"""

from __future__ import annotations

import os
import socket
import urllib.parse
from collections.abc import Iterator

from infra.doctor.check import Check, Finding, Look
from infra.host.secrets import masked
from infra.hub.client import endpoint_now
from infra.tracking import shown_address

_AREA = "network"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_CONNECT_S = 6.0


def _given(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def _proxy(look: Look) -> Iterator[Finding]:
    set_ = {name: _given(name) for name in _PROXIES if _given(name)}
    if not set_:
        yield Finding(_AREA, "proxy", "ok", "none is set")
        return
    shown = ", ".join(f"{name}={masked(shown_address(value))}" for name, value in set_.items())
    past = {part.strip() for part in _given("no_proxy").split(",")}
    if "*" in past or {"127.0.0.1", "localhost"} <= past:
        yield Finding(_AREA, "proxy", "ok", f"{shown}; not for this machine itself")
        return
    yield Finding(
        *(_AREA, "proxy", "warning", f"{shown}, also for what is asked on this machine itself"),
        mend="export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost",
        why="Prefect's server, judges and rollout servers answer on 127.0.0.1",
    )


def _loopback(look: Look) -> Iterator[Finding]:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(_CONNECT_S)
        client.connect(server.getsockname())
    yield Finding(_AREA, "loopback", "ok", "127.0.0.1 can be listened on and reached")


def _compute_nodes(look: Look) -> Iterator[Finding]:
    if not look.on_slurm:
        return
    stages = look.needs_network
    if look.on_node:
        yield _internet(look)
    elif look.profile.network:
        yield Finding(
            _AREA, "compute nodes", "ok", "reach the internet, says the profile (`network: true`)"
        )
    else:
        local = ", ".join(stages) or "none of this recipe"
        yield Finding(
            *(_AREA, "compute nodes", "ok"),
            "are taken to have no internet (profile: `network: false`): stages that need it run "
            f"on this machine ({local}), jobs have the offline switches set",
        )


def _internet(look: Look) -> Finding:
    """From a compute node: can it reach the Hub, whatever the profile says?"""
    address = urllib.parse.urlsplit(endpoint_now())
    port = address.port or (443 if address.scheme == "https" else 80)
    says = look.profile.network
    shown = masked(endpoint_now())
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_S):
            reached, why = True, ""
    except OSError as error:
        reached, why = False, f" ({error})"
    if reached:
        hint = "" if says else "; `network: true` in the profile would let stages use it"
        return Finding(_AREA, "internet", "ok", f"{shown} is reached{hint}")
    return Finding(
        *(_AREA, "internet", "broken" if says else "missing", f"{shown} is not reached{why}"),
        mend="network: false" if says else "",
        why="a line of the profile" if says else "stages that need it run where `refiner` does",
    )


CHECKS = (
    Check(_AREA, "proxy", _proxy),
    Check(_AREA, "loopback", _loopback, limit_s=10),
    Check(_AREA, "compute nodes", _compute_nodes, limit_s=10),
)
