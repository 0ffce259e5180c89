"""The desk: solvable tasks, users who have to be asked, rules, rewards, and malformed calls."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from refiner_core import synthetic_words as world
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.sections.environment import EnvironmentConfig, UserConfig
from refiner_core.environments.desk import VERSION, DeskEnvironment, desk_digest, vocabulary
from refiner_core.environments.desk.environment import DeskEpisode
from refiner_core.environments.desk.tasks import DOMAINS, own_tasks
from refiner_core.environments.desk.user import PATIENCE
from refiner_core.environments.protocol import FAILURES, HasExpert, Outcome, Step, Task, ToolCall

#: SHA-256 over every task with its right and flawed episodes. Where this test fails, episodes have
#: changed: raise VERSION in desk/tasks.py, then record the new hash.
PINNED = {"1": "2e310fdabd8f2400191c036cec204f9ef00fa5973e231eaed296792b20fcafe8"}
CONFIG = EnvironmentConfig(name="desk")
DESK = DeskEnvironment(CONFIG, UserConfig())
ALL = own_tasks()


def of_family(domain: str, family: str) -> Task:
    return next(t for t in ALL if t.domain == domain and t.data["family"] == family)


def say(content: str) -> ToolCall:
    return ToolCall("respond", {"content": content})


def played(task: Task, calls: Iterable[ToolCall], seed: int = 0) -> tuple[DeskEpisode, list[Step]]:
    """An episode with these calls, up to its end."""
    episode = DESK.episode(task)
    episode.reset(seed)
    steps: list[Step] = []
    for call in calls:
        steps.append(episode.step(call))
        if steps[-1].done:
            break
    return episode, steps


def solution(task: Task) -> list[ToolCall]:
    return [ToolCall(name, arguments) for name, arguments in task.data["solution"]]


# Tasks and experts ------------------------------------------------------------------------------


class Played(NamedTuple):
    """An episode of the scripted expert."""

    calls: list[ToolCall]
    outcome: Outcome
    steps: list[Step]


@pytest.fixture(scope="module")
def experts() -> dict[tuple[str, bool, int], Played]:
    """(task, flawed, seed) -> the expert's episode."""
    made = {}
    for task in ALL:
        for flawed in (False, True):
            for seed in range(2):
                calls = [*DESK.expert(task, seed, flawed=flawed)]
                episode, steps = played(task, calls, seed)
                made[task.id, flawed, seed] = Played(calls, episode.outcome(), steps)
    return made


Experts = dict[tuple[str, bool, int], Played]


def test_the_expert_solves_every_task_and_a_flawed_one_fails_in_many_ways(experts: Experts) -> None:
    failures: Counter[str | None] = Counter()
    for (task, flawed, _), (_, outcome, steps) in experts.items():
        assert steps[-1].done, "a demonstration ends"
        if flawed:
            assert (outcome.success, outcome.reward) == (False, 0.0), task
            failures[outcome.failure] += 1
        else:
            assert (outcome.success, outcome.reward, outcome.failure) == (True, 1.0, None), task
            assert all(not step.tool_error for step in steps), task
            assert 3 <= len(steps) <= 9
    assert set(failures) == {"rule_broken", "wrong_argument", "gave_up", "incomplete"}
    assert min(failures.values()) > 20


def test_texts_rules_and_outcomes_are_those_of_the_version(experts: Experts) -> None:
    digest = hashlib.sha256(desk_digest(CONFIG).encode())
    for task in ALL:
        for flawed in (False, True):
            calls, outcome, steps = experts[task.id, flawed, 1]
            said = [m.content for step in steps for m in step.messages]
            transcript = ([call.as_json() for call in calls], said)
            digest.update(json.dumps([transcript, outcome.__dict__], default=str).encode())
            if task in ALL[::7]:
                again, same = played(task, calls, 1)
                assert (again.outcome(), same) == (outcome, steps), "episodes repeat"
    assert PINNED.get(VERSION) == digest.hexdigest(), "raise VERSION; see PINNED"


def entities(task: Task) -> set[str]:
    """Names, ids, rooms and items of a task."""
    text = json.dumps(task.data)
    found = set(re.findall(r"S_[a-z]\d[A-Z]\d|\b[A-Z][a-z]{5}\b", text))
    values = re.findall(r"\b(\w{4}) (\w{4})\b", text)
    heads, tails = set(world.VALUE_HEADS), set(world.VALUE_TAILS)
    return found | {f"{a} {b}" for a, b in values if a in heads and b in tails}


def test_no_entity_of_a_held_out_task_was_ever_in_training() -> None:
    seen: dict[str, str] = {}
    for task in ALL:
        assert len(entities(task)) >= 3
        for entity in entities(task):
            assert seen.setdefault(entity, task.id) == task.id, "an entity stands in two tasks"


