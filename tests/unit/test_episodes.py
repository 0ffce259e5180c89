"""Many episodes at a time: what a rollout or an evaluation gets, whatever model and tools do.

Where this is wrong, one slow tool holds all others up, a bad turn counts as success, an outage
counts as the model's failure, or the same seed gives other results.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")
from refiner_core.contract.config import EnvironmentConfig, ShapingConfig
from refiner_core.contract.errors import ConfigurationError, Interrupted, StageFailed
from refiner_core.contract.fingerprint import derive_seed
from refiner_core.contract.types import Completion, SamplingParams, TurnDesk
from refiner_core.environments.conversation import Conversation, prompt_ids
from refiner_core.environments.episodes import (
    EpisodeRequest,
    EpisodeSettings,
    run_episodes,
)
from refiner_core.environments.protocol import EpisodeRecord, Message, Task, record_from_json
from refiner_core.models import tiny_tokenizer
from tests.support.command import wait_until
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
    until = time.monotonic() + 5
    while (left := _threads()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "refiner-episodes"]


def let_go(environment: Counting) -> None:
    """Release what hangs, and wait until it has closed itself."""
    environment.release.set()
    until = time.monotonic() + 20
    while environment.closed < environment.made and time.monotonic() < until:
        time.sleep(0.005)


def winning(conversation: int, attempt: int) -> str:
    return WINNING[attempt]


def always(*turns: Turn) -> Script:
    """These turns, the last one for ever."""
    return lambda conversation, attempt: turns[min(attempt, len(turns) - 1)]


def requests_of(tasks: Sequence[Task], seed: int = 7) -> list[EpisodeRequest]:
    return [EpisodeRequest(task, PROMPT, derive_seed(seed, n)) for n, task in enumerate(tasks)]


class Played(dict[int, Completion]):
    """What came of a call, with the environment and the generator."""

    def __init__(self, environment: Counting, generator: Any) -> None:
        self.environment, self.generator = environment, generator

    def record(self, number: int = 0) -> EpisodeRecord:
        completion = self[number]
        assert completion.episode is not None
        return record_from_json(json.loads(json.dumps(completion.episode)))

    def comparable(self) -> list[Any]:
        """All of it but the seconds that tools took."""
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
    requests = requests_of(tasks)
    run_episodes(
        played.generator,
        environment,
        TOKENIZER,
        requests,
        settings,
        told,
        should_stop=should_stop,
    )
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
    ("reward", "given", "kept"),
    [(1.0, "gave_up", None), (0.5, None, "incomplete"), (0.5, "gave_up", "gave_up")],
)
def test_who_has_not_solved_its_task_has_failed(
    reward: float, given: Any, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a report shows an attempt as passed that evaluation has counted as failed."""
    environment = Counting()
    make = environment.episode

    def episode(task: Task) -> Any:
        made = make(task)
        of_its_own = made.outcome
        made.outcome = lambda: replace(of_its_own(), reward=reward, failure=given)  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(environment, "episode", episode)
    record = play([task_of(0)], environment=environment).record()
    assert (record.reward, record.failure) == (reward, kept)


@pytest.mark.parametrize("ordered", [True, False])
def test_an_episode_leaves_tokens_and_a_record_that_agree(ordered: bool) -> None:
    played = play([task_of(n) for n in range(9)], ordered=ordered)
    for number, completion in played.items():
        record = played.record(number)
        assert (record.task_id, record.status, record.ended) == (f"t{number}", "finished", "done")
        assert (record.reward, record.partial, record.failure) == (1.0, 1.0, None)
        assert record.first_messages[0][0] == "user"
        assert [turn.text for turn in record.turns] == list(WINNING)
        assert [turn.messages for turn in record.turns[:2]] == [
            (("tool", "1"),),
            (("tool", "2"),),
        ]
        assert completion.finish_reason == "stop"
        assert own_text(completion) == "".join(WINNING)
        for turn in record.turns:
            assert TOKENIZER.decode(completion.token_ids[turn.start : turn.end]) == turn.text
            assert completion.own is not None
            assert all(completion.own[turn.start : turn.end])
            expected = [-float(n + 1) / 8 for n in range(turn.end - turn.start)]
            assert list(completion.logprobs[turn.start : turn.end]) == expected
        masked = [
            math.isnan(value)
            for value, own in zip(completion.logprobs, completion.own or (), strict=True)
            if not own
        ]
        assert all(masked)


