"""The adapter to tau2-bench, on a double of the package in the shapes of its version 1.0.

The double's user asks a server over HTTP; its orchestrator and evaluation really play. With
REFINER_TAU2_PYTHON set to the Python of an environment that has tau2-bench, the same conversations
are played on the real package, too.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import EnvironmentConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError, DataError, UnsupportedError
from refiner_core.environments.protocol import InfrastructureError, Message, ToolCall
from refiner_core.environments.scoring import partial_score
from refiner_core.environments.tau2 import Tau2Environment, missing_tau2, package, tau2_digest
from refiner_core.environments.tau2.episode import read_reward_info
from tests.support.judge_server import JudgeServer, Reply
from tests.support.tau2_contract import (
    KEY_ENV,
    STOP,
    Talk,
    YesJudge,
    environment_at,
    play,
    said,
    step_of,
    try_domain,
    user_at,
)

ROOT = Path(__file__).parents[2]
DOUBLE = ROOT / "tests" / "support" / "tau2_fake"
DATA = ROOT / "tests" / "data" / "tau2"
KEY = "sk-not-a-real-key-2718"
SEAT = ToolCall("set_seat", {"ticket_id": "T1", "seat": "7F"})
DONE = ToolCall("done", {})


def print_line(text: str) -> ToolCall:
    return ToolCall("respond", {"content": text})


@pytest.fixture(scope="module", autouse=True)
def tau2() -> Iterator[None]:
    """The double in place of the package, unloaded afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOUBLE))
        patch.setenv(package.DATA_VARIABLE, str(DATA / "data"))
        patch.setenv(KEY_ENV, KEY)
        yield
    forget()


@pytest.fixture
def unloaded() -> Iterator[None]:
    """No package is loaded before a test, nor its own package after it."""
    forget()
    yield
    forget()


def forget() -> None:
    package._loaded.cache_clear()
    for name in [n for n in sys.modules if n.partition(".")[0] == "tau2"]:
        del sys.modules[name]


@pytest.fixture
def helpful() -> Iterator[str]:
    """A user who wants a seat and is content with any answer."""
    with JudgeServer(Talk("A seat at the window, please.", "Thank you.")) as server:
        yield server.base_url


def split_of(number: str) -> str:
    return {"0": "train", "1": "train", "2": "test", "3": "test", "4": "odd"}[number]


def task_of(environment: Tau2Environment, number: str) -> Any:
    tasks = environment.tasks(split_of(number))
    return next(task for task in tasks if task.id == f"kiosk-{number}")


# ---- whole conversations


def test_every_task_can_be_solved_by_its_reference_and_read_by_its_own_tools() -> None:
    facts = try_domain("kiosk", "train", 2)
    assert facts["solved"] == [1.0, 1.0]
    assert facts["idle"] == [0.0, 0.0]


@pytest.mark.skipif(
    "REFINER_TAU2_PYTHON" not in os.environ,
    reason="REFINER_TAU2_PYTHON names no Python that has tau2-bench",
)
@pytest.mark.timeout(600)
def test_the_real_package_behaves_as_the_double() -> None:
    given = {n: v for n, v in os.environ.items() if n != package.DATA_VARIABLE}
    if "REFINER_TAU2_DATA" in os.environ:
        given[package.DATA_VARIABLE] = os.environ["REFINER_TAU2_DATA"]
    command = [os.environ["REFINER_TAU2_PYTHON"], "-m", "tests.support.tau2_contract"]
    command += ["retail:test:3", "telecom:small:3"]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for facts in json.loads(done.stdout.splitlines()[-1]):
        assert facts["solved"] == [1.0] * facts["tasks"]
        assert sum(facts["idle"]) < facts["tasks"]


def test_the_agent_reads_exact_results_and_words_up_to_the_limit(helpful: str) -> None:
    """`max_turns` is the package's `max_steps`, which counts every message."""
    environment = environment_at(helpful, "kiosk")
    episode = environment.episode(task_of(environment, "0"))
    assert episode.reset(1) == (Message("user", "A seat at the window, please."),)
    found = step_of(episode, "find_ticket", ticket_id="T1")
    assert found.messages == (Message("tool", '{"ticket_id": "T1", "seat": "3A"}'),)
    assert step_of(episode, "respond", content="7F?").messages == (Message("user", "Thank you."),)
    end = episode.step(DONE)
    assert (end.messages, end.done) == ((), True)
    environment = environment_at(helpful, "kiosk", max_turns=5)
    episode = environment.episode(task_of(environment, "0"))
    episode.reset(1)
    assert not episode.step(SEAT).done
    assert episode.step(print_line("7F it is.")).done
    outcome = episode.outcome()
    assert (outcome.reward, outcome.failure) == (0.0, "limit")
    assert outcome.info["simulation"]["termination_reason"] == "max_steps"
    passed = {check.name: check.passed for check in outcome.checks}
    assert (passed["seat_0"], passed["find_0"], passed["7F"]) == (True, False, True)