def test_arguments_of_calls_appear_verbatim_in_earlier_messages() -> None:
    for task in ALL:
        episode = DESK.episode(task)
        told = " ".join(m.content for m in episode.reset(0))
        for call in solution(task):
            if call.name not in ("respond", "hand_over"):
                for value in call.arguments.values():
                    assert value in told, (task.id, call)
            told += " ".join(m.content for m in episode.step(call).messages)


# The user ---------------------------------------------------------------------------------------


def test_the_user_says_no_secret_unasked() -> None:
    for task in ALL:
        secrets = {v for k, v in task.data["user"]["knows"].items() if k != "name"}
        opening = DESK.episode(task).reset(0)[-1].content
        assert not any(secret in opening for secret in secrets), task.id
        _, steps = played(task, [say("hello")])
        assert steps[0].messages[0].content in vocabulary.CLARIFY


def test_the_user_answers_any_wording_of_a_question_and_nothing_more() -> None:
    task = of_family("bookings", "cancel_free")
    key = task.data["user"]["knows"]["booking"]
    for question in (
        "what is your booking?",
        "Could you please provide your booking ID?",
        "Which reservation number is it? I need the number.",
        "please tell me your booking.",
    ):
        _, steps = played(task, [say(question)])
        assert f"booking is {key}" in steps[0].messages[0].content
    task = next(t for t in ALL if t.domain == "bookings" and not t.data["user"]["volunteers"])
    knows = task.data["user"]["knows"]
    _, steps = played(task, [say("what is your booking?"), say("what is your room?")])
    assert knows["name"] not in steps[0].messages[0].content
    assert steps[1].messages[0].content == vocabulary.UNKNOWN


def test_the_user_agrees_to_a_fee_only_with_its_amount() -> None:
    task = of_family("bookings", "cancel_fee")
    ask, look_up, offer, cancel, *rest = solution(task)
    vague = say("there is a fee. do you want it?")
    episode, steps = played(task, [ask, look_up, vague, cancel])
    assert steps[2].messages[0].content in vocabulary.CLARIFY
    assert steps[3].tool_error == "rule_broken"
    episode, _ = played(task, [ask, look_up, vague, offer, cancel, *rest])
    assert episode.outcome().success


def test_endless_chatter_ends_with_the_user_leaving() -> None:
    for task in (of_family(d, next(iter(DOMAINS[d].families))) for d in DESK.domains()):
        episode, steps = played(task, [say("hello")] * 50)
        assert len(steps) == PATIENCE
        assert steps[-1].messages[0].content == vocabulary.LEAVE
        outcome = episode.outcome()
        assert (outcome.reward, outcome.failure) == (0.0, "incomplete")
        assert outcome.info["ended"] == "user_left"


# Devices: what only the user can do -------------------------------------------------------------


# Rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "family", "count", "told"),
    [
        ("bookings", "not_owner", 2, "the name is wrong"),
        ("bookings", "cancel_fee", 2, "tell the fee and ask first"),
        ("bookings", "cancel_fixed", 2, "it is fixed"),
        ("bookings", "reserve_other_day", 2, "ask for the day first"),
        ("orders", "not_owner", 2, "the name is wrong"),
        ("orders", "refund", 2, "tell the refund and ask first"),
        ("orders", "refund_sent", 2, "it is sent"),
        ("orders", "exchange_none", 4, "there is none"),
        ("devices", "broken", 2, "ask to restart first"),
        ("devices", "blocked", 2, "it is blocked"),
    ],
)
def test_a_tempting_call_breaks_a_rule_changes_nothing_and_fails_the_episode(
    domain: str, family: str, count: int, told: str
) -> None:
    task = of_family(domain, family)
    calls = solution(task)
    calls.insert(count, ToolCall(*task.data["tempting"]))
    episode, steps = played(task, calls)
    assert steps[count].tool_error == "rule_broken"
    assert json.loads(steps[count].messages[0].content) == {"error": f"not allowed, {told}"}
    outcome = episode.outcome()
    assert all(check.passed for check in outcome.checks), "the tool did not do it"
    assert (outcome.reward, outcome.failure) == (0.0, "rule_broken")
    assert outcome.components["rules"] == 0.0
    assert outcome.info["rules_broken"] == [f"not allowed, {told}"]


# What it is worth -------------------------------------------------------------------------------


def test_progress_grows_call_by_call_and_is_worth_nothing_without_an_end() -> None:
    task = of_family("orders", "refund")
    episode = DESK.episode(task)
    assert isinstance(DESK, HasExpert)
    episode.reset(0)
    passed = [sum(check.passed for check in episode.checks())]
    for call in solution(task)[:-1]:
        episode.step(call)
        passed.append(sum(check.passed for check in episode.checks()))
    assert passed == sorted(passed)
    assert len(set(passed[:6])) == 6
    assert passed[-1] == len(episode.checks())
    assert {check.kind for check in episode.checks()} == {"action", "communicate", "environment"}
    outcome = episode.outcome()
    assert (outcome.reward, outcome.failure) == (0.0, "limit")


