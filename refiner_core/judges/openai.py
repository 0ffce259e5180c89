"""A judge behind any OpenAI-compatible server.

In: judge requests. Out: judgements, in order; a request that cannot be judged ends as ``failed``,
never as a number. One chat request per judgement, temperature and model from the configuration.

::

    requests ─ unique ─> workers (at most `concurrency`) ─> POST …/chat/completions ─> parse
                              ^── 408, 429, 5xx, lost connection, unreadable reply: wait, again ──┘

Each judgement has a deadline of ``timeout_s`` seconds, waiting included. The key is read from the
environment at each call and kept nowhere; replies of the server are quoted in no error, because
servers like to quote keys.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import aiohttp

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.types import Judgement, JudgeRequest
from refiner_core.judges.parsing import parse_judgement
from refiner_core.judges.prompting import judge_prompts_digest, render_prompt

_RETRYABLE = frozenset({408, 429, *range(500, 600)})
_MAX_BACKOFF_S = 30.0

#: The scores that a kind allows on the judge's scale; other kinds take the whole range.
_ALLOWED: dict[str, tuple[float, ...]] = {
    "citation_recall": (0.0, 1.0, 2.0),
    "citation_precision": (0.0, 2.0),
    "citation_needed": (0.0, 2.0),
}


class _Retry(NamedTuple):
    """Why a try failed, and how long the server asked to be left alone (seconds)."""

    reason: str
    after_s: float = 0.0


class OpenAIJudge:
    """Implements :class:`~refiner_core.contract.types.Judge` over HTTP.

    Parameters
    ----------
    config
        ``base_url`` is required. ``max_retries`` counts the tries after the first.
    first_backoff_s
        Wait after the first failed try; it doubles with each, up to 30 s, and is jittered.

    Raises
    ------
    ConfigurationError
        No usable ``base_url``, or an unknown version of the prompts.
    """

    def __init__(self, config: JudgeConfig, *, first_backoff_s: float = 0.5) -> None:
        if not (config.base_url or "").startswith(("http://", "https://")):
            raise ConfigurationError(
                "The openai judge has no usable `base_url`",
                expected="the address of a server, such as http://127.0.0.1:8000/v1",
                fix="judge.base_url",
            )
        judge_prompts_digest(config.prompt)  # an unknown version is refused now, not at step 1
        self._config = config
        self._url = f"{str(config.base_url).rstrip('/')}/chat/completions"
        self._first_backoff_s = first_backoff_s

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
        """One judgement per request, in order; identical requests are sent once.

        May be called from inside a running event loop: it then runs in a thread of its own.
        """
        unique = list(dict.fromkeys(requests))
        if not unique:
            return []
        headers = self._headers()
        found = dict(zip(unique, _run(self._judge_all(unique, headers)), strict=True))
        return [found[request] for request in requests]

    async def _judge_all(
        self, requests: Sequence[JudgeRequest], headers: dict[str, str]
    ) -> list[Judgement]:
        results: dict[int, Judgement] = {}
        queue = iter(enumerate(requests))
        workers = max(1, min(self._config.concurrency, len(requests)))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=workers),
            timeout=aiohttp.ClientTimeout(total=None),  # the deadline of a judgement is ours
            headers=headers,
        )
        async with session, asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(session, queue, results))
        return [results[index] for index in range(len(requests))]

    def _headers(self) -> dict[str, str]:
        name = self._config.api_key_env
        key = os.environ.get(name, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigurationError(
                f"The judge's key in {name} has characters that no header may carry",
                expected="printable ASCII",
                fix=f"export {name}=…",
            )
        return {"Authorization": f"Bearer {key}"} if key else {}

    async def _work(
        self,
        session: aiohttp.ClientSession,
        queue: Iterator[tuple[int, JudgeRequest]],
        results: dict[int, Judgement],
    ) -> None:
        for index, request in queue:
            results[index] = await self._judge_one(session, request)

    async def _judge_one(self, session: aiohttp.ClientSession, request: JudgeRequest) -> Judgement:
        body = {
            "model": self._config.model,
            "messages": render_prompt(self._config.prompt, request),
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_tokens,
        }
        limit_s = self._config.timeout_s
        deadline = time.monotonic() + limit_s
        last = _Retry("no reply yet")
        try:
            async with asyncio.timeout(limit_s):
                for attempt in range(self._config.max_retries + 1):
                    outcome = await self._try(session, body, _ALLOWED.get(request.kind))
                    if isinstance(outcome, Judgement):
                        return outcome
                    last = outcome
                    wait_s = max(self._backoff_s(attempt), outcome.after_s)
                    if attempt == self._config.max_retries or time.monotonic() + wait_s > deadline:
                        return _failed(f"gave up after {attempt + 1} tries, last: {last.reason}")
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            return _failed(f"no judgement within {limit_s:g} s, last: {last.reason}")
        raise AssertionError("unreachable: the last try returns")

    def _backoff_s(self, attempt: int) -> float:
        longest = min(_MAX_BACKOFF_S, self._first_backoff_s * 2.0**attempt)
        return longest * (0.5 + 0.5 * random.random())

    async def _try(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        allowed: tuple[float, ...] | None,
    ) -> Judgement | _Retry:
        try:
            # No redirects: they would carry the key to another server.
            async with session.post(self._url, json=body, allow_redirects=False) as response:
                if response.status in _RETRYABLE:
                    after_s = retry_after_s(response.headers.get("Retry-After"))
                    return _Retry(f"HTTP {response.status}", after_s)
                if response.status != 200:
                    return _failed(f"HTTP {response.status}")
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            return _Retry(type(error).__name__)
        return read_reply(raw, allowed)


def read_reply(raw: bytes, allowed: tuple[float, ...] | None) -> Judgement | _Retry:
    """The judgement in a chat completion; what another try might mend is a retry."""
    try:
        choice = json.loads(raw)["choices"][0]
        text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return _Retry("the reply is no chat completion")
    if finish == "abort":
        return _Retry("the server aborted the judgement")
    if finish not in (None, "stop"):
        return _failed(f"the judgement ended by {finish!r:.40}")
    if not isinstance(text, str):
        return _Retry("the reply is no chat completion")
    judgement = parse_judgement(text, allowed)
    return judgement if judgement.status == "scored" else _Retry(judgement.detail)


def retry_after_s(value: str | None) -> float:
    """Seconds in a ``Retry-After`` header (a number or an HTTP date); 0 where there is none."""
    if value is None:
        return 0.0
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _failed(detail: str) -> Judgement:
    return Judgement("failed", None, detail)


def _run(work: Coroutine[Any, Any, list[Judgement]]) -> list[Judgement]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()
