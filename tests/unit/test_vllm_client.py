"""Rollouts over HTTP against a server that keeps vLLM's traps; a client that ignores one fails."""

import json
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import StageFailed
from refiner_core.contract.types import Completion, GenerationRequest, SamplingParams
from refiner_core.generation.completions import completion_text
from refiner_core.generation.transformers_backend import TransformersGenerator
from refiner_core.generation.vllm.wire import (
    InvalidResponse,
    SampleQuery,
    completion_body,
    read_completion,
)
from tests.support.tiny_training import EOS, furthest, save_tiny_model, tiny_model, tiny_tokenizer
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
