"""A simulated user at an OpenAI-compatible endpoint.

In: a conversation as the user sees it. Out: what they say next, or an
:class:`~refiner_core.environments.protocol.InfrastructureError`. For environments of one's own;
tau2-bench brings its own simulator.

Requests go over the judges' client (:mod:`refiner_core.http.client`), in an event loop of
their own, so that any number of threads may ask at a time. What may pass (no connection, 408, 409,
425, 429, 5xx, no answer in time, an answer that cannot be used) is tried again after a pause with
full jitter; other refusals are final. The key is read from the environment at each request and is
kept, pickled and quoted nowhere; neither is what a server says, because servers quote keys.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from refiner_core.contract.config import UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Endpoint
from refiner_core.environments.protocol import InfrastructureError
from refiner_core.http.client import Answered, Client, Flight, LoopThread, Lost, authorization
from refiner_core.http.fleet import Fleet, Server

_PASSING = frozenset({408, 409, 425, 429})
_MAX_BACKOFF_S = 30.0
_MOST_TOKENS = 2**31
_THOUGHT = "</think>"
#: Of its own: how long was waited is no part of a training's random states.
_JITTER = random.Random()


class Said(NamedTuple):
    """Words of the user, and the tokens that the server counted for it (0 where it does not)."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class UserUsage:
    """Costs of a simulated user. ``requests`` counts every try, ``messages`` what was said."""

    messages: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Trouble(NamedTuple):
    """Reason why a try gave nothing; ``final``: another one gives the same."""

    kind: str
    detail: str
    final: bool = False
    wait_s: float = 0.0


