"""HTTP requests to servers of judges or rollouts, and the thread that runs them.

In: an address and a body. Out: the outcome, as a value: nothing here raises because of a server.
The key is read from the environment (or taken from the endpoint) at
each request and stored nowhere; redirects are not followed, because they would carry it elsewhere;
replies of external servers are never quoted, because servers like to quote keys. The environment's
proxy is used for https only: servers in a cluster are reached directly.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import os
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVarTuple, Unpack
from urllib.parse import urlsplit

import aiohttp

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Endpoint
from refiner_core.http.fleet import FleetServer

#: Limit on a judgement, bytes; longer replies are invalid.
LARGEST_REPLY = 8 << 20
#: A server that accepts no connection within this time is down, seconds.
CONNECT_S = 10.0
PROBE_S = 5.0
#: Shorter than the keep-alive of servers (uvicorn: 5 s), so that none closes a connection in use.
_KEEPALIVE_S = 4.0


class HttpAnswer(NamedTuple):
    """An answer; ``raw`` is read for status 200 only, and always for own servers."""

    status: int
    raw: bytes = b""
    retry_after_s: float = 0.0


class LostAnswer(NamedTuple):
    """No answer, or an incomplete one: ``refused`` (never sent), ``connection``, ``truncated``,
    ``too_long``; set by the caller: ``timeout`` and ``given_up``. ``error`` names the client's
    error."""

    reason: str
    error: str = ""


class Client:
    """A session of one event loop; must be created inside it.

    Parameters
    ----------
    api_key_env
        The variable with the key for endpoints without one.
    timeout_s
        Limit of a connection and of a probe.
    own
        Whether the servers were started by this process on this machine: no proxy
        is used, replies may be of any length, and those of any status are read.
    """

    def __init__(self, api_key_env: str, timeout_s: float, *, own: bool = False) -> None:
        self._api_key_env, self._own = api_key_env, own
        # Own servers are on this machine.
        self._proxy = functools.cache((lambda _: None) if own else proxy_of)
        self._probe_s = min(PROBE_S, timeout_s)
        # The caller sets the deadline of an answer.
        limits = aiohttp.ClientTimeout(total=None, sock_connect=min(CONNECT_S, timeout_s))
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=limits,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        )

    async def close(self) -> None:
        """Close all connections; servers abort their requests."""
        await self._session.close()

    async def post(self, url: str, endpoint: Endpoint, body: bytes) -> HttpAnswer | LostAnswer:
        """One request."""
        status = 0
        try:
            async with self._session.post(
                url,
                data=body,
                headers=authorization(endpoint, self._api_key_env),
                allow_redirects=False,
                proxy=self._proxy(url),
            ) as response:
                status = response.status
                if self._own:
                    return HttpAnswer(status, await response.read())
                if status != 200:
                    return HttpAnswer(
                        status, b"", retry_after_s(response.headers.get("Retry-After"))
                    )
                raw = await _read(response.content)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return LostAnswer("refused", self._words(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return LostAnswer("truncated" if status == 200 else "connection", self._words(error))
        return LostAnswer("too_long") if raw is None else HttpAnswer(status, raw)

    async def probe(self, url: str, endpoint: Endpoint) -> int:
        """The status of a server's answer; 0 without an answer."""
        try:
            async with self._session.get(
                url,
                headers=authorization(endpoint, self._api_key_env),
                allow_redirects=False,
                proxy=self._proxy(url),
                timeout=aiohttp.ClientTimeout(total=self._probe_s),
            ) as response:
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0

    async def alive(self, server: FleetServer) -> bool:
        """True if anything answers at the server's address."""
        status = await self.probe(server.models_url, server.endpoint)
        return 0 < status < 500 and status not in (408, 429)

    def _words(self, error: BaseException) -> str:
        name = type(error).__name__
        return f"{name}: {error}".rstrip(": ") if self._own else name


def proxy_of(url: str) -> str | None:
    """The proxy of ``HTTPS_PROXY`` and ``NO_PROXY`` for an https address; none for http."""
    parts = urlsplit(url)
    if parts.scheme != "https" or urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get("https")


async def _read(content: aiohttp.StreamReader) -> bytes | None:
    """The whole body; None if it is longer than any judgement."""
    chunk: bytes = await content.readany()
    if content.at_eof():
        return chunk
    chunks, size = [chunk], len(chunk)
    while chunk := await content.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > LARGEST_REPLY:
            return None
    return b"".join(chunks)


def authorization(endpoint: Endpoint, api_key_env: str) -> dict[str, str]:
    """The header with the key; empty without one.

    Raises
    ------
    ConfigurationError
        The key has characters that are invalid in a header.
    """
    key = endpoint.key or os.environ.get(api_key_env, "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            f"The server's key in {api_key_env} has characters that are invalid in a header",
            expected="printable ASCII",
            fix=f"export {api_key_env}=…",
        )
    return {"Authorization": f"Bearer {key}"}


def retry_after_s(value: str | None) -> float:
    """Seconds in a ``Retry-After`` header (a number or an HTTP date); 0 without one."""
    if value is None:
        return 0.0
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


_END_S = 10.0
_Values = TypeVarTuple("_Values")


class LoopThread:
    """Starts at once. Callbacks must not reference its owner, which would never be collected.

    Parameters
    ----------
    name
        Of the thread.
    opened
        Called first in the loop.
    closing
        Awaited last in the loop.
    failed
        Called in the loop with an exception of a call, or of ``opened``.
    """

    def __init__(
        self,
        name: str,
        opened: Callable[[], None],
        closing: Callable[[], Awaitable[None]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._opened, self._closing, self._failed = opened, closing, failed
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._over = False
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        """Call ``function`` in the loop.

        Raises
        ------
        RuntimeError
            The thread has ended.
        """
        with self._lock:
            if self._over:
                raise RuntimeError("its event loop has ended")
            self._loop.call_soon_threadsafe(self._call, function, *values)

    def end(self, *, timeout_s: float | None = _END_S) -> None:
        """End the loop; does nothing if it has ended, or in a forked process."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if not self._over:
                self._over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # garbage collection may run in it
            self._thread.join(timeout_s)

    def _call(self, function: Callable[[Unpack[_Values]], None], *values: *_Values) -> None:
        try:
            function(*values)
        except Exception as error:
            self._failed(error)  # otherwise it would be lost

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._call, self._opened)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._close())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _close(self) -> None:
        await self._closing()
