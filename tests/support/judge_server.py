"""A scripted OpenAI-compatible server on loopback, for tests of HTTP judges.

In: a function from (request body, number of this call from 0) to :class:`Reply`. It serves in a
thread of its own and keeps what it was asked.

>>> with JudgeServer(lambda body, call: score(2)) as server:
...     ...  # POST to server.base_url + "/chat/completions"
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """What one call gets. ``drop`` closes the connection without an answer."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drop: bool = False


Script = Callable[[dict[str, Any], int], Reply]


def completion(text: str | None, finish_reason: str = "stop", delay_s: float = 0.0) -> Reply:
    """A chat completion that says ``text``."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    body = json.dumps({"choices": [{**choice, "finish_reason": finish_reason}]})
    return Reply(body=body, delay_s=delay_s)


def score(value: float, delay_s: float = 0.0) -> Reply:
    """A chat completion with a score on the judge's scale."""
    return completion(json.dumps({"score": value}), delay_s=delay_s)


class JudgeServer:
    """Context manager; ``bodies`` and ``headers`` are those of the calls, in order of arrival."""

    def __init__(self, script: Script) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_in_flight = 0
        self.base_url = ""
        self._script = script
        self._in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        assert self._up.wait(10), "the judge server did not come up"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._up.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        call = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        reply = self._script(body, call)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await asyncio.sleep(reply.delay_s)
        finally:
            self._in_flight -= 1
        if reply.drop and request.transport is not None:
            request.transport.abort()
        return web.Response(
            status=reply.status,
            text=reply.body,
            headers=dict(reply.headers),
            content_type="application/json",
        )