class SimulatedUser:
    """Asks a model what the user says. Any number of threads may use one; picklable.

    Parameters
    ----------
    config
        Model, endpoint and limits; ``timeout_s`` is that of one try, and ``max_retries`` counts the
        tries after the first.
    first_backoff_s
        Longest pause after the first try; it doubles with each, up to 30 s.

    Raises
    ------
    ConfigurationError
        There is no model or no address.
    """

    def __init__(self, config: UserConfig, *, first_backoff_s: float = 0.5) -> None:
        if not config.model or not config.base_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                "A simulated user needs a model and the address of its server.",
                expected="user.model, and user.base_url such as http://127.0.0.1:8000/v1",
                fix="set both, or leave both empty for the environment's own user",
            )
        self._config, self._first_backoff_s = config, first_backoff_s
        self._lock = threading.Lock()
        self._usage = UserUsage()
        self._asked: _Asked | None = None

    def say(self, messages: Sequence[Mapping[str, str]], *, seed: int | None = None) -> Said:
        """What the user says next.

        Parameters
        ----------
        messages
            As the endpoint takes them: ``role`` and ``content``, the user being the *assistant*
            there.
        seed
            Passed on to the server, which may or may not sample by it.

        Raises
        ------
        InfrastructureError
            ``user_down``, ``user_slow`` or ``user_off_script``, by what the last try ran into.
        ConfigurationError
            The key has characters that no header can carry.
        """
        authorization(Endpoint(""), self._config.api_key_env)  # refused here, not by the thread
        body = self._body(messages, seed)
        trouble = _Trouble("user_down", "not asked")
        for number in range(self._config.max_retries + 1):
            if number:
                longest = min(_MAX_BACKOFF_S, self._first_backoff_s * 2.0 ** (number - 1))
                asked = min(trouble.wait_s, self._config.timeout_s)
                time.sleep(asked + _JITTER.random() * longest)
            asked_of = self._running()
            answer = asked_of.thread.run(asked_of.ask(body, self._config.timeout_s))
            self._count(requests=1)
            read = _read(answer)
            if isinstance(read, Said):
                prompt, own = read.prompt_tokens, read.completion_tokens
                self._count(messages=1, prompt_tokens=prompt, completion_tokens=own)
                return read
            trouble = read
            if trouble.final:
                break
        raise user_failed(self._config, trouble.kind, f"{trouble.detail}; tries: {number + 1}")

    def usage(self) -> UserUsage:
        """Costs since it was made."""
        return self._usage

    def close(self) -> None:
        """End connections and thread; it may be asked again all the same."""
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked.thread.end()

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self._config, "first_backoff_s": self._first_backoff_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["config"], first_backoff_s=state["first_backoff_s"]
        )

    def _body(self, messages: Sequence[Mapping[str, str]], seed: int | None) -> bytes:
        body: dict[str, Any] = {
            "model": self._config.model,
            "messages": [dict(message) for message in messages],
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        if seed is not None:
            body["seed"] = seed
        return json.dumps(body).encode()

    def _running(self) -> _Asked:
        with self._lock:
            if self._asked is None:
                self._asked = _Asked(self._config)
                weakref.finalize(self, self._asked.thread.end, wait=False)
            return self._asked

    def _count(self, **more: int) -> None:
        with self._lock:
            now = asdict(self._usage)
            self._usage = UserUsage(**{name: n + more.get(name, 0) for name, n in now.items()})


def user_failed(user: UserConfig, kind: str, detail: str) -> InfrastructureError:
    """The error of a simulated user that is down, slow or off-script."""
    words, fix = {
        "user_down": (
            "could not be asked",
            f"check its base_url, model and key ({user.api_key_env}), and its server",
        ),
        "user_slow": (
            f"did not answer within {user.timeout_s:g} s",
            "raise the user's timeout_s, or give its server more room",
        ),
        "user_off_script": (
            "gave no usable answer",
            "use a model that follows instructions (and calls its tools, on a server that reads "
            "calls), or raise the user's max_tokens",
        ),
    }[kind]
    return InfrastructureError(
        f"The simulated user {user.model} {words} ({detail}).",
        kind=kind,
        expected="one message of the user, or calls of its tools",
        fix=fix,
    )


class _Asked:
    """The user's server, asked in an event loop of its own."""

    def __init__(self, config: UserConfig) -> None:
        fleet = Fleet(time.monotonic)
        fleet.renew([Endpoint(config.base_url)])
        self.server: Server = fleet.servers[0]
        self.thread = LoopThread("simulated-user", closing=self._close)
        self._client = self.thread.run(self._open(config))

    @staticmethod
    async def _open(config: UserConfig) -> Client:
        return Client(config.api_key_env, config.timeout_s)

    async def _close(self) -> None:
        await self._client.close()

    async def ask(self, body: bytes, patience_s: float) -> Answered | Lost:
        """One request."""
        begun = time.monotonic()
        flight = Flight(self.server, begun, begun + patience_s)
        try:
            async with asyncio.timeout(patience_s):
                return await self._client.ask(flight, body)
        except TimeoutError:
            return Lost("timeout")


def _read(answer: Answered | Lost) -> Said | _Trouble:
    """Words of an answer, or why it says nothing."""
    if isinstance(answer, Lost):
        if answer.reason == "timeout":
            return _Trouble("user_slow", "no answer in time")
        if answer.reason == "too_long":
            return _Trouble("user_off_script", "an answer without end")
        return _Trouble("user_down", " ".join((answer.reason, answer.error)).strip())
    status = answer.status
    if status != 200:
        passing = status in _PASSING or status >= 500
        return _Trouble("user_down", f"HTTP {status}", not passing, answer.retry_after_s)
    try:
        values = json.loads(answer.raw)
        text = values["choices"][0]["message"]["content"]
        usage = values.get("usage") or {}
        counts = [_tokens(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return _Trouble("user_off_script", "no chat completion")
    if not isinstance(text, str):
        return _Trouble("user_off_script", "no text")
    said = text.rpartition(_THOUGHT)[2].strip()  # what a thinking model thought is not said
    if not said:
        return _Trouble("user_off_script", "nothing was said")
    return Said(said, *counts)


def _tokens(value: Any) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS
    return int(value) if good else 0