def test_the_user_acts_on_their_side_and_the_agent_cannot() -> None:
    press = {"name": "press_button", "arguments": '{"button": "green"}'}
    with JudgeServer(Talk("The lamp is off.", said(None, [press]), "It is green now.")) as server:
        environment = environment_at(server.base_url, "kiosk")
        episode = environment.episode(task_of(environment, "1"))
        episode.reset(1)
        refused = step_of(episode, "press_button", button="green")
        assert refused.tool_error == "wrong_tool"
        answer = step_of(episode, "respond", content="Press the green button.")
        assert answer.messages == (Message("user", "It is green now."),)
        episode.step(DONE)
        outcome = episode.outcome()
        offered = [t["function"]["name"] for t in server.bodies[1]["tools"]]
    assert offered == ["press_button"]
    assert "press_button" not in [tool.name for tool in environment.tools("kiosk")]
    assert outcome.success
    assert outcome.failure is None
    assert outcome.components == {"env_assertions": 1.0}
    roles = [m["role"] for m in outcome.info["simulation"]["messages"]]
    assert roles.count("tool") == 2  # what the agent does not see is in the record
    assert "raw_data" not in json.dumps(outcome.info)


def test_a_task_may_begin_in_the_middle_of_a_conversation(helpful: str) -> None:
    environment = environment_at(helpful, "kiosk")
    task = task_of(environment, "3")
    episode = environment.episode(task)
    before, last = episode.reset(1)
    assert "assistant: Which seat would you like?" in before.content
    assert last == Message("user", "7F, please.")
    outcome = play(environment, task, [SEAT, DONE])
    assert outcome.success
    assert outcome.excluded == (), "there are no assertions to exclude"


# ---- how episodes fail


@pytest.mark.parametrize(
    ("calls", "failure"),
    [
        ([ToolCall("transfer_to_human_agents", {"summary": "no"}), DONE], "gave_up"),
        ([SEAT, DONE], "incomplete"),
        ([ToolCall("fly", {}), DONE], "wrong_tool"),
        ([ToolCall("set_seat", {"ticket_id": "T9", "seat": "1A"}), DONE], "wrong_argument"),
        ([ToolCall("set_seat", {"requestor": "user", "self": 1}), DONE], "wrong_argument"),
        ([ToolCall("respond", {"content": " "}), DONE], "wrong_argument"),
        ([print_line("…")] * 2, "limit"),
    ],
)
def test_failures_have_classes(calls: list[ToolCall], failure: str, helpful: str) -> None:
    environment = environment_at(helpful, "kiosk", max_turns=6)
    outcome = play(environment, task_of(environment, "0"), calls)
    assert (outcome.failure, outcome.success) == (failure, False)
    assert {check.kind for check in outcome.checks} >= {"action", "communicate", "db"}


# ---- the user simulator's faults


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(500), "user_down"),
        (Reply(401, body=json.dumps({"error": {"message": f"bad key {KEY}"}})), "user_down"),
        (Reply(drop=True), "user_down"),
        (said(None), "user_off_script"),
        (Reply(body='{"choices": []}'), "user_off_script"),
        (said(None, [{"name": "press_button", "arguments": '{"button": "x"}'}]), "user_off_script"),
        (said(f"Bye. {STOP}"), "user_off_script"),
    ],
)
def test_a_fault_of_the_user_is_no_failure_of_the_model(reply: Reply, kind: str) -> None:
    """Of the last two, one calls tools without end."""
    with JudgeServer(Talk(reply)) as server:
        environment = environment_at(server.base_url, "kiosk", max_turns=1000)
        with pytest.raises(InfrastructureError) as caught:
            environment.episode(task_of(environment, "1")).reset(1)
    assert caught.value.kind == kind
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None  # a traceback would quote what the server said


def test_a_user_that_takes_too_long_is_slow() -> None:
    with JudgeServer(Talk(said("Well…", delay_s=5.0))) as server:
        config = EnvironmentConfig(name="tau2", domains=("kiosk",))
        environment = Tau2Environment(config, user_at(server.base_url, timeout_s=0.1))
        with pytest.raises(InfrastructureError) as caught:
            environment.episode(task_of(environment, "0")).reset(1)
    assert caught.value.kind == "user_slow"


