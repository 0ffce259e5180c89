"""Rollouts over HTTP against a server that keeps vLLM's traps: samples, turns, and its key."""

import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from refiner_core.contract.errors import KilledError, StageFailed
from refiner_core.contract.types import Completion, GenerationRequest, SamplingParams, TurnRequest
from refiner_core.generation.completions import completion_text
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.generation.vllm.extension.refiner_vllm_extension import KeyOnEveryRoute
from refiner_core.generation.vllm.wire import (
    InvalidResponse,
    SampleQuery,
    completion_body,
    read_completion,
)
from tests.support.tiny_training import EOS, furthest, save_tiny_model, tiny_model, tiny_tokenizer
from tests.support.turn_script import Script
from tests.support.vllm_fleet import PLAIN, STOP, USUAL, Fixed, generator, requests
from tests.support.vllm_server import Served, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------- samples


def test_logprobs_are_the_trainers_after_temperature_and_truncation(folder: Path) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=9, max_new_tokens=12)
    with served(folder) as server:
        made = generator(Fixed(server)).generate(requests(), params)
    assert furthest(tiny_model(), requests(), made, params) < 1e-4


def test_a_sample_depends_on_its_seed_alone(folder: Path) -> None:
    """Not on its place, its neighbours, the server, or how many are asked at a time."""
    asked = requests()
    with served(folder) as one, served(folder) as two:
        first = generator(Fixed(one)).generate(asked, PLAIN)
        backwards = generator(Fixed(two, one), in_flight=1).generate(asked[::-1], PLAIN)
        alone = generator(Fixed(two)).generate(asked[5:6], PLAIN)
    assert [c.token_ids for c in backwards[::-1]] == [c.token_ids for c in first]
    assert alone[0].token_ids == first[5].token_ids


def test_every_server_has_its_share_of_the_work(folder: Path) -> None:
    """Samples of a prompt stay on one server, whose prefix cache has it."""
    with served(folder) as one, served(folder) as two:
        generator(Fixed(one, two)).generate(requests(4), PLAIN)
        asked = [[tuple(body["prompt"]) for body in server.bodies()] for server in (one, two)]
    assert [len(prompts) for prompts in asked] == [8, 8]
    assert set(asked[0]).isdisjoint(asked[1])


def test_a_request_has_everything_that_decides_a_sample() -> None:
    params = SamplingParams(0.5, 0.9, 7, 11, ("w9",))
    body = json.loads(
        completion_body(SampleQuery(GenerationRequest((5, 6), (1 << 63) + 4), params, STOP, "8"))
    )
    assert body == {
        **{"model": "policy", "prompt": [5, 6], "max_tokens": 11, "min_tokens": 0, "n": 1},
        **{"seed": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"stop": ["w9"], "stop_token_ids": [EOS], "ignore_eos": False},
        **{"include_stop_str_in_output": True, "skip_special_tokens": False},
        **{"spaces_between_special_tokens": True, "add_special_tokens": False},
        **{"echo": False, "stream": False, "logprobs": 0, "return_token_ids": True},
        "cache_salt": "refiner-8",
    }


def test_samples_end_where_the_embedded_backend_ends_them(folder: Path) -> None:
    """At a stop token, a stop string that spans tokens, or the limit; each with its last token."""
    params = SamplingParams(0.0, max_new_tokens=16, stop_strings=("w7", "w1 "))
    tokenizer, model = tiny_tokenizer(), tiny_model()
    model.generation_config.eos_token_id = [EOS, 9, 12]
    embedded = TransformersGenerator(model, tokenizer).generate(requests(4, 6), params)
    with served(folder) as server:
        fleet = Fixed(server)
        fleet.stop_ids = frozenset({EOS, 9, 12})
        made = generator(fleet).generate(requests(4, 6), params)
    assert [(c.token_ids, c.finish_reason) for c in made] == [
        (c.token_ids, c.finish_reason) for c in embedded
    ]
    assert [completion_text(tokenizer, c) for c in made] == [
        completion_text(tokenizer, c) for c in embedded
    ]


