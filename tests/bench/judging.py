"""What judging costs: `python -m tests.bench judging [--calls 12800] [--rounds 3]`.

A scripted server in a process of its own answers each call after 200 ms +- 50; 256 connections.
Paired rounds of the judge (planning, keys, store, retries, parsing: all of it), of bare aiohttp
that posts the same bodies and reads the score, and of httpx (fewer calls: it is slow). One JSON
line each: medians of wall time as a share of the latency bound (the delays that the server slept,
divided by the connections), CPU of this process per call, and the latency of calls.

Questions are those of real answers with their citations, where `../shared/data` is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx2

from infra.store.provenance import host
from refiner_core.contract.config import JudgeConfig, RewardConfig
from refiner_core.contract.types import Endpoint, Judgement, JudgeRequest, PromptRow
from refiner_core.http.client import Answered, Client, Lost
from refiner_core.judges.calls import plan_calls, request_body
from refiner_core.judges.openai import OpenAIJudge
from refiner_core.rewards import RewardInput, compute_rewards

CONNECTIONS, LATENCY_S, JITTER_S = 256, 0.2, 0.05
#: The rival that is slow gets this share of the calls.
SHARE_OF_HTTPX = 0.1
ROWS = Path(__file__).parents[3] / "shared" / "data" / "scholarqa" / "scholarqa_sft.jsonl"


class Round(NamedTuple):
    """One side, once."""

    wall_s: float
    cpu_s: float
    bound_s: float
    latencies_s: Sequence[float]
    calls: int


def main(argv: list[str] | None = None) -> int:
    """Measure all; 0 even where a goal is missed: the lines say so."""
    parser = argparse.ArgumentParser(prog="tests.bench judging")
    parser.add_argument("--calls", type=int, default=12_800)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args(argv)
    requests = questions(told.calls)
    sides: dict[str, Callable[[str], Round]] = {
        "judge": lambda url: _judge(url, requests),
        "bare aiohttp": lambda url: _timed(url, _aiohttp, bodies(requests)),
        "httpx": lambda url: _timed(
            url, _httpx, bodies(requests[: int(len(requests) * SHARE_OF_HTTPX)])
        ),
    }
    rounds: dict[str, list[Round]] = {side: [] for side in sides}
    with scripted_server() as url:
        for _ in range(told.rounds):
            for side, call in sides.items():
                rounds[side].append(call(url))
    for side, done in rounds.items():
        print(json.dumps(_line(side, done)), flush=True)
    return 0


def _line(side: str, rounds: Sequence[Round]) -> dict[str, Any]:
    share = statistics.median(r.bound_s / r.wall_s for r in rounds)
    cpu_ms = statistics.median(r.cpu_s / r.calls * 1000 for r in rounds)
    latencies = sorted(latency for r in rounds for latency in r.latencies_s)
    machine = host()
    line: dict[str, Any] = {
        "name": f"{rounds[0].calls} judgements over {CONNECTIONS} connections, {side}",
        "wall_s": round(statistics.median(r.wall_s for r in rounds), 2),
        "share_of_latency_bound": round(share, 3),
        "cpu_ms_per_call": round(cpu_ms, 3),
        "p50_ms": round(latencies[len(latencies) // 2] * 1000, 1),
        "p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1000, 1),
        "rounds": len(rounds),
        "machine": f"{machine['cpu']}, {machine['cores']} cores",
    }
    if side == "judge":
        line |= {
            "goal": "share >= 0.9, CPU <= 0.5 ms",
            "met": bool(share >= 0.9 and cpu_ms <= 0.5),
        }
    return line


# ---------------------------------------------------------------- what is asked


def questions(number: int) -> list[JudgeRequest]:
    """Distinct rubric and citation questions, as a step's rollouts ask them."""
    asked: dict[JudgeRequest, None] = {}

    class Noting:
        def judge(self, requests: Sequence[JudgeRequest]) -> list[Judgement]:
            asked.update(dict.fromkeys(requests))
            return [Judgement("scored", 1.0)] * len(requests)

    rows = _real_rows() if ROWS.is_file() else _made_up_rows()
    for turn in count():
        compute_rewards(
            [_rollout(prompt, answer, turn) for prompt, answer in rows],
            RewardConfig(rubric_source="static"),
            Noting(),
        )
        if len(asked) >= number:
            return random.Random(0).sample(list(asked), number)
    raise AssertionError("unreachable")


def _rollout(prompt: str, answer: str, turn: int) -> RewardInput:
    row = PromptRow(f"row-{turn}", f"In view {turn}?", prompt, (1,), rubrics="{}")
    return RewardInput(row, answer, stopped=True)


def _real_rows() -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    return [
        (row["conversations"][-2]["content"], row["conversations"][-1]["content"]) for row in rows
    ]