# ---- assertions in plain language


def test_assertions_are_excluded_and_recorded_as_such(helpful: str) -> None:
    environment = environment_at(helpful, "kiosk")
    outcome = play(environment, task_of(environment, "2"), [SEAT, print_line("7F."), DONE])
    assert outcome.success
    assert outcome.excluded == ("nl",)
    assert outcome.components == {"db": 1.0}
    assert environment.describe()["excluded"] == ["nl"]
    assert "NL_ASSERTION" in environment.describe()["reward"]


@pytest.mark.parametrize(("score", "reward"), [(1.0, 1.0), (0.5, 0.0)])
def test_assertions_are_asked_of_the_judge(score: float, reward: float, helpful: str) -> None:
    judge = YesJudge(score)
    environment = environment_at(helpful, "kiosk", judge)
    calls = [SEAT, print_line("Your seat is 7F."), DONE]
    outcome = play(environment, task_of(environment, "2"), calls)
    assert outcome.reward == outcome.components["nl"] == reward
    assert outcome.excluded == ()
    assert [check.passed for check in outcome.checks if check.kind == "nl"] == [reward == 1.0] * 2
    asked = judge.requests
    assert asked[0].reference == "The agent says which seat it is."
    assert "assistant: Your seat is 7F." in asked[0].text
    assert environment.describe()["excluded"] == []


def test_a_failed_judge_is_an_infrastructure_error(helpful: str) -> None:
    environment = environment_at(helpful, "kiosk", YesJudge(None))
    with pytest.raises(InfrastructureError) as caught:
        play(environment, task_of(environment, "2"), [SEAT, DONE])
    assert caught.value.kind == "judge_failed"
    with pytest.raises(ConfigurationError, match="nl_assertions"):
        Tau2Environment(EnvironmentConfig(name="tau2", nl_assertions="judge"), UserConfig())


def test_a_task_without_any_measurement_is_refused(helpful: str) -> None:
    """Its reward would be 1 for any behaviour."""
    with pytest.raises(DataError, match="kiosk 4"):
        environment_at(helpful, "kiosk").tasks("odd")
    judged = environment_at(helpful, "kiosk", YesJudge())
    assert [task.id for task in judged.tasks("odd")] == ["kiosk-4"]


# ---- reward_info


