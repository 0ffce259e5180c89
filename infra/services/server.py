"""One server as a process: started, waited for until it answers, watched, ended with all it is.

In: a :class:`Server` (what to start, where it may listen, its key). Out: an :class:`Endpoint`, once
it has answered a chat request; or an error that names the line of its log that tells why not. It
runs under :mod:`infra.process.minder` in a session of its own: when this process is gone, by kill
-9 or with its node, the minder kills everything that the server has started. What it prints goes,
without the key, to this process's output.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from infra.host.secrets import MASK, masked
from infra.process.child import kill_leftovers
from infra.services.process import (
    NotReady,
    ServerProcess,
    Words,
    ask_server,
    server_environment,
    server_text,
)
from refiner_core.contract.config import JudgeConfig, ServeConfig
from refiner_core.contract.errors import ConfigurationError, KilledError
from refiner_core.contract.services import engine_of
from refiner_core.contract.types import Endpoint

_QUOTED = 300
#: Answers that another try may mend: the server is still getting ready, or busy.
_NOT_YET = frozenset({408, 425, 429, *range(500, 600)})
_NO_KEY = (401, 403)
_CHAT_S = 120.0
#: How long a server that has answered before may fail to, before it counts as hung.
SILENCE_S = 120.0
_WORDS = Words(
    "The judge's server",
    not_found="set judge.serve.python to the interpreter that has the engine, or make the "
    "command known in judge.serve.setup",
    mistake="correct judge.model, judge.revision or judge.serve.args",
    container="judge.serve.container",
    timeout="judge.serve.start_timeout_s",
    answer="an answer to a chat request",
    again="nothing; who needs it next starts it again",
)


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
    status, body = ask_server(endpoint, "/models", timeout_s)
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
    status, body = ask_server(endpoint, path, timeout_s)
    if status >= 500 and engine != "command":
        raise NotReady(f"HTTP {status} for its health{_quoted(body, endpoint)}")


def check_chat(
    endpoint: Endpoint, model: str, limit_field: str = "max_tokens", timeout_s: float = _CHAT_S
) -> None:
    """Ask for one token; ``limit_field`` is the server's name for how many.

    Raises
    ------
    NotReady
        No answer within ``timeout_s``, or one that says "later".
    Refuses
        Any other answer than a chat completion.
    """
    status, body = _chat(endpoint, model, limit_field, timeout_s)
    said = _quoted(body, endpoint)
    if status in _NOT_YET:
        raise NotReady(f"HTTP {status} for a chat request{said}")
    if status != 200:
        raise Refuses(f"HTTP {status} for a chat request{said}")
    try:
        json.loads(body)["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise Refuses(f"its answer to a chat request is no chat completion{said}") from error


def _chat(endpoint: Endpoint, model: str, limit_field: str, timeout_s: float) -> tuple[int, bytes]:
    message = {"role": "user", "content": "Answer with one word: ready?"}
    question = {"model": model, "messages": [message], limit_field: 1}
    return ask_server(endpoint, "/chat/completions", timeout_s, question)


def _quoted(body: bytes, endpoint: Endpoint) -> str:
    text = " ".join(body[: 4 * _QUOTED].decode(errors="replace").split())
    if endpoint.key:
        text = text.replace(endpoint.key, MASK)
    return f": {masked(text)[:_QUOTED]}" if text else ""


@dataclass(eq=False)
class Server(ServerProcess):
    """A judge's server; a context manager that leaves none of its processes behind.

    Attributes
    ----------
    judge
        The judge's configuration.
    mark
        Folder that marks the server's processes: what an earlier one has left under the same mark
        on this machine is ended first.
    weights
        Folder or Hub id that ``judge.model`` stands for.
    """

    judge: JudgeConfig
    mark: Path
    weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine = engine_of(self.judge)
        self._answered_at = 0.0

    def __enter__(self) -> Server:
        kill_leftovers(self.mark)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def words(self) -> Words:
        """See :class:`ServerProcess`."""
        return _WORDS

    @property
    def settings(self) -> ServeConfig:
        """See :class:`ServerProcess`."""
        return self.judge.serve

    @property
    def by_daemon(self) -> bool:
        """See :class:`ServerProcess`."""
        return super().by_daemon or self._engine == "command"

    def command(self) -> tuple[str, dict[str, str]]:
        """See :class:`ServerProcess`."""
        environment = server_environment(self._engine, self.key, str(self.mark))
        return server_text(self.judge, self.at, self.weights), environment

    def check(self) -> None:
        """See :class:`ServerProcess`; a server that says no, or lets strangers in, is refused.

        Raises
        ------
        ConfigurationError
            It does.
        """
        judge, endpoint, listed = self.judge, self.endpoint, list[str]()
        try:
            if self._engine == "transformers":  # it would list all that is in the Hub's cache
                check_health(endpoint, self._engine)
            else:
                listed = check_listing(endpoint)
            check_chat(endpoint, judge.model, judge.max_tokens_field)
        except Refuses as error:
            has = f". It has: {', '.join(listed)}" if listed and judge.model not in listed else ""
            raise ConfigurationError(
                f"The judge's server runs, but {error}{has}{self.where() or '.'}",
                expected=f"a server that takes chat requests for judge.model {judge.model!r}",
                fix="correct judge.model, judge.serve.args or judge.serve_command",
            ) from error
        reached = not self.host.startswith(("127.", "localhost", "::1"))
        stranger = Endpoint(self.at.url)
        question = (judge.model, judge.max_tokens_field, _CHAT_S)
        if self.key and reached and _chat(stranger, *question)[0] not in _NO_KEY:
            raise ConfigurationError(
                f"The judge's server at {self.at.url} answers who has no key, and everybody "
                "on the cluster reaches it.",
                expected="a server that asks for the key in REFINER_SERVER_KEY",
                fix="let judge.serve_command pass it on, or set judge.serve.where=beside",
            )
        self._answered_at = time.monotonic()

    def check_alive(self, *, ask: bool = True) -> None:
        """Raise unless it runs and, as far as it is asked now, has answered lately.

        Raises
        ------
        KilledError, StageFailed
            It has ended, has not answered for long, or lost its port.
        """
        if self.code is not None:
            raise self.ended("while it served")
        if not ask:
            return
        try:
            self.check_port()
            check_health(self.endpoint, self._engine)
            self._answered_at = time.monotonic()
        except NotReady as error:
            silent_s = time.monotonic() - self._answered_at
            if silent_s > SILENCE_S:
                raise KilledError(
                    f"The judge's server runs, but has not answered for {silent_s:.0f} s: {error}",
                    fix="nothing; another one is started",
                ) from error
