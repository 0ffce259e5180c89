"""Whether a server answers as a judge would need it to.

In: its address, key and model. Out: nothing, or why not. Two questions are asked: which models it
has (most engines open their port only when the weights are loaded), and one tiny chat request, for
a broken engine may well list its models. What a server says is quoted without the key.
"""

from __future__ import annotations

import http.client
import json
import posixpath
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from infra.host.secrets import MASK, masked
from refiner_core.contract.types import Endpoint

_QUOTED = 300
#: Answers that another try may mend: the server is still getting ready, or busy.
_NOT_YET = frozenset({408, 425, 429, *range(500, 600)})
_NO_KEY = (401, 403)


@dataclass(frozen=True)
class Asked:
    """The model and how much of an answer is asked for (the server's name for that limit)."""

    model: str
    limit_field: str = "max_tokens"


class NotReady(Exception):
    """It does not answer (yet)."""


class Refuses(Exception):
    """It answers, and says no in a way that waiting does not mend."""


def check_listing(endpoint: Endpoint, timeout_s: float = 10.0) -> list[str]:
    """Names of the models that it has; empty for servers that list none.

    Raises
    ------
    NotReady
        Nobody answers there, or with an error of its own.
    Refuses
        It does not take the key.
    """
    status, body = _ask(endpoint, "/models", None, timeout_s)
    if status in _NO_KEY:
        raise Refuses(f"it does not take its own key (HTTP {status} for /models)")
    if status != 200:
        return []  # no list is no failure: the chat request tells
    try:
        return [str(entry["id"]) for entry in json.loads(body)["data"]]
    except (ValueError, LookupError, TypeError):
        return []


def check_health(endpoint: Endpoint, engine: str, timeout_s: float = 10.0) -> None:
    """Ask whether it is still there: engines that say how they are, else for the list of models.

    Raises
    ------
    NotReady
        Nobody answers there, or the engine says that it is not well.
    """
    path = "/models" if engine == "command" else "/../health"
    status, body = _ask(endpoint, path, None, timeout_s)
    if status >= 500 and engine != "command":
        raise NotReady(f"HTTP {status} for its health{_quoted(body, endpoint)}")


def check_chat(endpoint: Endpoint, asked: Asked, timeout_s: float = 120.0) -> None:
    """Ask for one token.

    Raises
    ------
    NotReady
        No answer within ``timeout_s``, or one that says "later".
    Refuses
        Any other answer than a chat completion.
    """
    status, body = _ask(endpoint, "/chat/completions", _question(asked), timeout_s)
    said = _quoted(body, endpoint)
    if status in _NOT_YET:
        raise NotReady(f"HTTP {status} for a chat request{said}")
    if status != 200:
        raise Refuses(f"HTTP {status} for a chat request{said}")
    try:
        json.loads(body)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise Refuses(f"its answer to a chat request is no chat completion{said}") from error


def lets_strangers_in(endpoint: Endpoint, asked: Asked, timeout_s: float = 120.0) -> bool:
    """Whether it answers who has no key."""
    stranger = Endpoint(endpoint.url)
    status, _ = _ask(stranger, "/chat/completions", _question(asked), timeout_s)
    return status not in _NO_KEY


def _question(asked: Asked) -> dict[str, Any]:
    message = {"role": "user", "content": "Answer with one word: ready?"}
    return {"model": asked.model, "messages": [message], asked.limit_field: 1}


def _ask(
    endpoint: Endpoint, path: str, body: dict[str, Any] | None, timeout_s: float
) -> tuple[int, bytes]:
    """Status and body. No proxies, no redirects: the key is for this server alone."""
    parts = urlsplit(endpoint.url)
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    data = None if body is None else json.dumps(body)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        route = posixpath.normpath(parts.path + path)
        connection.request("GET" if body is None else "POST", route, data, headers)
        response = connection.getresponse()
        return response.status, response.read(1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise NotReady(f"no answer from {endpoint.url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _quoted(body: bytes, endpoint: Endpoint) -> str:
    text = " ".join(body[: 4 * _QUOTED].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, MASK)
    return f": {masked(text)[:_QUOTED]}" if text else ""
