"""A judge over HTTP: requests, retries, deadlines, costs, outages and keys.

Against a scripted server with counters of its own. Whole steps under faults are in
``tests/integration/test_judge_faults.py``, the rules of breakers in ``test_judges.py``.
"""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from refiner_core.contract.config import JudgeConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, JudgeOutage
from refiner_core.contract.types import Endpoint, Judgement, JudgeRequest, StreamingJudge
from refiner_core.http.fleet import BreakerSettings
from refiner_core.judges import build_judge
from refiner_core.judges.context import JudgeContext
from refiner_core.judges.openai import OpenAIJudge
from tests.support.judge_server import JudgeServer, Reply, completion, score

RUBRIC = JudgeRequest("rubric", "Which crop?", "The crop is wheat.", "Names the crop")
QUICK = BreakerSettings(first_cooldown_s=0.02, longest_cooldown_s=0.1)
NOBODY = "http://127.0.0.1:9/v1"
Body = dict[str, Any]


@pytest.fixture
def made() -> Iterator[list[OpenAIJudge]]:
    """Judges that are closed at the end of a test."""
    judges: list[OpenAIJudge] = []
    yield judges
    for judge in judges:
        judge.close()


@pytest.fixture
def judge_at(made: list[OpenAIJudge]) -> Any:
    def make(
        base_url: str | None, around: JudgeContext | None = None, **changes: Any
    ) -> OpenAIJudge:
        config = JudgeConfig(kind="openai", model="m", base_url=base_url, max_retries=2)
        quick = {"timeout_s": 20.0, "structured_output": "none"}
        config = replace(config, **(quick | changes))
        made.append(OpenAIJudge(config, around, first_backoff_s=0.01, breaker=QUICK))
        return made[-1]

    return make


def requests(count: int) -> list[JudgeRequest]:
    return [replace(RUBRIC, text=f"answer {i}") for i in range(count)]


def number(body: Body) -> int:
    return int(body["messages"][1]["content"].split("answer ")[1].split()[0])


# ---------------------------------------------------------------- requests


def test_judgements_come_back_in_order_and_identical_requests_are_sent_once(judge_at: Any) -> None:
    """Also inside an event loop, as in a notebook."""

    def script(body: Body, call: int) -> Reply:
        return score(number(body) % 3, delay_s=0.002 * (7 - number(body)))

    async def inside(judge: OpenAIJudge) -> list[Judgement]:
        return judge.judge(requests(7) * 2)

    with JudgeServer(script) as server:
        judge = judge_at(server.base_url)
        judgements = asyncio.run(inside(judge))
    assert [j.score for j in judgements] == [n % 3 / 2 for n in range(7)] * 2
    assert len(server.bodies) == 7
    body = server.bodies[0]
    assert (body["temperature"], body["model"], body["max_tokens"]) == (0.0, "m", 512)
    assert isinstance(judge, StreamingJudge)


def test_known_and_pending_questions_are_shared_and_calls_in_flight_are_limited(
    judge_at: Any,
) -> None:
    with JudgeServer(lambda body, call: score(2, delay_s=0.05)) as server:
        judge = judge_at(server.base_url, concurrency=3)
        first, second = judge.submit(requests(4)), judge.submit(requests(6))
        assert first() == second()[:4]
        judge.judge(requests(6) * 2)
    usage = judge.usage()
    assert (usage.asked, usage.calls, usage.shared, usage.stored) == (22, 6, 4, 12)
    assert len(server.bodies) == 6
    assert server.most_in_flight == 3


def test_all_rubrics_of_an_answer_are_one_call_in_the_batched_form_and_cost_is_counted(
    judge_at: Any,
) -> None:
    scores = [{"criterion": n, "score": n - 1} for n in (1, 2, 3)]
    tokens = {"prompt_tokens": 7, "completion_tokens": 3}
    reply = completion(json.dumps({"scores": scores}), delay_s=0.02, usage=tokens)
    asked = [replace(RUBRIC, reference=f"criterion {n}") for n in range(3)]
    with JudgeServer(lambda body, call: reply) as server:
        judge = judge_at(server.base_url, form="batched")
        assert [j.score for j in judge.judge([*asked, *asked])] == [0.0, 0.5, 1.0] * 2
    usage = judge.usage()
    assert (usage.calls, usage.asked, usage.shared, usage.answers) == (1, 6, 3, {200: 1})
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)
    assert usage.latency_s >= 0.02


