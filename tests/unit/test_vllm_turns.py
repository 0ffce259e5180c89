"""Turns of conversations over HTTP sample what single requests sample."""

from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.errors import KilledError
from refiner_core.contract.types import Completion, GenerationRequest, SamplingParams, TurnRequest
from tests.support.tiny_training import furthest, save_tiny_model, tiny_model
from tests.support.turn_script import Script
from tests.support.vllm_fleet import Fixed, generator
from tests.support.vllm_server import Served, served

SHORT = SamplingParams(max_new_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


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
