"""Area ``hub``: whether the Hugging Face Hub answers, whose token is here, what it may do.

In: the environment (``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``) and what the recipe publishes. Out:
findings that name the token's owner and role, never the token. What publishing would be refused
for is asked by :func:`infra.hub.target.check_hub`, as before a run.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from infra.doctor.check import Check, Finding, Look, absent, doubtful, fine, found
from infra.host.secrets import masked
from infra.hub.target import check_hub, endpoint_now, open_hub
from refiner_core.contract.errors import HubOutage, HubRefused, RefinerError

_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_ANSWER_S = 8.0
_OF_TOKENS = "publishing to the Hub, and private or gated models"


def _needed(look: Look) -> bool:
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
    address = masked(endpoint_now())
    if look.offline or _switched_off():
        return found("missing", f"{address} was not asked (offline)")
    try:
        request = urllib.request.Request(endpoint_now(), method="HEAD")
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            return fine(f"{address} answers")
    except urllib.error.HTTPError as error:
        return fine(f"{address} answers (HTTP {error.code})")
    except (OSError, ValueError) as error:
        what = f"{address} does not answer ({getattr(error, 'reason', error)})"
    why = "models and data from the Hub, publishing"
    if look.needs_network:
        why = f"stages {', '.join(look.needs_network)}"
    proxies = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
    mend = "export https_proxy=http://PROXY:PORT"
    if any(os.environ.get(name) for name in proxies):
        mend = f"curl --head {address}"
    return found(absent(_needed(look)), what, mend if _needed(look) else "", why)


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


CHECKS = (
    Check("hub", "offline switches", _switches),
    Check("hub", "address", _endpoint, limit_s=12, needed=_needed),
    Check("hub", "token", _token, limit_s=25, needed=lambda x: x.publishes, hung="hf auth whoami"),
    Check("hub", "publishing", _publishing, limit_s=30, needed=lambda x: x.publishes),
)