def test_a_completion_is_what_was_conditioned_on() -> None:
    """Prompt and completion are, token by token, the context of the last turn and that turn."""
    played = play([task_of(0)])
    contexts = [request[1] for begun, _, _ in played.generator.log for request in begun]
    turns = played.record().turns
    whole = PROMPT + played[0].token_ids
    for context, turn in zip(contexts, turns, strict=True):
        assert context == whole[: len(PROMPT) + turn.start]


def test_seeds_come_from_the_request_alone() -> None:
    played = play([task_of(n) for n in range(3)], room=1)
    seeds: dict[int, list[int]] = {}
    for begun, _, _ in played.generator.log:
        for number, _, seed, _ in begun:
            seeds.setdefault(number, []).append(seed)
    for number, request in enumerate(requests_of([task_of(n) for n in range(3)])):
        assert seeds[number] == [derive_seed(request.seed, "turn", n) for n in range(3)]
        reset = derive_seed(request.seed, "environment")
        assert f"({reset % 7})" in played.record(number).first_messages[0][1]


def test_turns_are_sampled_as_the_settings_say() -> None:
    played = play([task_of(0)])
    params = played.generator.log[0][0][0][3]
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert (params.max_new_tokens, params.stop_strings) == (120, ("</tool_call>",))


# ---------------------------------------------------------------- concurrency


@pytest.mark.parametrize("ordered", [True, False])
def test_results_do_not_depend_on_who_runs_beside_whom(ordered: bool) -> None:
    tasks = [task_of(n, goal=n % 3 + 1) for n in range(8)]
    one = play(tasks, room=1, workers=1, ordered=True).comparable()
    draw = random.Random(3)
    many = play(
        tasks, room=5, workers=3, ordered=ordered, steps=lambda *_: draw.randint(1, 4)
    ).comparable()
    assert many == one


@pytest.mark.parametrize("uneven", [True, False])
def test_ordered_gives_the_same_turns_at_the_same_calls_however_long_tools_take(
    uneven: bool,
) -> None:
    """Also in the order in which episodes end."""

    def run(seed: int) -> tuple[list[Any], list[int], list[Any]]:
        draw, told = random.Random(seed), []
        tasks = [task_of(n, sleep=draw.random() * 0.01) for n in range(10)]
        played = play(
            tasks,
            steps=lambda conversation, attempt: (
                (3 * conversation + attempt) % 4 + 1 if uneven else 1
            ),
            on_episode=lambda number, _: told.append(number),
        )
        return played.generator.log, told, played.comparable()

    assert run(1) == run(2)


def test_eager_does_not_wait_for_a_slow_tool() -> None:
    """All others end while one tool hangs; it is let go by the last of them."""
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
def test_a_turn_that_stays_bad_ends_the_episode_without_reward(status: str) -> None:
    script = always(WINNING[0], BAD[status], "Sorry.")
    played = play(
        [task_of(0, reward=1.0)], script, sampling=replace(SETTINGS.sampling, max_new_tokens=2500)
    )
    record = played.record()
    assert (record.ended, record.failure, record.reward) == ("no_call", "no_call", 0.0)
    assert not record.success
    assert record.partial == 0.5, "what was done is told, whoever counts it"
    last = record.turns[-1]
    assert (last.status, last.call, last.repaired, last.retried) == (status, None, None, "Sorry.")
    # What failed is the policy's own sample, and carries loss.
    assert own_text(played[0]) == WINNING[0] + last.text
    assert played[0].token_ids[-1:] == tuple(TOKENIZER(last.text)["input_ids"])[-1:]


@pytest.mark.parametrize("status", list(BAD))
def test_a_bad_turn_is_repaired_once_in_the_same_context(status: str) -> None:
    texts = [WINNING[0], BAD[status], WINNING[1], "no", WINNING[2]]
    played = play(
        [task_of(0)],
        lambda _, attempt: texts[attempt],
        sampling=replace(SETTINGS.sampling, max_new_tokens=2500),
    )
    record = played.record()
    assert (record.ended, record.reward) == ("done", 1.0)
    assert [turn.repaired is not None for turn in record.turns] == [False, True, True]
    assert record.turns[2].repaired == "no"
    assert own_text(played[0]) == "".join(WINNING), "the bad attempts left no trace"
    asked = [request for begun, _, _ in played.generator.log for request in begun]
    assert [params.temperature for *_, params in asked] == [0.7, 0.7, 0.0, 0.7, 0.0]
    assert (asked[2][3].top_p, asked[2][3].top_k) == (1.0, 0)
    assert asked[1][1] == asked[2][1]