def _made_up_rows() -> list[tuple[str, str]]:
    words = ["farmers", "near", "the", "river", "mostly", "grow", "wheat", "in", "wet", "years"]
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        texts = [" ".join(draw.choices(words, k=60)) for _ in range(4)]
        evidence = "".join(f"<snippet id=S_{i}>{t}</snippet>" for i, t in enumerate(texts))
        claims = "".join(
            f"<snippet id=S_{i}>{' '.join(draw.choices(words, k=20))}</snippet> " for i in range(4)
        )
        rows.append((f"<tool_output>{evidence}</tool_output>", f"<answer>{claims}</answer>"))
    return rows


def bodies(requests: Sequence[JudgeRequest]) -> list[bytes]:
    """What the judge sends for them, made before the clock runs."""
    config = _config("http://127.0.0.1/v1")
    return [
        json.dumps(request_body(call, config, structured=True)).encode()
        for call in plan_calls(requests, config)
    ]


def _config(base_url: str) -> JudgeConfig:
    return JudgeConfig(kind="openai", model="m", base_url=base_url, concurrency=CONNECTIONS)


# ---------------------------------------------------------------- the sides


def _judge(url: str, requests: Sequence[JudgeRequest]) -> Round:
    latencies: list[float] = []
    post = Client.post

    async def timed(self: Client, url: str, endpoint: Endpoint, body: bytes) -> Answered | Lost:
        begun = time.perf_counter()
        answer = await post(self, url, endpoint, body)
        latencies.append(time.perf_counter() - begun)
        return answer

    Client.post = timed  # type: ignore[method-assign]
    slept = _slept_s(url)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        with OpenAIJudge(_config(url)) as judge:
            judgements = judge.judge(requests)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            usage = judge.usage()
    finally:
        Client.post = post  # type: ignore[method-assign]
    assert {j.score for j in judgements} == {1.0}
    assert usage.calls == len(requests)
    return Round(wall, cpu, (_slept_s(url) - slept) / CONNECTIONS, latencies, len(requests))


_Side = Callable[[str, Iterator[bytes], list[float]], Any]


def _timed(url: str, side: _Side, made: list[bytes]) -> Round:
    latencies: list[float] = []
    slept = _slept_s(url)
    wall, cpu = time.perf_counter(), time.process_time()
    asyncio.run(side(f"{url}/chat/completions", iter(made), latencies))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert len(latencies) == len(made)
    return Round(wall, cpu, (_slept_s(url) - slept) / CONNECTIONS, latencies, len(made))


async def _aiohttp(url: str, made: Iterator[bytes], latencies: list[float]) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        for body in made:
            begun = time.perf_counter()
            async with session.post(url, data=body) as response:
                _check(await response.read())
            latencies.append(time.perf_counter() - begun)

    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(CONNECTIONS)))


async def _httpx(url: str, made: Iterator[bytes], latencies: list[float]) -> None:
    async def work(client: httpx2.AsyncClient) -> None:
        for body in made:
            begun = time.perf_counter()
            response = await client.post(url, content=body)
            _check(response.content)
            latencies.append(time.perf_counter() - begun)

    limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    headers = {"Content-Type": "application/json"}
    async with httpx2.AsyncClient(limits=limits, timeout=120, headers=headers) as client:
        await asyncio.gather(*(work(client) for _ in range(CONNECTIONS)))


def _check(raw: bytes) -> None:
    text = json.loads(raw)["choices"][0]["message"]["content"]
    assert json.loads(text) == {"score": 2}


# ---------------------------------------------------------------- the server


class _Scripted(asyncio.Protocol):
    """As little HTTP as it takes: one request at a time on a connection, answered after a while."""

    slept_s = 0.0
    draw = random.Random(0)
    answer = json.dumps(
        {
            "choices": [{"message": {"content": '{"score": 2}'}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 300, "completion_tokens": 7},
        }
    ).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.rest = b""

    def data_received(self, data: bytes) -> None:
        self.rest += data
        head, complete, body = self.rest.partition(b"\r\n\r\n")
        if not complete:
            return
        if head.startswith(b"GET"):
            self.rest = b""
            self.say(json.dumps(_Scripted.slept_s).encode())
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) >= length:
            self.rest = b""
            delay_s = LATENCY_S + self.draw.uniform(-JITTER_S, JITTER_S)
            _Scripted.slept_s += delay_s
            asyncio.get_running_loop().call_later(delay_s, self.say, self.answer)

    def say(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(
        _Scripted, "127.0.0.1", 0, backlog=CONNECTIONS * 2
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def scripted_server() -> Iterator[str]:
    """Its base address."""
    command = [sys.executable, "-m", "tests.bench.judging", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        socket.create_connection(("127.0.0.1", port), 10).close()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def _slept_s(url: str) -> float:
    with urllib.request.urlopen(f"{url}/slept") as answer:
        return float(answer.read())


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        asyncio.run(_serve())
    else:
        sys.exit(main())
