"""One server as a process: started, waited for until it answers, watched, ended with all it is.

In: a :class:`Server` (what to start, where it may listen, its key). Out: an :class:`Endpoint`, once
it has answered a chat request; or an error that names the line of its log that tells why not. It
runs under :mod:`infra.process.minder` in a session of its own: when this process is gone, by kill
-9 or with its node, the minder kills everything that the server has started. What it prints goes,
without the key, to this process's output.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import posixpath
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.host.processes import ProcessId
from infra.host.secrets import MASK, masked
from infra.process.child import kill_leftovers
from infra.services.process import (
    GRACE_S,
    Listening,
    PortTaken,
    ServerProcess,
    Words,
    error_line,
    free_port,
    server_environment,
    server_text,
)
from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, KilledError, StageFailed
from refiner_core.contract.services import engine_of
from refiner_core.contract.types import Endpoint

__all__ = ["GRACE_S", "SILENCE_S", "Order", "Server", "error_line", "node_address"]


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


log = logging.getLogger(__name__)

_POLL_S = 0.1
_TELL_EVERY_S = 1.0
_PORTS_TRIED = 5
#: How long a server that has answered before may fail to, before it counts as hung.
SILENCE_S = 120.0
_WORDS = Words(
    "The judge's server",
    not_found="set judge.serve.python to the interpreter that has the engine, or make the "
    "command known in judge.serve.setup",
    mistake="correct judge.model, judge.revision or judge.serve.args",
    container="judge.serve.container",
)


@dataclass(frozen=True)
class Order:
    """What to start.

    Attributes
    ----------
    judge
        The judge's configuration.
    mark
        Folder that marks the server's processes: what an earlier one has left under the same mark
        on this machine is ended first.
    key
        What it asks for; empty where it cannot (``transformers``).
    host
        Where it listens: a name or an address of this machine.
    weights
        Folder or Hub id that ``judge.model`` stands for.
    log
        Where its output is, for error messages.
    prefix
        Put before each line of its output.
    """

    judge: JudgeConfig
    mark: Path
    key: str = field(repr=False)
    host: str = "127.0.0.1"
    weights: str | None = None
    log: str = ""
    prefix: str = ""


class Server:
    """A server; a context manager that leaves none of its processes behind.

    Parameters
    ----------
    order
        What to start.
    should_stop
        Whether somebody wants this process to end, while it waits.
    tell
        Hears, while it starts, for how many seconds it has.
    """

    def __init__(
        self,
        order: Order,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        tell: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.order = order
        self._should_stop, self._tell = should_stop, tell
        self._running = ServerProcess(
            _WORDS,
            key=order.key,
            prefix=order.prefix,
            log_file=order.log,
            by_daemon=bool(order.judge.serve.container) or engine_of(order.judge) == "command",
        )
        self._port = 0
        self._answered_at = 0.0
        self.endpoint = Endpoint("")

    def __enter__(self) -> Server:
        kill_leftovers(self.order.mark)
        try:
            self._start()
        except BaseException:
            self.stop(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def process(self) -> ProcessId | None:
        """The process that minds it, as long as there is one."""
        return self._running.process

    # ------------------------------------------------------------ starting

    def _start(self) -> None:
        """Start it and wait until it answers; on another port if that is taken meanwhile.

        Raises
        ------
        ConfigurationError
            The command, an argument or the model is not there; or it lets strangers in.
        KilledError, StageFailed
            It ended, or did not answer in time.
        Interrupted
            Somebody wanted this process to end.
        """
        for left in reversed(range(_PORTS_TRIED)):
            self._launch()
            try:
                self._wait_until_ready()
            except PortTaken as taken:
                if not left:
                    raise
                log.warning("%s; trying another one", taken.what)
                self.stop(0.0)
            else:
                return

    def _launch(self) -> None:
        order = self.order
        at = Listening(order.host, free_port(order.host))
        text = server_text(order.judge, at, order.weights)
        self._port = at.port
        self.endpoint = Endpoint(at.url, order.key)
        environment = server_environment(engine_of(order.judge), order.key, str(order.mark))
        self._running.launch(text, environment, bash=bool(order.judge.serve.setup))

    def _wait_until_ready(self) -> None:
        began = told = time.monotonic()
        limit_s, why = self.order.judge.serve.start_timeout_s, ""
        while True:
            if self._running.code is not None:
                raise self._running.ended("before it answered")
            try:
                self._check()
            except NotReady as error:
                why = str(error)
            else:
                log.info("it answers at %s", self.endpoint.url)
                return
            now = time.monotonic()
            if self._should_stop():
                raise Interrupted(
                    "The judge's server was asked to end before it answered",
                    fix="nothing; who needs it next starts it again",
                )
            if now - began > limit_s:
                raise self._late(limit_s, why)
            if now - told >= _TELL_EVERY_S:
                told = now
                self._tell(now - began)
            time.sleep(_POLL_S)

    def _check(self) -> None:
        """Ask it whether it is ready.

        Raises
        ------
        NotReady
            Not yet.
        PortTaken
            Somebody else listens at its port.
        ConfigurationError
            It says no, or lets strangers in.
        """
        self._check_port()
        judge = self.order.judge
        asked = Asked(judge.model, judge.max_tokens_field)
        listed: list[str] = []
        engine = engine_of(judge)
        try:
            if engine == "transformers":  # it would list all that is in the Hub's cache
                check_health(self.endpoint, engine)
            else:
                listed = check_listing(self.endpoint)
            check_chat(self.endpoint, asked)
        except Refuses as error:
            has = f" It has: {', '.join(listed)}." if listed and judge.model not in listed else ""
            raise ConfigurationError(
                f"The judge's server runs, but {error}.{has}{self._running.where()}",
                expected=f"a server that takes chat requests for judge.model {judge.model!r}",
                fix="correct judge.model, judge.serve.args or judge.serve_command",
            ) from error
        if self.order.key and self._is_open_to_others() and lets_strangers_in(self.endpoint, asked):
            raise ConfigurationError(
                f"The judge's server at {self.endpoint.url} answers who has no key, and everybody "
                "on the cluster reaches it.",
                expected="a server that asks for the key in REFINER_SERVER_KEY",
                fix="let judge.serve_command pass it on, or set judge.serve.where=beside",
            )
        self._answered_at = time.monotonic()

    def _check_port(self) -> None:
        if not self._running.listens_at(self._port):
            raise NotReady(f"it does not listen at {self.endpoint.url}")

    def _is_open_to_others(self) -> bool:
        return not self.order.host.startswith(("127.", "localhost", "::1"))

    # ------------------------------------------------------------ watching

    def check_alive(self, *, ask: bool = True) -> None:
        """Raise unless it runs and, as far as it is asked now, has answered lately.

        Raises
        ------
        KilledError, StageFailed
            It has ended, has not answered for long, or lost its port.
        """
        if self._running.code is not None:
            raise self._running.ended("while it served")
        if not ask:
            return
        try:
            self._check_port()
            check_health(self.endpoint, engine_of(self.order.judge))
            self._answered_at = time.monotonic()
        except NotReady as error:
            silent_s = time.monotonic() - self._answered_at
            if silent_s > SILENCE_S:
                raise KilledError(
                    f"The judge's server runs, but has not answered for {silent_s:.0f} s: {error}",
                    fix="nothing; another one is started",
                ) from error

    # ------------------------------------------------------------ ending

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End it: SIGTERM to all its processes, time to end, then SIGKILL."""
        self._running.stop(grace_s)

    def _late(self, limit_s: float, why: str) -> StageFailed:
        said = self._running.last_word()
        return StageFailed(
            f"The judge's server has not answered within {limit_s:g} s ({why}). Its last word: "
            f"{said}.{self._running.where()}",
            expected="an answer to a chat request by then",
            fix="set judge.serve.start_timeout_s higher, or see what it waits for",
        )


def node_address() -> str:
    """An address of this machine that other nodes reach: that of its name, or of its way out."""
    with contextlib.suppress(OSError):
        for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            address = str(found[4][0])
            if not address.startswith("127."):
                return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system only looks for the way
        return str(probe.getsockname()[0])
    return "127.0.0.1"
