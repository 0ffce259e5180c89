"""A scripted OpenAI-compatible server on loopback, for tests of HTTP judges.

In: a function from (request body, number of this call from 0) to :class:`Reply`. It serves in its
own thread, keeps its requests, and counts its replies:

>>> with JudgeServer(lambda body, call: score(2)) as server:
...     ...  # POST to server.base_url + "/chat/completions"

:class:`JudgeProcess` is the same in a process that can be killed and started again at its port; it
scores by :func:`verdict` and writes what it received into a file, which outlives it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

#: A delay from here on is a call that hangs.
HANGS_S = 20.0


@dataclass(frozen=True)
class Reply:
    """The reply to a call. ``drop`` closes the connection without an answer; ``truncate`` in the
    middle of the body; ``drip`` sends headers or body a byte at a time, without end."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drop: bool = False
    truncate: bool = False
    drip: Literal["", "headers", "body"] = ""

    @property
    def kind(self) -> str:
        """The key of its count: its status, or its way to fail."""
        if self.delay_s >= HANGS_S:
            return "hung"
        names = {"dropped": self.drop, "truncated": self.truncate, "dripped": bool(self.drip)}
        return next((name for name, is_so in names.items() if is_so), str(self.status))


Script = Callable[[dict[str, Any], int], Reply]


def completion(
    text: str | None,
    finish_reason: str = "stop",
    delay_s: float = 0.0,
    usage: Mapping[str, int] | None = None,
) -> Reply:
    """A chat completion that says ``text``."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    body: dict[str, Any] = {"choices": [{**choice, "finish_reason": finish_reason}]}
    if usage is not None:
        body["usage"] = usage
    return Reply(body=json.dumps(body), delay_s=delay_s)


def reasoning(body: Mapping[str, Any]) -> Reply:
    """The reply of a judge that reasons unless it is asked not to: cut by length, or a score."""
    if body.get("chat_template_kwargs") == {"enable_thinking": False}:
        return verdict(body)
    message = {"role": "assistant", "content": None, "reasoning_content": "Let me see: the answer"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 90, "completion_tokens": body["max_tokens"]}
    return Reply(body=json.dumps({"choices": [choice], "usage": usage}))


def score(value: float, delay_s: float = 0.0) -> Reply:
    """A chat completion with a score on the judge's scale."""
    return completion(json.dumps({"score": value}), delay_s=delay_s)


def digest_of(body: Mapping[str, Any], *more: object) -> int:
    """A number that depends on the question (and on ``more``) alone."""
    text = json.dumps([body["messages"], *more])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def verdict(body: Mapping[str, Any], delay_s: float = 0.0) -> Reply:
    """Yes or no by the question: the same one has the same answer everywhere."""
    return score(2 * (digest_of(body) % 2), delay_s)


class JudgeServer:
    """Context manager; ``bodies`` and ``headers`` are those of the calls, in order of arrival.

    ``kinds`` counts replies as they are decided on, ``probes`` the looks at ``/models``.
    """

    def __init__(self, script: Script, *, port: int = 0, models: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.kinds: Counter[str] = Counter()
        self.probes = 0
        self.models, self.models_delay_s = models, 0.0
        self.most_in_flight = 0
        self.base_url = ""
        self._script, self._port = script, port
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
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, backlog=1024, reuse_address=True)
        await site.start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        self.probes += 1
        await asyncio.sleep(self.models_delay_s)
        return web.json_response({"data": []}, status=self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        call = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        reply = self._script(body, call)
        self.kinds[reply.kind] += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            await asyncio.sleep(reply.delay_s)
        finally:
            self._in_flight -= 1
        transport = request.transport
        if reply.drop and transport is not None:
            transport.abort()
        if (reply.truncate or reply.drip) and transport is not None:
            await _ill(transport, reply)
        return web.Response(
            status=reply.status,
            text=reply.body,
            headers=dict(reply.headers),
            content_type="application/json",
        )


async def _ill(transport: asyncio.Transport, reply: Reply) -> None:
    """Write an incomplete answer."""
    transport.write(b"HTTP/1.1 200 OK\r\n")
    if reply.drip != "headers":
        transport.write(b"Content-Type: application/json\r\nContent-Length: 4000\r\n\r\n")
    if reply.truncate:
        transport.write(reply.body[:40].encode() or b'{"choices": [')
        transport.close()
        return
    drop = b"X-Wait: 1\r\n" if reply.drip == "headers" else b" "
    while not transport.is_closing():
        transport.write(drop)
        await asyncio.sleep(0.02)


class JudgeProcess:
    """A server process at a fixed port that answers by :func:`verdict`."""

    def __init__(self, folder: Path, *, delay_s: float = 0.0) -> None:
        self._log, self._delay_s = folder / "judge_calls.txt", delay_s
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def received(self) -> int:
        """Number of calls that reached it, over all restarts."""
        return len(self._log.read_bytes()) if self._log.exists() else 0

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "tests.support.judge_server"]
        values = [str(self.port), str(self._log), str(self._delay_s)]
        self._process = subprocess.Popen([*command, *values])
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the judge's process did not come up")

    def kill(self) -> None:
        """``kill -9``."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> JudgeProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _main(port: str, log: str, delay_s: str) -> None:
    with Path(log).open("ab", buffering=0) as file:

        def script(body: dict[str, Any], call: int) -> Reply:
            file.write(b".")
            return verdict(body, float(delay_s))

        with JudgeServer(script, port=int(port)):
            signal.pause()


if __name__ == "__main__":
    _main(*sys.argv[1:])