def test_the_caller_gets_each_sample_in_its_own_thread_at_once(folder: Path) -> None:
    heard: list[int] = []

    def on_completion(index: int, completion: Completion) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert completion.token_ids
        heard.append(index)

    with served(folder) as server:
        fleet = Fixed(server)
        ours = generator(fleet, in_flight=1)
        ours.generate(requests(), PLAIN, on_completion)
        assert sorted(heard) == list(range(12))

        def give_up(index: int, _: Completion) -> None:
            raise LookupError(index)

        before = len(server.bodies())
        with pytest.raises(LookupError):
            ours.generate(requests(), PLAIN, give_up)
        assert len(server.bodies()) - before < 12  # the rest was never asked
        assert not fleet.busy.locked()


# ---------------------------------------------------------------- faults


def test_samples_that_a_pause_aborts_are_asked_again(folder: Path) -> None:
    asked = requests()
    with served(folder) as server:
        wanted = generator(Fixed(server)).generate(asked, PLAIN)
        server.state.control["slow_s"] = 0.01
        paused = threading.Thread(target=lambda: [_pause(server) for _ in range(2)])
        paused.start()
        made = generator(Fixed(server)).generate(asked, PLAIN)
        paused.join()
        assert len(server.bodies()) > 2 * len(asked)
    assert [c.token_ids for c in made] == [c.token_ids for c in wanted]


def _pause(server: Served) -> None:
    time.sleep(0.08)
    for route in ("pause", "resume"):
        url = f"{server.url.removesuffix('/v1')}/{route}"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
            pass


def test_a_full_queue_and_lost_connections_are_no_reason_to_replace_a_server(folder: Path) -> None:
    with served(folder, *USUAL, "--max-num-queued-reqs", "2") as server:
        server.state.control["lose"] = 2
        fleet = Fixed(server)
        made = generator(fleet).generate(requests(), PLAIN)
        assert len(server.bodies()) > 12
    assert furthest(tiny_model(), requests(), made) < 1e-4
    assert fleet.revived == []


def test_a_refused_request_is_quoted_without_the_key(folder: Path) -> None:
    with served(folder, key="secret-of-it") as server:
        with pytest.raises(StageFailed, match="401"):
            generator(Fixed(server, key="wrong")).generate(requests(1, 1), PLAIN)
        assert generator(Fixed(server, key="secret-of-it")).generate(requests(1, 1), PLAIN)