def shape(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((DATA / f"reward_info_{name}.json").read_text())
    return values


@pytest.mark.parametrize("as_text", [False, True])
def test_reward_info_becomes_checks_and_components(as_text: bool) -> None:
    values = shape("full")
    measured = read_reward_info(json.dumps(values) if as_text else values)
    assert measured.reward == 0.0
    assert measured.components == {
        **{"db": 1.0, "env_assertions": 1.0, "action": 0.0, "communicate": 1.0}
    }
    kinds = [check.kind for check in measured.checks]
    assert kinds == ["action"] * 4 + ["communicate", "environment", "db"]
    assert [check.passed for check in measured.checks[:4]] == [True, True, False, False]
    assert measured.checks[3].detail == 'the user: press_button({"button": "green"})'
    weights = {"action": 0.5, "communicate": 0.15, "environment": 0.35}
    assert partial_score(measured.checks, weights) == pytest.approx(0.75)
    without = [check for check in measured.checks if check.kind != "environment"]
    assert partial_score(without, weights) == pytest.approx(0.4 / 0.65, abs=1e-4)  # .6154


@pytest.mark.parametrize(
    "broken",
    [
        "",
        {"reward": float("nan")},
        {"reward": 1.0, "reward_breakdown": {"NEW_BASIS": 1.0}},
        {"reward": 1.0, "action_checks": [{"action_match": True}]},
        {"reward": 1.0, "db_check": {}},
    ],
)
def test_unknown_shapes_of_rewards_are_refused(broken: Any) -> None:
    with pytest.raises(InfrastructureError) as caught:
        read_reward_info(broken)
    assert caught.value.kind == "unreadable_reward"


# ---- tasks


def test_tasks_tools_and_policy_are_those_of_the_package(helpful: str, monkeypatch) -> None:
    environment = environment_at(helpful, "kiosk")
    first = environment.tasks("train")[0]
    assert (first.id, first.domain, first.split) == ("kiosk-0", "kiosk", "train")
    assert first.summary == "You want a seat at the window. You do not mind the row."
    names = [tool.name for tool in environment.tools("kiosk")]
    assert names == ["find_ticket", "set_seat", "transfer_to_human_agents", "respond", "done"]
    assert all(tool.parameters["type"] == "object" for tool in environment.tools("kiosk"))
    policy = environment.policy("kiosk")
    assert policy.endswith("What happens at the kiosk, only the user can do.")
    assert "`respond`" in policy
    with pytest.raises(DataError, match="no split 'dev'"):
        environment.tasks("dev")
    with pytest.raises(ConfigurationError, match="kiosk"):
        environment_at(helpful, "cinema").policy("cinema")
    monkeypatch.setenv(package.DATA_VARIABLE, str(DATA / "nowhere"))
    with pytest.raises(DataError, match="TAU2_DATA_DIR"):
        environment_at(helpful, "kiosk").tasks("train")


def test_the_description_holds_the_user_and_neither_address_nor_key(helpful: str) -> None:
    described = environment_at(helpful, "kiosk").describe()
    assert "127.0.0.1" not in json.dumps(described)
    assert KEY not in json.dumps(described)
    assert described["user"]["model"] == "user"
    config = EnvironmentConfig(name="tau2", domains=("kiosk",))
    assert Tau2Environment(config, replace(user_at(helpful), model="b")).describe() != described


def test_a_file_of_splits_replaces_those_of_the_package(helpful: str, tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps({"kiosk": {"train": ["3"], "test": ["1", "0"]}}))
    environment = environment_at(helpful, "kiosk", tasks=str(path))
    assert [task.id for task in environment.tasks("test")] == ["kiosk-0", "kiosk-1"]
    for text, named in (
        ('{"kiosk": {"train": ["77"]}}', "'77'"),
        ("{", r"splits\.json"),
        ("[]", r"splits\.json"),
        ('{"retail": {}}', r"splits\.json"),
        ('{"kiosk": {"train": [1]}}', r"splits\.json"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=named):
            environment_at(helpful, "kiosk", tasks=str(path)).tasks("train")


# ---- the package itself


@pytest.mark.usefixtures("unloaded")
def test_the_recipe_is_planned_without_the_package(tmp_path, monkeypatch) -> None:
    from flows.api import make_recipe_plan
    from flows.checking.resources import planning_notes

    without = [p for p in sys.path if p != str(DOUBLE)]
    monkeypatch.setattr(sys, "path", without)
    config = EnvironmentConfig(name="tau2")
    assert tau2_digest(config) == package.ABSENT
    assert "git clone" in missing_tau2()
    with pytest.raises(UnsupportedError, match="not installed"):
        Tau2Environment(config, UserConfig()).tasks("train")
    plan = make_recipe_plan("tau2", [f"workspace={tmp_path}"])
    kinds = {stage.kind for stage in plan.stages}
    assert kinds >= {"data", "sft", "sample", "rft", "grpo", "evaluate"}
    assert any("tau2-bench is not installed here" in note for note in planning_notes(plan))
    monkeypatch.setattr(sys, "path", [str(DOUBLE), *without])
    there = make_recipe_plan("tau2", [f"workspace={tmp_path}"])
    assert not any("not installed" in note for note in planning_notes(there))
    prints = [{s.name: s.fingerprint for s in made.stages} for made in (plan, there)]
    assert prints[0]["data"] != prints[1]["data"]


@pytest.mark.usefixtures("unloaded")
def test_the_package_for_chemistry_is_refused_unread(tmp_path, monkeypatch) -> None:
    (tmp_path / "tau2").mkdir()
    (tmp_path / "tau2" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "chemistry" in missing_tau2()
    with pytest.raises(UnsupportedError, match="not tau2-bench"):
        Tau2Environment(EnvironmentConfig(name="tau2"), UserConfig()).tasks("train")
    assert tau2_digest(EnvironmentConfig(name="tau2")) == package.ABSENT


@pytest.mark.usefixtures("unloaded")
def test_the_digest_follows_the_data_and_imports_nothing(tmp_path, monkeypatch) -> None:
    config = EnvironmentConfig(name="tau2", domains=("kiosk",))
    before = tau2_digest(config)
    assert "tau2" not in sys.modules
    shutil.copytree(DATA / "data", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv(package.DATA_VARIABLE, str(tmp_path))
    assert tau2_digest(config) == before
    (tmp_path / "tau2" / "domains" / "kiosk" / "tasks.json").write_text("[]")
    assert tau2_digest(config) != before