@pytest.mark.parametrize(
    ("text", "error"),
    [(call("subtract", by=1), "wrong_tool"), (call(by="one"), "wrong_argument")],
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


def test_what_does_not_fit_is_left_out_whole() -> None:
    base = len(PROMPT) + 150
    played = play([task_of(0, words=300)], context_tokens=base)
    record = played.record()
    assert (record.ended, record.failure) == ("context_limit", "limit")
    assert played[0].finish_reason == "length"
    assert own_text(played[0]) == WINNING[0]
    assert played[0].own is not None
    assert played[0].own[-1]
    assert len(record.turns[0].messages[0][1]) > 600, "the record says what it was"
    assert record.partial == 0.5


class Counted:
    """A tokenizer that says how many characters it was given in the longest piece."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.longest = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return self._tokenizer(text, **options)


def test_megabytes_of_a_tool_are_not_tokenised_and_fill_no_record() -> None:
    """Minutes in the thread that all episodes wait for, and 5 MB in each of their records."""
    tokenizer = Counted(TOKENIZER)
    long = (Message("tool", "x " * 2_500_000),)
    conversation = Conversation(tokenizer, PROMPT)
    assert conversation.overflows(long, 400)
    assert conversation.overflows((Message("tool", "<|im_end|>" * 500_000),), 400)
    assert tokenizer.longest < 16 * 400 + 1000
    assert not conversation.overflows((Message("tool", "x " * 200),), 400)
    assert not conversation.overflows((Message("tool", "x " * 450),), 400), "it has to be counted"
    assert conversation.overflows(long, 0)

    played = play([task_of(0, words=400_000), task_of(1)])
    record = played.record(0)
    assert (record.ended, record.failure) == ("context_limit", "limit")
    kept = record.turns[0].messages[0][1]
    assert 65_536 <= len(kept) < 70_000
    assert kept.endswith("more characters)")
    assert played.record(1).success


def test_a_turn_gets_the_room_that_is_left_and_is_not_repaired_for_want_of_it() -> None:
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


def test_a_prompt_that_fills_the_context_is_refused() -> None:
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
    """More of them than there are workers, and everybody else goes on."""
    environment = Counting()
    tasks = [task_of(n, hang=n % 2 if n < 4 else None) for n in range(9)]
    ended: list[int] = []

    def told(number: int, _: Completion) -> None:
        ended.append(number)
        if len(ended) == 9:
            # All have been told of while four threads hang; their episodes close in them.
            assert environment.at_work == 4
            let_go(environment)

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
    # An episode at work when another fails is closed by its own thread, a moment later.
    wait_until(lambda: environment.closed == environment.made, "all episodes to be closed", 20)


def test_a_stop_ends_it_between_turns() -> None:
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
    wait_until(lambda: environment.closed == environment.made, "all episodes to be closed", 20)


def test_a_stop_is_heard_while_a_tool_hangs() -> None:
    environment = Counting()
    began = threading.Event()

    def stop() -> bool:
        if environment.at_work:
            began.set()
        return began.is_set()

    with pytest.raises(Interrupted):
        play([task_of(0, hang=0)], environment=environment, should_stop=stop)
    let_go(environment)
    assert environment.closed == environment.made == 1


class Broken:
    """A generator that raises, or returns, at its first turn."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def turns(self, desk: TurnDesk) -> None:
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
    until = time.monotonic() + 20  # what a thread was just making is closed when it is made
    while environment.closed < environment.made and time.monotonic() < until:
        time.sleep(0.01)
    assert environment.closed == environment.made > 0


# ---------------------------------------------------------------- settings


def test_demonstrated_tokens_are_those_of_an_episode() -> None:
    """What SFT learns from and what is rolled out agree, but for who ends a turn."""
    from refiner_core.environments.conversation import demonstration
    from refiner_core.environments.turns import call_text, parse_turn

    calls = [parse_turn(text, 1000).call for text in WINNING]
    texts = [call_text(one) for one in calls if one is not None]
    played = play([task_of(0)], lambda _, attempt: texts[attempt])
    record = played.record()
    said = [[Message(r, c) for r, c in turn.messages] for turn in record.turns]  # type: ignore[arg-type]
    first = [Message(r, c) for r, c in record.first_messages]  # type: ignore[arg-type]
    turns = [(one, after) for one, after in zip(texts, said, strict=True)]
    ids, _ = demonstration(TOKENIZER, PROMPT, first, turns)
    end = Conversation(TOKENIZER, PROMPT)
    end.own((), ())
    end.close_turn()
    assert PROMPT + played[0].token_ids + end.ids[len(PROMPT) :] == ids