GOOD: dict[str, Any] = {
    "finish_reason": "stop",
    "stop_reason": None,
    "token_ids": [5, EOS],
    "prompt_token_ids": [3, 4],
    "logprobs": {"token_logprobs": [-1.0, -0.5]},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_token_ids": [3, 5]}, "another prompt"),
        ({"token_ids": [5]}, "log-probability"),
        ({"logprobs": None}, "logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0, float("nan")]}}, "token_logprobs.1"),
        ({"finish_reason": "length"}, "2 of 12"),
        ({"finish_reason": "tool_calls"}, "tool_calls"),
        ({"token_ids": [5, 6]}, "none of the stop tokens"),
        ({"token_ids": [5, 6], "stop_reason": "w9"}, "none of the stop tokens"),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_never_trained_on(change, said) -> None:
    def read(*choices: dict[str, Any]) -> Any:
        asked = SampleQuery(GenerationRequest((3, 4), 0), PLAIN, STOP, "1")
        return read_completion(json.dumps({"choices": choices}).encode(), asked)

    assert isinstance(read(GOOD), Completion)
    assert read(GOOD | {"finish_reason": "abort"}) == "abort", "partial tokens are no sample"
    with pytest.raises(InvalidResponse, match="choices"):
        read(GOOD, GOOD)
    with pytest.raises(InvalidResponse, match=said):
        read(GOOD | change)


# ---------------------------------------------------------------- turns


SHORT = SamplingParams(max_new_tokens=5)


def script(conversations: int = 5, turns: int = 3, **settings: Any) -> Script:
    usual: dict[str, Any] = {"params": lambda *_: SHORT, "prompt": 20}
    return Script(conversations, turns, **(usual | settings))


def agrees(done: Script, server: Served, conversations: int = 5) -> None:
    """Every turn was sampled, and is what a request of its own is answered."""
    assert len(done.done) == conversations * done.turns
    asked = [GenerationRequest(r.context_ids, r.seed) for r, _ in done.done.values()]
    made = [completion for _, completion in done.done.values()]
    alone = generator(Fixed(server)).generate(asked, SHORT)
    assert [c.token_ids for c in made] == [c.token_ids for c in alone]
    assert furthest(tiny_model(), asked, made, SHORT) < 1e-4


def test_turns_are_what_single_requests_sample_and_stay_on_one_server(folder: Path) -> None:
    """Its prefix cache has the conversation so far; another server would compute it again."""
    done = script()
    with served(folder) as one, served(folder) as two:
        generator(Fixed(one, two)).turns(done)
        asked_of = [[tuple(body["prompt"]) for body in server.bodies()] for server in (one, two)]
        agrees(done, one)
    assert len(asked_of[0]) + len(asked_of[1]) == 15
    for conversation in range(5):
        contexts = {done.done[conversation, turn][0].context_ids for turn in range(3)}
        assert contexts <= set(asked_of[0]) or contexts <= set(asked_of[1])
    assert {len(asked) for asked in asked_of} == {6, 9}  # two and three conversations


def test_a_slow_tool_delays_no_other_conversation(folder: Path) -> None:
    """A user who does not answer delays one conversation: the desk waits only once
    nothing is being sampled."""
    done = script(4, 2, slow=lambda conversation, _: 0 if conversation else 10**9)
    with served(folder) as server:
        generator(Fixed(server)).turns(done)
    assert done.finish_order[-1] == (0, 1)
    assert [wait for _, wait, begun in done.asked if begun][-1]


def test_no_more_conversations_are_under_way_than_servers_are_asked_at_a_time(folder: Path) -> None:
    done = script()
    with served(folder) as one, served(folder) as two:
        generator(Fixed(one, two), in_flight=1).turns(done)
        agrees(done, one)
    assert done.most == 2


def test_turns_of_a_lost_server_are_sampled_by_another(folder: Path) -> None:
    gone = Served.__new__(Served)
    gone.url = "http://127.0.0.1:9/v1"
    done = script(repaired=lambda conversation, turn: conversation == turn)
    with pytest.raises(KilledError, match="no successor"):
        generator(Fixed(gone)).turns(script())
    with served(folder) as well:
        well.state.control["lose"] = 2
        fleet = Fixed(gone, well)
        fleet.successor = lambda: well
        generator(fleet).turns(done)
        agrees(done, well)
    assert fleet.revived[0][0] == 0


def test_an_error_of_a_callback_ends_the_call_and_frees_the_fleet(folder: Path) -> None:
    class Full(Script):
        def finished(self, request: TurnRequest, completion: Completion) -> None:
            raise RuntimeError("no more")

    def stop(finished: int, begun: int) -> None:
        raise KeyboardInterrupt

    with served(folder) as server:
        fleet = Fixed(server)
        with pytest.raises(RuntimeError, match="no more"):
            generator(fleet).turns(Full(3, params=lambda *_: SHORT, prompt=20))
        with pytest.raises(KeyboardInterrupt):
            generator(fleet, on_step=stop).turns(script())
        assert not fleet.busy.locked()
        generator(fleet).turns(done := script())
        agrees(done, server)


# ---------------------------------------------------------------- the key on every route


KEY = {"Authorization": "Bearer the-key"}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """An application to which vLLM's ``--middleware`` would add the class."""
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    app, metrics = FastAPI(), FastAPI()

    @app.post("/collective_rpc")
    def collective_rpc() -> str:
        return "done"

    @metrics.get("/")
    def numbers() -> str:
        return "some"

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")

    app.mount("/metrics", metrics)
    app.add_middleware(KeyOnEveryRoute)
    return TestClient(app)


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer the-key2", "the-key"])
def test_a_wrong_key_is_refused(client: TestClient, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    assert client.post("/collective_rpc", headers=headers).status_code == 401
    assert client.options("/collective_rpc", headers=headers).status_code == 401
    for route in ("/metrics/", "/docs", "/openapi.json", "/nowhere"):
        assert client.get(route, headers=headers).status_code == 401
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/v1/realtime", headers=headers),
    ):
        pass


def test_the_key_opens_all_routes(client: TestClient) -> None:
    assert client.post("/collective_rpc", headers=KEY).json() == "done"
    assert client.get("/metrics/", headers=KEY).json() == "some"
    assert client.get("/nowhere", headers=KEY).status_code == 404
    with client.websocket_connect("/v1/realtime", headers=KEY) as socket:
        assert socket.receive_text() == "hello"


def test_two_headers_are_refused(client: TestClient) -> None:
    """One of them might be for a proxy."""
    headers = [("Authorization", "Bearer the-key"), ("Authorization", "Bearer other")]
    assert client.post("/collective_rpc", headers=headers).status_code == 401
