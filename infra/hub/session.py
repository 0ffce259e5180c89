"""The one HTTP session that the Hub's client gets from us: it waits, counts, and can be stopped.

In: the client's requests. Out: its responses; rate limits, outages and lost connections are waited
for within ``publish.patience_s``. The client has retries of its own, without a limit in time (six
tries, each after as long as the Hub asks for); they never see a failure, because this session
raises only what is final.
"""

from __future__ import annotations

import email.utils
import functools
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from huggingface_hub.utils._http import default_client_factory

from infra.hub.errors import Patience, in_our_words, outage

_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
#: The client asks this by the way, for words in its user agent, and does without an answer. It must
#: neither use up patience nor reach another Hub than the one that is published to.
_BY_THE_WAY = "/api/agent-harnesses"
_FINAL = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError)
#: The client repeats this one at once and for ever; here it is waited for.
_BUSY = "another conflicting operation is in progress"
_RATE_LIMIT = re.compile(r'"\w+"\s*;\s*r\s*=\s*0+\s*;\s*t\s*=\s*(\d+)')
#: Longer than anybody waits, and still a moment that a calendar has.
_MOST_S = 366 * 86_400.0
#: The client has one session in a process, so one publication at a time uses it.
_ONE_AT_A_TIME = threading.Lock()


@dataclass
class Traffic:
    """What went over the wire.

    Attributes
    ----------
    requests
        Requests sent, repeated ones included.
    sent_bytes
        Bytes of their bodies.
    """

    requests: int = 0
    sent_bytes: int = 0


class HubSession(httpx2.Client):
    """A session that bears with the Hub as long as ``patience`` lasts."""

    def __init__(self, repo_id: str, patience: Patience, timeout_s: float) -> None:
        super().__init__(follow_redirects=True, timeout=timeout_s, verify=_certificates())
        self.traffic = Traffic()
        #: What is being done, for messages.
        self.doing = "asking for the repository"
        self._repo_id, self._patience = repo_id, patience
        self._lock = threading.Lock()

    def request(self, method: str, url: Any, **kwargs: Any) -> httpx2.Response:
        """Send a request until there is an answer that is not a passing one.

        Raises
        ------
        HubOutage
            There was none as long as patience lasted.
        Interrupted
            A stop was asked for.
        """
        if str(url).endswith(_BY_THE_WAY):
            raise httpx2.ConnectError("not asked")
        if kwargs.get("timeout") is None:
            kwargs.pop("timeout", None)  # the client's "none" would mean to wait for ever
        body: Any = kwargs.get("data")
        begin = body.tell() if hasattr(body, "seek") else None
        failures = 0
        while True:
            self._patience.check()
            since = self._patience.now()
            try:
                response = super().request(method, url, **kwargs)
            except _FINAL:
                raise
            except httpx2.TransportError as error:
                why, asked = f"{type(error).__name__}: {error}".rstrip(": "), None
            else:
                if not _passing(response):
                    return response
                why, asked = _words(response), asked_wait(response)
            failures += 1
            if not self._patience.wait(failures, asked, since):
                raise outage(why, self.doing, self._repo_id, when=_when(asked)) from None
            if begin is not None:
                body.seek(begin)

    def pause(self, failures: int) -> bool:
        """Wait as after a failed request; False if patience is over."""
        return self._patience.wait(failures, None, self._patience.now())

    def send(self, request: httpx2.Request, **kwargs: Any) -> httpx2.Response:
        """Send one request, counted."""
        with self._lock:
            self.traffic.requests += 1
            self.traffic.sent_bytes += int(request.headers.get("Content-Length", 0))
        return super().send(request, **kwargs)


@contextmanager
def hub_session(
    repo_id: str, patience_s: float, timeout_s: float, should_stop: Callable[[], bool]
) -> Iterator[HubSession]:
    """Let the client use a session of ours until the end of the block."""
    with in_our_words("looking whether it may be asked", repo_id):
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE")
    with _ONE_AT_A_TIME:
        session = HubSession(repo_id, Patience(patience_s, should_stop), timeout_s)
        quiet = are_progress_bars_disabled()
        if not quiet:
            disable_progress_bars()
        huggingface_hub.set_client_factory(lambda: session)
        try:
            yield session
        finally:
            huggingface_hub.set_client_factory(default_client_factory)
            session.close()
            if not quiet:
                enable_progress_bars()


def asked_wait(response: httpx2.Response) -> float | None:
    """Seconds that the Hub asks to wait: its rate limit's reset, or ``Retry-After`` (seconds, or a
    date, which is compared with the Hub's own clock)."""
    if match := _RATE_LIMIT.search(response.headers.get("ratelimit", "")):
        return min(float(match.group(1)), _MOST_S)
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return min(float(value), _MOST_S)
    try:
        until = email.utils.parsedate_to_datetime(value)
        there = email.utils.parsedate_to_datetime(response.headers.get("date", ""))
        return max(0.0, (until - there).total_seconds())
    except (TypeError, ValueError):
        return None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than a request."""
    return httpx2.create_ssl_context()


def _passing(response: httpx2.Response) -> bool:
    """Whether the same request may get another answer a little later."""
    if response.status_code in _TRANSIENT:
        return True
    return response.status_code == 409 and _BUSY in response.text


def _words(response: httpx2.Response) -> str:
    said = response.headers.get("x-error-message") or response.reason_phrase
    return f"{response.status_code}: {said}"


def _when(asked_s: float | None) -> str:
    if asked_s is None:
        return ""
    then = datetime.now(UTC) + timedelta(seconds=asked_s)
    return f" It asks to wait {asked_s:.0f} s, until {then:%H:%M:%S} UTC."
