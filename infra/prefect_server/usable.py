"""Whether a Prefect server can be worked with: one clear refusal before anything is begun on it.

In: the user's own server, or ours. Out: that server, or why it cannot be used: it does not answer,
wants another key, is of another major version, or is none. Nothing here imports Prefect.
"""

from __future__ import annotations

import base64
import json
import os
import tomllib
from collections.abc import Mapping
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import httpx

from infra.host.secrets import masked
from infra.prefect_server.server import ServerError, ServerInfo, ensure_server
from refiner_core.contract.errors import ConfigurationError, UnsupportedError

_ANSWER_S = 6.0
_START_S = 120.0
#: Has no such address, and its client looks after versions.
_CLOUD = "https://api.prefect.cloud/"


class KeyRefused(ConfigurationError):
    """The server wants a key, or another one."""


def usable_server(wait_s: float = _START_S) -> ServerInfo:
    """A server that can be worked with: the user's own, or ours, which is started where it is not.

    From here on Prefect, once imported, uses this one.

    Raises
    ------
    RefinerError
        There is none; as of :func:`check_server`.
    """
    info = ensure_server(wait_s)
    check_server(info)
    os.environ.update(info.client_env())
    return info


def check_server(info: ServerInfo, env: Mapping[str, str] | None = None) -> None:
    """Refuse a server that cannot be worked with.

    Raises
    ------
    ServerError
        It does not answer, or not now.
    KeyRefused
        It wants a key, or another one.
    ConfigurationError
        It is no Prefect server.
    UnsupportedError
        Its major version is not that of the client here.
    """
    env = os.environ if env is None else env
    if info.api_url.startswith(_CLOUD):
        return
    named = masked(info.api_url) + ("" if info.ours else " (PREFECT_API_URL)")
    mend = "run `refiner server stop`" if info.ours else "correct PREFECT_API_URL, or unset it"
    settings = {**_profile(env), **env, **info.client_env()}
    headers = _headers(settings)
    try:
        with _client(settings, trust_env=not info.ours) as client:
            answer = client.get(f"{info.api_url}/admin/version", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        why = masked(str(error)) or type(error).__name__
        raise ServerError(
            f"The Prefect server {named} does not answer: {why}.",
            expected=f"an answer within {_ANSWER_S:.0f} s",
            fix=f"start it, or {mend}",
        ) from error
    if answer.status_code in (401, 403):
        raise KeyRefused(
            f"The Prefect server {named} answers {answer.status_code}: "
            f"{'the key is wrong' if 'Authorization' in headers else 'it wants a key'}.",
            expected="a key that it takes",
            fix=mend
            if info.ours
            else "export PREFECT_API_AUTH_STRING=USER:PASSWORD "
            "(or PREFECT_API_KEY), as the server has it",
        )
    if answer.status_code == 429 or answer.status_code >= 500:
        raise ServerError(
            f"The Prefect server {named} answers {answer.status_code}.",
            expected="it to be up",
            fix=f"try again when it is, or {mend}",
        )
    there, here = _version_in(answer), package_version("prefect")
    if not there:
        raise ConfigurationError(
            f"What answers at {named} is no Prefect server ({answer.status_code} "
            f"{answer.headers.get('content-type', '')}).",
            expected="the address of its API, which ends in /api",
            fix=mend,
        )
    if there.partition(".")[0] != here.partition(".")[0]:
        raise UnsupportedError(
            f"The Prefect server {named} has version {there}, and here is {here}.",
            expected="the same major version",
            fix=f"{mend}; or install prefect of the server's major version",
        )


def _version_in(answer: httpx.Response) -> str:
    """The version that a Prefect server says, as JSON; empty where it is something else."""
    try:
        said = answer.json()
    except ValueError:
        return ""
    fits = answer.status_code == 200 and isinstance(said, str) and said[:1].isdigit()
    return said if fits else ""


def _client(settings: Mapping[str, str], *, trust_env: bool) -> httpx.Client:
    """A client that trusts what Prefect's own would."""
    verify: Any = True
    if settings.get("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "").lower() in ("1", "true", "yes"):
        verify = False
    elif file := settings.get("PREFECT_API_SSL_CERT_FILE") or settings.get("SSL_CERT_FILE"):
        import ssl

        verify = ssl.create_default_context(cafile=file)
    return httpx.Client(
        timeout=_ANSWER_S, verify=verify, trust_env=trust_env, follow_redirects=True
    )


def _headers(settings: Mapping[str, str]) -> dict[str, str]:
    try:
        headers = dict(json.loads(settings.get("PREFECT_CLIENT_CUSTOM_HEADERS") or "{}"))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            "PREFECT_CLIENT_CUSTOM_HEADERS is no JSON object.",
            expected='such as {"X-Team": "nlp"}',
            fix="correct or unset it",
        ) from error
    if text := settings.get("PREFECT_API_AUTH_STRING"):
        headers["Authorization"] = f"Basic {base64.b64encode(text.encode()).decode()}"
    elif key := settings.get("PREFECT_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _profile(env: Mapping[str, str]) -> dict[str, str]:
    """The settings of Prefect's active profile: a key may stand there."""
    home = env.get("PREFECT_HOME") or "~/.prefect"
    try:
        found = tomllib.loads((Path(home).expanduser() / "profiles.toml").read_text())
    except (OSError, ValueError):  # none, or one that Prefect itself will refuse
        return {}
    active = env.get("PREFECT_PROFILE") or found.get("active", "")
    return {k: str(v) for k, v in found.get("profiles", {}).get(active, {}).items()}
