"""Concurrent episodes: records, tokens, limits, outages, stops and reproducibility."""

import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
from refiner_core.contract.errors import ConfigurationError, Interrupted, StageFailed
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.sections.environment import EnvironmentConfig, ShapingConfig
from refiner_core.contract.types import Completion, SamplingParams, TurnScheduler
from refiner_core.environments.conversation import prompt_ids
from refiner_core.environments.episode_runner import EpisodeRequest, EpisodeSettings
from refiner_core.environments.episodes import run_episodes
from refiner_core.environments.protocol import EpisodeRecord, Task, record_from_json
from refiner_core.models import tiny_tokenizer
from tests.support.command import ROOT, wait_until
from tests.support.counting import RULES, TOOLS, Counting, Scripted, call, task_of

TOKENIZER = tiny_tokenizer()
PROMPT = prompt_ids(TOKENIZER, RULES, TOOLS)
SECTION = EnvironmentConfig(
    max_turns=5,
    repairs=1,
    max_argument_bytes=1000,
    workers=4,
    turn_timeout_s=30.0,
    episode_timeout_s=60.0,
    shaping=ShapingConfig(weights=(), weights_by_domain=("counting.action=1",)),
)
SETTINGS = EpisodeSettings(
    section=SECTION,
    context_tokens=4000,
    sampling=SamplingParams(0.7, 0.9, 20, 120, ("</tool_call>",)),
    ordered=True,
)
WINNING = (call(by=1), call(by=1), call("finish"))
Turn = str | Sequence[int]
Script = Callable[[int, int], Turn]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    wait_until(
        lambda: all(t.name != "refiner-episodes" for t in threading.enumerate()), "threads", 5
    )


def wait_until_closed(environment: Counting) -> None:
    """Wait for episodes that their own threads close a moment later."""
    wait_until(lambda: environment.closed == environment.made, "all episodes to be closed")


def winning(conversation: int, attempt: int) -> str:
    return WINNING[attempt]


def always(*turns: Turn) -> Script:
    """These turns, the last one for ever."""
    return lambda conversation, attempt: turns[min(attempt, len(turns) - 1)]


def requests_of(tasks: Sequence[Task], seed: int = 7) -> list[EpisodeRequest]:
    return [EpisodeRequest(task, PROMPT, derive_seed(seed, n)) for n, task in enumerate(tasks)]


class Played(dict[int, Completion]):
    """Completions of a call, with its environment and its generator."""

    def __init__(self, environment: Counting, generator: Any) -> None:
        self.environment, self.generator = environment, generator

    def record(self, number: int = 0) -> EpisodeRecord:
        completion = self[number]
        assert completion.episode is not None
        return record_from_json(json.loads(json.dumps(completion.episode)))

    def comparable(self) -> list[Any]:
        """Everything but the seconds that tools took."""
        values = []
        for number in sorted(self):
            record = self.record(number)
            turns = tuple(replace(turn, seconds=0.0) for turn in record.turns)
            c = self[number]
            logprobs = [None if math.isnan(value) else value for value in c.logprobs]
            values.append((c.token_ids, logprobs, c.own, replace(record, turns=turns)))
        return values


def play(
    tasks: Sequence[Task],
    script: Script = winning,
    *,
    on_episode: Callable[[int, Completion], None] | None = None,
    environment: Counting | None = None,
    should_stop: Callable[[], bool] | None = None,
    room: int = 4,
    steps: Callable[[int, int], int] = lambda conversation, attempt: 1,
    **changes: Any,
) -> Played:
    environment = environment or Counting()
    played = Played(environment, Scripted(TOKENIZER, script, room=room, steps=steps))

    def told(number: int, completion: Completion) -> None:
        assert number not in played
        played[number] = completion
        if on_episode is not None:
            on_episode(number, completion)

    own = {name: value for name, value in changes.items() if hasattr(SECTION, name)}
    others = {name: value for name, value in changes.items() if name not in own}
    settings = replace(SETTINGS, section=replace(SECTION, **own), **others)
    run_episodes(played.generator, environment, TOKENIZER, requests_of(tasks), settings, told,
                 should_stop=should_stop)  # fmt: skip
    assert sorted(played) == list(range(len(tasks)))
    assert environment.closed == environment.made
    return played


def own_text(completion: Completion) -> str:
    assert completion.own is not None
    ids = [t for t, own in zip(completion.token_ids, completion.own, strict=True) if own]
    text: str = TOKENIZER.decode(ids)
    return text


