"""Requests to rollout servers, which are this process's own.

In: an endpoint and a body. Out: what came of it, as :mod:`refiner_core.http.client` says it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from refiner_core.contract.types import Endpoint
from refiner_core.http.client import CONNECT_S, Answered, Client, Lost


class Transport(Client):
    """A session of one event loop; to be made inside it."""

    def __init__(self) -> None:
        super().__init__("", CONNECT_S, own=True)

    async def complete(self, endpoint: Endpoint, body: bytes) -> Answered | Lost:
        """Ask for a completion; how long that may take is the caller's business."""
        return await self.post(f"{endpoint.url}/completions", endpoint, body)

    async def is_well(self, endpoint: Endpoint) -> bool:
        """Whether the server says that its engine lives."""
        return await self.probe(f"{root_of(endpoint)}/health", endpoint) == 200


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
