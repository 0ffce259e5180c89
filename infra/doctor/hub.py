"""Area ``hub``: whether the Hugging Face Hub answers, whose token is here, what it may do.

In: the environment (``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``) and what the recipe publishes. Out:
findings that name the token's owner and role, never the token. What publishing would be refused
for is asked by :mod:`infra.hub.target`, as before a run.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from infra.doctor.check import Check, Finding, Look, absent, doubtful
from infra.host.secrets import masked
from infra.hub.client import endpoint_now, open_hub
from infra.hub.target import check_hub
from refiner_core.contract.errors import HubOutage, HubRefused, RefinerError

_AREA = "hub"
_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ANSWER_S = 8.0


def _needed(look: Look) -> bool:
    return look.publishes or bool(look.needs_network)


def _switched_off() -> list[str]:
    return [n for n in _SWITCHES if os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE")]


def _switches(look: Look) -> Iterator[Finding]:
    if off := _switched_off():
        stages = look.needs_network or (["publish"] if look.publishes else [])
        needing = f", and {', '.join(stages)} need the network" if stages else ""
        yield Finding(
            *(_AREA, "offline switches", doubtful(stages)),
            f"{', '.join(off)} set{needing}",
            mend=f"unset {' '.join(off)}",
            why="where jobs run without network, refiner sets them itself",
        )


def _endpoint(look: Look) -> Iterator[Finding]:
    address = masked(endpoint_now())
    if look.offline or _switched_off():
        yield Finding(_AREA, "address", "missing", f"{address} was not asked (offline)")
        return
    try:
        request = urllib.request.Request(endpoint_now(), method="HEAD")
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            said = "answers"
    except urllib.error.HTTPError as error:
        said = f"answers (HTTP {error.code})"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield Finding(
            *(_AREA, "address", absent(_needed(look)), f"{address} does not answer ({reason})"),
            mend=_reach() if _needed(look) else "",
            why=_why(look),
        )
        return
    yield Finding(_AREA, "address", "ok", f"{address} {said}")


def _reach() -> str:
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    if any(os.environ.get(name) for name in proxies):
        return f"curl --head {masked(endpoint_now())}"
    return "export https_proxy=http://PROXY:PORT"


def _why(look: Look) -> str:
    stages = look.needs_network
    return f"stages {', '.join(stages)}" if stages else "models and data from the Hub, publishing"


def _token(look: Look) -> Iterator[Finding]:
    from huggingface_hub import get_token

    where = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "what `hf auth login` has stored"
    if get_token() is None:
        yield Finding(
            *(_AREA, "token", absent(look.publishes), "there is none"),
            mend="hf auth login",
            why="publishing to the Hub, and private or gated models",
        )
        return
    if look.offline or _switched_off():
        yield Finding(_AREA, "token", "ok", f"there is one ({where}); it was not tried (offline)")
        return
    try:
        with open_hub("me/any", look.config.publish, patience_s=_ANSWER_S / 2) as hub:
            who = hub.whoami()
    except HubOutage:
        yield Finding(
            *(_AREA, "token", absent(look.publishes)),
            f"there is one ({where}); the Hub gives no answer about it",
            mend="hf auth whoami",
            why="publishing to the Hub, and private or gated models",
        )
        return
    except HubRefused as error:
        yield Finding(
            *(_AREA, "token", doubtful(look.publishes), f"{where}: {error.what}"),
            mend="hf auth login",
            why="publishing to the Hub, and private or gated models",
        )
        return
    yield Finding(_AREA, "token", "ok", f"{where}: {_owner(who)}")


def _owner(who: Mapping[str, Any]) -> str:
    token = (who.get("auth") or {}).get("accessToken") or {}
    role = {"fineGrained": "fine-grained", "": "of unknown scope"}.get(
        str(token.get("role") or ""), str(token.get("role"))
    )
    return f"{who.get('name')}, {role}"


def _publishing(look: Look) -> Iterator[Finding]:
    if not look.publishes or look.offline or _switched_off():
        return
    name = look.config.publish.repo_id
    try:
        warnings = check_hub(look.config)
    except RefinerError as error:
        yield Finding(
            *(_AREA, f"publishing to {name}", "broken", masked(error.what)),
            mend=_mend(look, error),
            why=masked(error.fix),
        )
        return
    for warning in warnings:
        yield Finding(*(_AREA, f"publishing to {name}", "warning", warning), mend="hf auth whoami")
    if not warnings:
        yield Finding(_AREA, f"publishing to {name}", "ok", "the token may write there")


def _mend(look: Look, error: RefinerError) -> str:
    if "token" in error.what.lower() or "logged in" in error.what.lower():
        return "hf auth login"
    return f"{look.command('run')} publish.repo_id=OWNER/NAME"


CHECKS = (
    Check(_AREA, "offline switches", _switches),
    Check(_AREA, "address", _endpoint, limit_s=12, needed=_needed),
    Check(_AREA, "token", _token, limit_s=25, needed=lambda x: x.publishes, hung="hf auth whoami"),
    Check(_AREA, "publishing", _publishing, limit_s=30, needed=lambda x: x.publishes),
)