# ---------------------------------------------------------------- retries


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=500),
        Reply(status=429),
        Reply(drop=True),
        Reply(body="garbage"),
        completion('{"score": 10}'),
        completion('{"score": 2}', finish_reason="abort"),
    ],
)
def test_a_passing_fault_is_tried_again_and_a_lasting_one_fails(bad: Reply, judge_at: Any) -> None:
    with JudgeServer(lambda body, call: bad if call < 2 else score(1)) as server:
        assert judge_at(server.base_url).judge([RUBRIC]) == [Judgement("scored", 0.5)]
    with JudgeServer(lambda body, call: bad) as server:
        judge = judge_at(server.base_url)
        (judgement,) = judge.judge([RUBRIC])
    assert judgement.status == "failed"
    assert judgement.score is None
    assert "3 tries" in judgement.detail
    assert len(server.bodies) == 3
    assert judge.usage().retries == 2


@pytest.mark.parametrize(
    "bad",
    [
        Reply(status=400),
        completion('{"score": 2}', finish_reason="length"),
        completion('{"score": 2}', finish_reason="content_filter"),
    ],
)
def test_a_fault_that_no_retry_fixes_fails_at_once(bad: Reply, judge_at: Any) -> None:
    with JudgeServer(lambda body, call: bad) as server:
        (judgement,) = judge_at(server.base_url).judge([RUBRIC])
    assert judgement.status == "failed"
    assert judgement.score is None
    assert len(server.bodies) == 1


def test_retry_after_is_honoured_unless_another_server_can_be_asked(judge_at: Any) -> None:
    busy = Reply(status=429, headers={"Retry-After": "1"})
    with JudgeServer(lambda body, call: score(2) if call else busy) as server:
        started = time.monotonic()
        assert judge_at(server.base_url).judge([RUBRIC]) == [Judgement("scored", 1.0)]
    assert time.monotonic() - started >= 1.0
    hour = Reply(status=429, headers={"Retry-After": "3600"})
    with (
        JudgeServer(lambda body, call: hour) as one,
        JudgeServer(lambda body, call: score(2)) as other,
    ):
        judge = judge_at(one.base_url, base_urls=(other.base_url,))
        assert {j.score for j in judge.judge(requests(20))} == {1.0}


# ---------------------------------------------------------------- deadlines


def test_each_judgement_has_its_own_deadline(judge_at: Any) -> None:
    """Whether a server is silent, or its headers or its body never end."""
    late = [score(2, delay_s=30), Reply(drip="headers"), Reply(drip="body")]

    def script(body: Body, call: int) -> Reply:
        return late[number(body)] if number(body) < len(late) else score(2)

    with JudgeServer(script) as server:
        judge = judge_at(server.base_url, timeout_s=1.2)
        judgements = judge.judge(requests(9))
    assert [j.status for j in judgements] == ["failed"] * 3 + ["scored"] * 6
    assert all("1.2 s" in judgement.detail for judgement in judgements[:3])
    usage = judge.usage()
    assert usage.lost == {"timeout": 3}
    assert usage.answers == {200: 6}


def test_a_batch_has_a_deadline_and_its_rest_fails(judge_at: Any) -> None:
    def script(body: Body, call: int) -> Reply:
        return score(2, delay_s=30 if number(body) > 1 else 0)

    with JudgeServer(script) as server:
        judge = judge_at(server.base_url, batch_timeout_s=1.2, timeout_s=20.0, concurrency=3)
        judgements = judge.judge(requests(8))
        assert [j.status for j in judgements] == ["scored"] * 2 + ["failed"] * 6
        assert "of its batch" in judgements[-1].detail
        assert judge.usage().failed == 6
        assert judge.judge(requests(2)) == judgements[:2], "the judge continues"