# ---------------------------------------------------------------- what an episode leaves


@pytest.mark.parametrize(
    ("reward", "given", "kept"), [(1.0, "gave_up", None), (0.5, None, "incomplete")]
)
def test_an_episode_without_full_reward_has_failed(
    reward: float, given: Any, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports and evaluations then agree on each attempt."""
    environment = Counting()
    make = environment.episode

    def episode(task: Task) -> Any:
        made = make(task)
        of_its_own = made.outcome
        made.outcome = lambda: replace(of_its_own(), reward=reward, failure=given)
        return made

    monkeypatch.setattr(environment, "episode", episode)
    record = play([task_of(0)], environment=environment).record()
    assert (record.reward, record.failure) == (reward, kept)


@pytest.mark.parametrize("ordered", [True, False])
def test_tokens_and_record_of_an_episode_agree(ordered: bool) -> None:
    played = play([task_of(n) for n in range(9)], ordered=ordered)
    for number, completion in played.items():
        record = played.record(number)
        assert (record.task_id, record.status, record.ended) == (f"t{number}", "finished", "done")
        assert (record.reward, record.partial, record.failure) == (1.0, 1.0, None)
        assert record.first_messages[0][0] == "user"
        assert [turn.text for turn in record.turns] == list(WINNING)
        assert [turn.messages for turn in record.turns[:2]] == [(("tool", "1"),), (("tool", "2"),)]
        assert completion.finish_reason == "stop"
        assert own_text(completion) == "".join(WINNING)
        assert completion.own is not None
        for turn in record.turns:
            assert TOKENIZER.decode(completion.token_ids[turn.start : turn.end]) == turn.text
            assert all(completion.own[turn.start : turn.end])
            expected = [-float(n + 1) / 8 for n in range(turn.end - turn.start)]
            assert list(completion.logprobs[turn.start : turn.end]) == expected
        for value, own in zip(completion.logprobs, completion.own, strict=True):
            assert own or math.isnan(value)


def test_turns_are_conditioned_seeded_and_sampled_by_request_and_settings() -> None:
    played = play([task_of(n) for n in range(3)], room=1)
    asked = [request for begun, _, _ in played.generator.log for request in begun]
    for number, request in enumerate(requests_of([task_of(n) for n in range(3)])):
        own = [one for one in asked if one[0] == number]
        assert [seed for _, _, seed, _ in own] == [
            derive_seed(request.seed, "turn", n) for n in range(3)
        ]
        record = played.record(number)
        reset = derive_seed(request.seed, "environment")
        assert f"({reset % 7})" in record.first_messages[0][1]
        whole = PROMPT + played[number].token_ids
        for (_, context, _, params), turn in zip(own, record.turns, strict=True):
            assert context == whole[: len(PROMPT) + turn.start]
            assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
            assert (params.max_new_tokens, params.stop_strings) == (120, ("</tool_call>",))


# ---------------------------------------------------------------- concurrency


@pytest.mark.parametrize("ordered", [True, False])
def test_results_do_not_depend_on_concurrent_episodes(ordered: bool) -> None:
    tasks = [task_of(n, goal=n % 3 + 1) for n in range(8)]
    one = play(tasks, room=1, workers=1, ordered=True).comparable()
    draw = random.Random(3)
    many = play(
        tasks, room=5, workers=3, ordered=ordered, steps=lambda *_: draw.randint(1, 4)
    ).comparable()
    assert many == one


def test_eager_does_not_wait_for_a_slow_tool() -> None:
    """All others end while one tool hangs; the last of them releases it."""
    environment = Counting()
    ended: list[int] = []

    def told(number: int, _: Completion) -> None:
        ended.append(number)
        if len(ended) == 7:
            environment.release.set()

    tasks = [task_of(n, hang=1 if n == 2 else None) for n in range(8)]
    played = play(tasks, environment=environment, on_episode=told, ordered=False)
    assert ended[-1] == 2
    assert played.record(2).ended == "done"


def test_tools_work_beside_each_other_up_to_the_workers() -> None:
    environment = Counting()
    tasks = [task_of(n, sleep=0.02) for n in range(8)]
    play(tasks, environment=environment, room=8, workers=3)
    assert environment.most == 3


# ---------------------------------------------------------------- turns that are none


BAD = {
    "no_call": "I think it is done.",
    "many_calls": WINNING[0] + WINNING[1],
    "bad_json": '<tool_call>{"name": "add", "arguments": {"by": 1}</tool_call>',
    "bad_shape": '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "too_long": call(by="x" * 2000),
    "cut": '<tool_call>{"name": "add", "arguments": {"by": "' + "1" * 3000,
}


@pytest.mark.parametrize("status", list(BAD))
def test_a_bad_turn_is_repaired_once_in_its_context_or_ends_the_episode(status: str) -> None:
    long_turns = replace(SETTINGS.sampling, max_new_tokens=2500)
    played = play([task_of(0, reward=1.0)], always(WINNING[0], BAD[status], "Sorry."),
                  sampling=long_turns)  # fmt: skip
    record = played.record()
    assert (record.ended, record.failure, record.reward) == ("no_call", "no_call", 0.0)
    assert not record.success
    assert record.partial == 0.5, "partial progress is recorded"
    last = record.turns[-1]
    assert (last.status, last.call, last.repaired, last.retried) == (status, None, None, "Sorry.")
    # The bad turn is the policy's own sample, and carries loss.
    assert own_text(played[0]) == WINNING[0] + last.text
    assert played[0].token_ids[-1:] == tuple(TOKENIZER(last.text)["input_ids"])[-1:]

    texts = [WINNING[0], BAD[status], WINNING[1], "no", WINNING[2]]
    played = play([task_of(0)], lambda _, attempt: texts[attempt], sampling=long_turns)
    record = played.record()
    assert (record.ended, record.reward) == ("done", 1.0)
    assert [turn.repaired is not None for turn in record.turns] == [False, True, True]
    assert record.turns[2].repaired == "no"
    assert own_text(played[0]) == "".join(WINNING), "bad attempts leave no trace"
    asked = [request for begun, _, _ in played.generator.log for request in begun]
    assert [params.temperature for *_, params in asked] == [0.7, 0.7, 0.0, 0.7, 0.0]
    assert (asked[2][3].top_p, asked[2][3].top_k) == (1.0, 0)
    assert asked[1][1] == asked[2][1]


@pytest.mark.parametrize(
    ("text", "error"), [(call("subtract", by=1), "wrong_tool"), (call(by="one"), "wrong_argument")]
)
def test_calls_that_the_environment_refuses_are_turns_like_others(text: str, error: str) -> None:
    played = play([task_of(0)], always(text, *WINNING))
    record = played.record()
    assert [turn.tool_error for turn in record.turns] == [error, "", "", ""]
    assert [turn.status for turn in record.turns] == ["ok"] * 4
    assert record.success


# ---------------------------------------------------------------- limits


def test_a_task_that_is_solved_at_a_limit_is_solved() -> None:
    played = play([task_of(0, goal=5, as_it_stands=True)], always(call(by=1)))
    record = played.record()
    assert (record.ended, record.reward, record.failure) == ("turn_limit", 1.0, None)


@pytest.mark.timeout(60)
def test_a_message_that_does_not_fit_is_left_out_whole() -> None:
    """Megabytes would cost minutes in the shared thread, and as much in each record."""
    for words in (300, 1_500_000):
        played = play([task_of(0, words=words), task_of(1)], context_tokens=len(PROMPT) + 150)
        record = played.record()
        assert (record.ended, record.failure) == ("context_limit", "limit")
        assert played[0].finish_reason == "length"
        assert own_text(played[0]) == WINNING[0]
        assert played[0].own is not None
        assert played[0].own[-1]
        assert record.partial == 0.5
        assert 600 < len(record.turns[0].messages[0][1]) < 70_000, "the record keeps the beginning"


def test_a_turn_is_cut_at_the_context_limit_and_not_repaired() -> None:
    first = play([task_of(0)]).record().turns[0]
    context = len(PROMPT) + first.start + 10
    played = play([task_of(0)], context_tokens=context)
    params = played.generator.log[0][0][0][3]
    assert params.max_new_tokens == 10
    record = played.record()
    assert (record.ended, record.failure) == ("context_limit", "limit")
    assert [turn.status for turn in record.turns] == ["cut"]
    assert len(PROMPT) + len(played[0].token_ids) == context


def test_a_task_that_does_not_fit_has_no_tokens() -> None:
    played = play([task_of(0, long_task=500), task_of(1)], context_tokens=len(PROMPT) + 300)
    assert played[0].token_ids == ()
    assert (played.record(0).ended, played.record(0).failure) == ("context_limit", "limit")
    assert played.record(1).success
    with pytest.raises(ConfigurationError, match=r"grpo\.max_token_length"):
        play([task_of(0)], context_tokens=len(PROMPT))


# ---------------------------------------------------------------- infrastructure


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("at", [0, 2])
def test_an_outage_is_an_error_and_no_failure(at: int, ordered: bool) -> None:
    tasks = [task_of(n, down=at if n == 1 else None) for n in range(6)]
    played = play(tasks, ordered=ordered, room=2)
    record = played.record(1)
    assert (record.status, record.ended, record.error_kind) == ("error", "error", "user_down")
    assert (record.reward, record.partial, record.failure) == (None, None, None)
    assert "The user is gone" in record.error
    assert len(record.turns) == at
    assert all(played.record(n).success for n in (0, 2, 3, 4, 5))


@pytest.mark.parametrize("ordered", [True, False])
def test_tools_that_hang_are_left_behind(ordered: bool) -> None:
    """More tools hang than there are workers; the other episodes continue."""
    environment = Counting()
    tasks = [task_of(n, hang=n % 2 if n < 4 else None) for n in range(9)]
    ended: list[int] = []

    def told(number: int, _: Completion) -> None:
        ended.append(number)
        if len(ended) == 9:
            # All episodes are reported while four threads hang and close theirs later.
            assert environment.at_work == 4
            environment.release.set()
            wait_until_closed(environment)

    played = play(
        tasks,
        environment=environment,
        on_episode=told,
        workers=2,
        turn_timeout_s=0.5,
        ordered=ordered,
    )
    for number in range(4):
        record = played.record(number)
        assert (record.status, record.error_kind) == ("error", "turn_timeout")
        assert "environment.turn_timeout_s" in record.error
        assert len(record.turns) == number % 2
    assert all(played.record(n).success for n in range(4, 9))


# ---------------------------------------------------------------- what ends the call


@pytest.mark.parametrize(("at", "where"), [(0, "reset"), (1, "turn 1"), (3, "turn 3")])
def test_a_bug_of_an_environment_names_task_and_turn(at: int, where: str) -> None:
    environment = Counting()
    tasks = [task_of(n, bug=at if n == 5 else None) for n in range(8)]
    with pytest.raises(
        StageFailed, match=f"counting, task t5 of counting, {where}.*a bug"
    ) as error:
        play(tasks, environment=environment)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    wait_until_closed(environment)


def test_a_stop_ends_the_call_between_turns() -> None:
    environment = Counting()
    told: list[int] = []
    with pytest.raises(Interrupted):
        play(
            [task_of(n) for n in range(20)],
            environment=environment,
            on_episode=lambda number, _: told.append(number),
            should_stop=lambda: len(told) >= 3,
        )
    assert 3 <= len(told) < 20
    wait_until_closed(environment)


def test_a_stop_is_heard_while_a_tool_hangs() -> None:
    environment = Counting()
    began = threading.Event()

    def stop() -> bool:
        if environment.at_work:
            began.set()
        return began.is_set()

    with pytest.raises(Interrupted):
        play([task_of(0, hang=0)], environment=environment, should_stop=stop)
    environment.release.set()
    wait_until_closed(environment)
    assert environment.made == 1


class Broken:
    """A generator that raises, or returns, at its first turn."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def turns(self, desk: TurnScheduler) -> None:
        desk.take(4, wait=True)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "expected"), [(MemoryError("full"), MemoryError), (None, StageFailed)]
)
def test_a_generator_that_ends_early_closes_all(
    error: Exception | None, expected: type[Exception]
) -> None:
    environment = Counting()
    requests = requests_of([task_of(n) for n in range(9)])
    with pytest.raises(expected):
        run_episodes(Broken(error), environment, TOKENIZER, requests, SETTINGS, lambda *_: None)
    wait_until_closed(environment)
    assert environment.made > 0


# ---------------------------------------------------------------- threads of tools


def test_a_tool_that_hangs_does_not_keep_the_process_from_ending() -> None:
    code = (
        "import threading\n"
        "from refiner_core.environments.episodes import Workers\n"
        "pool = Workers(1)\n"
        "pool.submit(1, threading.Event().wait, 0.05)\n"
        "print([one.late for one in pool.ended(30)])\n"
        "pool.abandon()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "[True]"), ended.stderr
