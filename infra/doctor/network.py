"""Area ``network``: proxies, loopback, and what compute nodes do not reach.

In: the environment and the profile. Out: findings; addresses are shown without names and passwords.
"""

from __future__ import annotations

import os
import socket
import urllib.parse

from infra.doctor.check import Check, Finding, Look, fine, found
from infra.host.secrets import masked
from infra.hub.target import endpoint_now
from infra.tracking import shown_address

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_CONNECT_S = 6.0


def _given(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def _proxy(look: Look) -> Finding:
    set_ = {name: _given(name) for name in _PROXIES if _given(name)}
    if not set_:
        return fine("none is set")
    shown = ", ".join(f"{name}={masked(shown_address(value))}" for name, value in set_.items())
    past = {part.strip() for part in _given("no_proxy").split(",")}
    if "*" in past or {"127.0.0.1", "localhost"} <= past:
        return fine(f"{shown}; not for this machine itself")
    what = f"{shown}, also for what is asked on this machine itself"
    mend = "export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost"
    why = "Prefect's server, judges and rollout servers answer on 127.0.0.1"
    return found("warning", what, mend, why)


def _loopback(look: Look) -> Finding:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        client.settimeout(_CONNECT_S)
        client.connect(server.getsockname())
    return fine("127.0.0.1 can be listened on and reached")


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
    address = urllib.parse.urlsplit(endpoint_now())
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


CHECKS = (
    Check("network", "proxy", _proxy),
    Check("network", "loopback", _loopback, limit_s=10),
    Check("network", "compute nodes", _compute_nodes, limit_s=10),
)