# ---------------------------------------------------------------- structured output


def asks_for_a_schema(body: Body) -> bool:
    return "response_format" in body


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_server_that_takes_no_schema_is_asked_without_one_unless_the_recipe_insists(
    status: int, judge_at: Any
) -> None:
    def script(body: Body, call: int) -> Reply:
        return Reply(status=status) if asks_for_a_schema(body) else score(2)

    with JudgeServer(script) as server:
        judge = judge_at(server.base_url, structured_output="auto", max_retries=0, concurrency=1)
        assert {j.score for j in judge.judge(requests(4))} == {1.0}
    assert [asks_for_a_schema(body) for body in server.bodies] == [True] + [False] * 4
    assert judge.usage().failed == 0
    if status == 400:
        with JudgeServer(script) as server:
            judge = judge_at(server.base_url, structured_output="json_schema")
            assert [j.status for j in judge.judge([RUBRIC])] == ["failed"]
        assert len(server.bodies) == 1


def test_one_bad_item_fails_alone_and_the_server_keeps_its_schemas(judge_at: Any) -> None:
    def script(body: Body, call: int) -> Reply:
        return Reply(status=400) if number(body) == 2 else score(2)

    with JudgeServer(script) as server:
        judge = judge_at(server.base_url, structured_output="auto", concurrency=1)
        judgements = judge.judge(requests(5))
    assert [j.status == "failed" for j in judgements] == [n == 2 for n in range(5)]
    assert all(asks_for_a_schema(body) for body in server.bodies)
    schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["score"]


# ---------------------------------------------------------------- configuration errors


@pytest.mark.parametrize(
    ("status", "named"),
    [
        (401, r"judge\.api_key_env"),
        (404, r"judge\.base_url.*judge\.model"),
        (307, r"judge\.base_url"),
    ],
)
def test_a_wrong_key_path_or_model_ends_the_batch_at_once_with_its_field(
    status: int, named: str, judge_at: Any
) -> None:
    """Instead of failing a fifth of a step's items one by one."""
    reply = Reply(status=status, headers={"Location": NOBODY} if status == 307 else {})
    with JudgeServer(lambda body, call: reply) as server:
        judge = judge_at(server.base_url, concurrency=8, structured_output="auto")
        with pytest.raises(ConfigurationError, match=named):
            judge.judge(requests(50))
        assert len(server.bodies) <= 16
        with pytest.raises(ConfigurationError):
            judge.judge(requests(1))


def test_the_key_comes_from_the_environment_and_shows_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, judge_at: Any
) -> None:
    key = "sk-test-0123456789"
    monkeypatch.setenv("MY_JUDGE_KEY", key)
    caplog.set_level("DEBUG")
    echo = Reply(status=401, body=f"Incorrect API key: {key}")
    with JudgeServer(lambda body, call: echo) as server:
        judge = judge_at(server.base_url, api_key_env="MY_JUDGE_KEY")
        with pytest.raises(ConfigurationError) as refused:
            judge.judge([RUBRIC])
    assert server.headers[0]["Authorization"] == f"Bearer {key}"
    assert key not in str(refused.value) + caplog.text + repr(judge) + repr(vars(judge))
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-\x07")
    with pytest.raises(ConfigurationError, match="MY_JUDGE_KEY") as refused:
        judge.judge([RUBRIC])
    assert "\x07" not in str(refused.value)


def test_an_endpoint_may_bring_its_own_key(monkeypatch: pytest.MonkeyPatch, judge_at: Any) -> None:
    monkeypatch.setenv("REFINER_JUDGE_API_KEY", "sk-environment")
    with JudgeServer(lambda body, call: score(2)) as server:
        served = JudgeContext(endpoints=lambda: [Endpoint(server.base_url, "sk-endpoint")])
        judge_at(None, served).judge([RUBRIC])
        judge_at(server.base_url).judge([RUBRIC])
    keys = [headers["Authorization"] for headers in server.headers]
    assert keys == ["Bearer sk-endpoint", "Bearer sk-environment"]