def test_neither_trying_nor_saying_everything_is_a_solution() -> None:
    task = of_family("devices", "restart")
    ask, look_up, restart, end = solution(task)
    tried = [ask, look_up, say("please plug the cable."), restart, end]
    outcome = played(task, tried)[0].outcome()
    assert outcome.reward == 0.0
    assert [c.name for c in outcome.checks if not c.passed] == ["device"]
    task = of_family("orders", "look_up_state")
    calls = solution(task)
    shotgun = say("your order is open sent arrived.")
    outcome = played(task, [*calls[:2], shotgun, calls[-1]])[0].outcome()
    assert not outcome.success
    assert outcome.components["communicate"] == 0.0


FINISH = ToolCall("finish", {})
GIVE_UP = ToolCall("hand_over", {"reason": "problem"})
UNKNOWN_TOOL = ToolCall("delete_all", {})
NO_ARGUMENTS = ToolCall("get_order", {})


@pytest.mark.parametrize(
    ("failure", "calls"),
    [
        ("limit", lambda s: s[:2]),
        ("rule_broken", lambda s: [*s[:2], UNKNOWN_TOOL, s[3], FINISH]),
        ("wrong_tool", lambda s: [*s[:2], UNKNOWN_TOOL, NO_ARGUMENTS, FINISH]),
        ("wrong_argument", lambda s: [*s[:2], NO_ARGUMENTS, FINISH]),
        ("wrong_argument", lambda s: [s[0], ToolCall("get_order", {"order": "S_none"}), FINISH]),
        ("gave_up", lambda s: [FINISH]),
        ("gave_up", lambda s: [s[0], FINISH]),
        ("gave_up", lambda s: [*s[:4], GIVE_UP]),
        ("incomplete", lambda s: [*s[:4], FINISH]),
    ],
)
def test_failures_have_classes(failure: str, calls: Any) -> None:
    task = of_family("orders", "refund")
    outcome = played(task, calls(solution(task)))[0].outcome()
    assert outcome.failure == failure
    assert failure in FAILURES


def test_a_call_of_the_right_tool_about_the_wrong_record_is_a_wrong_argument() -> None:
    task = of_family("bookings", "cancel_free")
    ask, look_up, cancel, tell, end = solution(task)
    other = next(k for k in task.data["state"]["bookings"] if k != look_up.arguments["booking"])
    astray = ToolCall("get_booking", {"booking": other})
    assert played(task, [ask, astray, end])[0].outcome().failure == "wrong_argument"
    # where the right one follows, nothing was wrong
    assert played(task, [ask, astray, look_up, cancel, tell, end])[0].outcome().success


# Whatever a model may call ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("no_such_tool", {}, "wrong_tool"),
        ("x" * 60_000, {}, "wrong_tool"),
        ("Cancel", {"booking": "S_k3F7"}, "wrong_tool"),
        ("unlock", {"device": "S_k3F7", "code": "S_k3F7"}, "wrong_tool"),  # another domain's
        ("cancel", {}, "wrong_argument"),
        ("cancel", {"booking": None}, "wrong_argument"),
        ("cancel", {"booking": ["S_k3F7"]}, "wrong_argument"),
        ("cancel", {"booking": "S_k3F7", "really": True}, "wrong_argument"),
        ("cancel", {"booking": "x" * 60_000}, "wrong_argument"),
        ("cancel", {"booking": "S_k3F7", "y" * 60_000: "x"}, "wrong_argument"),
        ("reserve", {"room": "x", "day": "someday"}, "wrong_argument"),
        ("respond", {"content": ["a"]}, "wrong_argument"),
        ("finish", {"reason": "done"}, "wrong_argument"),
        ("hand_over", {}, "wrong_argument"),
        ("cancel", ["S_k3F7"], "wrong_argument"),
    ],
)
def test_a_malformed_call_gets_a_short_error_and_changes_nothing(
    name: str, arguments: Any, kind: str
) -> None:
    task = of_family("bookings", "cancel_free")
    episode = DESK.episode(task)
    episode.reset(0)
    before = episode.checks()
    step = episode.step(ToolCall(name, arguments))
    assert step.tool_error == kind
    assert not step.done
    (message,) = step.messages
    assert message.role == "tool"
    assert set(json.loads(message.content)) == {"error"}
    assert len(message.content) < 120
    assert episode.checks() == before
    for call in solution(task):
        episode.step(call)
    assert episode.outcome().success, "the episode continues unharmed"


# Configuration -----------------------------------------------------------------------------------


def test_unknown_users_domains_and_splits_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"scripted.*environment\.user\.model"):
        DeskEnvironment(CONFIG, UserConfig(model="some-model"))
    for domains in (("bookings", "hotels"), ("orders", "orders")):
        with pytest.raises(ConfigurationError, match=r"bookings, orders, devices"):
            DeskEnvironment(replace(CONFIG, domains=domains), UserConfig())
    with pytest.raises(DataError, match=r"split 'dev'.*test, train"):
        DESK.tasks("dev")
