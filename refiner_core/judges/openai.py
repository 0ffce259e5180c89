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
from refiner_core.judges.calls import Call, Reply, plan_calls, read_reply, request_body
from refiner_core.judges.prompting import judge_prompts_digest

_RETRYABLE = frozenset({408, 429, *range(500, 600)})
_MAX_BACKOFF_S = 30.0


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
        calls = plan_calls(requests, self._config)
        if not calls:
            return []
        judgements = _run(self._judge_all(calls, self._headers()))
        found = {c.requests[0]: j for c, j in zip(calls, judgements, strict=True)}
        return [found[request] for request in requests]

    async def _judge_all(self, calls: Sequence[Call], headers: dict[str, str]) -> list[Judgement]:
        results: dict[int, Judgement] = {}
        queue = iter(enumerate(calls))
        workers = max(1, min(self._config.concurrency, len(calls)))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=workers),
            timeout=aiohttp.ClientTimeout(total=None),  # the deadline of a judgement is ours
            headers=headers,
        )
        async with session, asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(session, queue, results))
        return [results[index] for index in range(len(calls))]

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
        queue: Iterator[tuple[int, Call]],
        results: dict[int, Judgement],
    ) -> None:
        for index, call in queue:
            results[index] = await self._judge_one(session, call)

    async def _judge_one(self, session: aiohttp.ClientSession, call: Call) -> Judgement:
        body = request_body(call, self._config, structured=False)
        limit_s = self._config.timeout_s
        deadline, last = time.monotonic() + limit_s, _Retry("it was not asked yet")
        try:
            async with asyncio.timeout(limit_s):
                for attempt in range(self._config.max_retries + 1):
                    outcome = await self._try(session, body, call)
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
        self, session: aiohttp.ClientSession, body: dict[str, Any], call: Call
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
        reply = read_reply(raw, call)
        if isinstance(reply, Reply):
            return reply.judgements[0]
        return _failed(reply.detail) if reply.final else _Retry(reply.detail)


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
