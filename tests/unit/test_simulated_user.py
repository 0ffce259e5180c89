"""A simulated user over HTTP: what is said, what is tried again, and what an outage is called.

Were this wrong, a user simulator that is down would be counted as the model's failures, or a key
would end up in a log.
"""

from __future__ import annotations

import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from refiner_core.contract.config import UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.environments.protocol import InfrastructureError
from refiner_core.environments.user import SimulatedUser, UserUsage
from tests.support.judge_server import JudgeServer, Reply, completion

KEY_ENV, KEY = "SIMULATED_USER_TEST_KEY", "sk-not-a-real-key-3141"
ASKED = [{"role": "system", "content": "You are Ada."}, {"role": "user", "content": "Hello?"}]


def user_of(server: JudgeServer, **changes: object) -> SimulatedUser:
    values = {"max_retries": 2, "timeout_s": 10.0, "api_key_env": KEY_ENV, **changes}
    config = UserConfig(model="ada", base_url=server.base_url, **values)  # type: ignore[arg-type]
    return SimulatedUser(config, first_backoff_s=0.001)


def kind_of(user: SimulatedUser) -> InfrastructureError:
    with pytest.raises(InfrastructureError) as caught:
        user.say(ASKED)
    assert caught.value.resumable
    return caught.value


def test_it_says_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    usage = {"prompt_tokens": 12, "completion_tokens": 5}
    with JudgeServer(lambda b, n: completion(" My order is late. \n", usage=usage)) as server:
        user = user_of(server, temperature=0.3, max_tokens=77)
        assert user.say(ASKED, seed=9) == ("My order is late.", 12, 5)
        user.say(ASKED)
        user.close()
        body, header = server.bodies[0], server.headers[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("ada", 0.3, 77)
    assert (body["messages"], body["seed"]) == (ASKED, 9)
    assert "seed" not in server.bodies[1]
    assert header["Authorization"] == f"Bearer {KEY}"
    assert user.usage() == UserUsage(2, 2, 24, 10)


def test_thoughts_are_not_said() -> None:
    with JudgeServer(lambda b, n: completion("<think>Who am I?</think>\n\nI am Ada.")) as server:
        assert user_of(server).say(ASKED).text == "I am Ada."


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with JudgeServer(lambda b, n: Reply(status) if n < 2 else completion("Here.")) as server:
        user = user_of(server)
        assert user.say(ASKED).text == "Here."
        assert user.usage().requests == len(server.bodies) == 3


@pytest.mark.parametrize(
    ("reply", "kind", "tries"),
    [
        (Reply(500), "user_down", 3),
        (Reply(429, headers={"Retry-After": "0"}), "user_down", 3),
        (Reply(401, body=f"no such key: {KEY}"), "user_down", 1),
        (Reply(404), "user_down", 1),
        (Reply(307, headers={"Location": "http://127.0.0.1:9/"}), "user_down", 1),
        (Reply(drop=True), "user_down", 3),
        (Reply(body="<html>Welcome</html>"), "user_off_script", 3),
        (Reply(body="[]"), "user_off_script", 3),
        (Reply(body='{"choices": []}'), "user_off_script", 3),
        (completion(None), "user_off_script", 3),
        (completion(" \n"), "user_off_script", 3),
        (completion("<think>Hm.</think>"), "user_off_script", 3),
    ],
)
def test_an_outage_has_a_kind(
    reply: Reply, kind: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    with JudgeServer(lambda b, n: reply) as server:
        error = kind_of(user_of(server))
        assert len(server.bodies) == tries
    assert error.kind == kind
    assert KEY not in str(error)
    assert f"tries: {tries}" in str(error)


def test_a_slow_user_is_slow() -> None:
    with JudgeServer(lambda b, n: completion("At last.", delay_s=5.0)) as server:
        error = kind_of(user_of(server, timeout_s=0.05, max_retries=1))
    assert error.kind == "user_slow"


def test_nobody_there_is_down() -> None:
    with JudgeServer(lambda b, n: completion("x")) as server:
        pass
    assert kind_of(user_of(server, max_retries=0)).kind == "user_down"


def test_many_threads_ask_at_a_time() -> None:
    """An episode must not wait for another one's user."""
    together = threading.Barrier(4, timeout=10)

    def script(body: object, number: int) -> Reply:
        return completion(f"{number}", delay_s=0.2)

    with JudgeServer(script) as server:
        user = user_of(server)

        def ask(_: int) -> str:
            together.wait()
            return user.say(ASKED).text

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(ask, range(4))) == ["0", "1", "2", "3"]
        assert server.most_in_flight == 4


def test_it_is_pickled_without_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    with JudgeServer(lambda b, n: completion("Yes.")) as server:
        user = user_of(server)
        user.say(ASKED)
        data = pickle.dumps(user)
        assert KEY.encode() not in data
        assert pickle.loads(data).say(ASKED).text == "Yes."


def test_it_may_be_asked_after_it_was_closed() -> None:
    with JudgeServer(lambda b, n: completion("Yes.")) as server:
        user = user_of(server)
        user.say(ASKED)
        user.close()
        user.close()
        assert user.say(ASKED).text == "Yes."


@pytest.mark.parametrize("config", [UserConfig(), UserConfig(model="m", base_url="localhost:1")])
def test_a_user_without_an_address_is_refused(config: UserConfig) -> None:
    with pytest.raises(ConfigurationError, match="base_url"):
        SimulatedUser(config)


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_ENV, "with\nnewline")
    with JudgeServer(lambda b, n: completion("Yes.")) as server:
        with pytest.raises(ConfigurationError, match=KEY_ENV):
            user_of(server).say(ASKED)
        assert not server.bodies


def test_a_seed_and_messages_survive_as_json() -> None:
    words = [{"role": "user", "content": 'Grüße "you" \u2028 \U0001f600'}]
    with JudgeServer(lambda b, n: completion(json.dumps(b["messages"]))) as server:
        assert json.loads(user_of(server).say(words).text) == words
