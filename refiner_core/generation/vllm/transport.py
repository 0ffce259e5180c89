"""One HTTP request to a rollout server, as a value. Nothing here raises for what a server does.

In: an endpoint and a body. Out: :class:`Answered` or :class:`Lost`. No proxy is asked and no
redirect followed: rollout servers are on this machine, and their key is for them alone.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from refiner_core.contract.types import Endpoint
from refiner_core.judges.served.client import CONNECT_S, PROBE_S, authorization

#: Shorter than the patience of servers (uvicorn: 5 s), so that none ends a connection as we use it.
_KEEPALIVE_S = 4.0


class Answered(NamedTuple):
    """A status and the whole body."""

    status: int
    raw: bytes


class Lost(NamedTuple):
    """No answer, or one that broke off; ``error`` names what the client ran into."""

    error: str


class Transport:
    """A session of one event loop; to be made inside it."""

    def __init__(self) -> None:
        # How long a sample may take is the caller's business.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """End all connections; servers give up what was asked over them."""
        await self._session.close()

    async def complete(self, endpoint: Endpoint, body: bytes) -> Answered | Lost:
        """Ask for a completion."""
        try:
            async with self._session.post(
                f"{endpoint.url}/completions",
                data=body,
                headers=authorization(endpoint, ""),
                allow_redirects=False,
            ) as response:
                return Answered(response.status, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Lost(f"{type(error).__name__}: {error}".rstrip(": "))

    async def is_well(self, endpoint: Endpoint) -> bool:
        """Whether the server says that its engine lives."""
        try:
            async with self._session.get(
                f"{root_of(endpoint)}/health",
                headers=authorization(endpoint, ""),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=PROBE_S),
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


def root_of(endpoint: Endpoint) -> str:
    """The server's address without the path of the API, below which its own routes are not."""
    parts = urlsplit(endpoint.url)
    return f"{parts.scheme}://{parts.netloc}"


def said(raw: bytes, endpoint: Endpoint, most: int = 300) -> str:
    """What a server said, to be quoted: one line, without the key."""
    text = " ".join(raw[: 4 * most].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, "***")
    return text[:most]