@pytest.mark.parametrize("base_url", [None, "", "localhost:8000"])
def test_a_judge_without_an_address_is_refused(base_url: str | None) -> None:
    with pytest.raises(ConfigurationError, match=r"judge\.base_url"):
        build_judge(JudgeConfig(kind="openai", base_url=base_url))


# ---------------------------------------------------------------- outages


def test_without_a_server_a_judge_waits_and_then_reports_an_outage(judge_at: Any) -> None:
    told: list[str] = []
    judge = judge_at(NOBODY, JudgeContext(on_pause=told.append), outage_patience_s=0.6)
    started = time.monotonic()
    with pytest.raises(JudgeOutage, match=r"127\.0\.0\.1:9.*outage_patience_s") as outage:
        judge.judge(requests(3))
    assert time.monotonic() - started >= 0.6
    assert outage.value.resumable
    assert judge.usage().paused_s > 0.3
    assert len(told) == 2
    assert "127.0.0.1:9" in told[0]
    assert told[1] == ""


def test_a_stop_ends_the_wait_for_servers(judge_at: Any) -> None:
    stop = threading.Event()
    around = JudgeContext(should_stop=stop.is_set, on_pause=lambda text: stop.set())
    judge = judge_at(NOBODY, around, outage_patience_s=3600.0)
    with pytest.raises(Interrupted):
        judge.judge(requests(9))
    assert stop.is_set()


@pytest.mark.slow
def test_a_pause_does_not_use_up_deadlines(judge_at: Any) -> None:
    """The servers are gone for longer than an item, and than a batch, may take."""
    with JudgeServer(lambda body, call: score(2)) as server:
        back_at = time.monotonic() + 2.0

        def endpoints() -> list[Endpoint]:
            return [Endpoint(server.base_url if time.monotonic() > back_at else NOBODY)]

        limits = {"timeout_s": 1.0, "batch_timeout_s": 1.5}
        judge = judge_at(None, JudgeContext(endpoints=endpoints), **limits)
        assert [j.score for j in judge.judge(requests(3))] == [1.0] * 3
    assert judge.usage().paused_s > 1.0


@pytest.mark.slow
def test_a_server_that_dies_without_closing_connections_fails_nothing(judge_at: Any) -> None:
    """Its node is gone, or the network: calls hang, and so does a look at it."""
    back = threading.Event()

    def script(body: Body, call: int) -> Reply:
        return score(2, delay_s=0 if back.is_set() else 30)

    with JudgeServer(script) as server:
        server.models_delay_s = 30.0

        def pause(text: str) -> None:
            back.set()
            server.models_delay_s = 0.0

        judge = judge_at(server.base_url, JudgeContext(on_pause=pause), timeout_s=1.0)
        assert [j.score for j in judge.judge(requests(8))] == [1.0] * 8
    assert judge.usage().lost["timeout"] >= 8
    assert judge.usage().failed == 0


# ---------------------------------------------------------------- a proxy


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """First lines of what a proxy is asked; it lets nothing through."""
    asked: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection:
                    asked.append(connection.recv(65536).decode().split("\r\n")[0])
                    connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "inside.example")
    yield asked
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(10)


def test_only_an_https_address_without_an_exception_goes_through_the_proxy(
    proxy: list[str], judge_at: Any
) -> None:
    with JudgeServer(lambda body, call: score(2)) as server:
        assert judge_at(server.base_url).judge([RUBRIC]) == [Judgement("scored", 1.0)]
    for host in ("inside", "outside"):
        assert proxy == []
        with pytest.raises(JudgeOutage, match=host):
            judge_at(f"https://{host}.example/v1", outage_patience_s=0.1).judge([RUBRIC])
    assert set(proxy) == {"CONNECT outside.example:443 HTTP/1.1"}
