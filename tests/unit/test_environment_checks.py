"""Recipes of agents: refused settings, edited rules, plans, and `refiner environments`."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import refiner_core.environments
from flows.checking.sources import resolve_sources
from flows.cli.main import main
from flows.stages.work import StageWork, run_stage
from infra.store.workspace import Workspace
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import EnvironmentConfig, RecipeConfig, UserConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import replace_fields
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import make_plan
from refiner_core.contract.records import StageSpec
from refiner_core.environments.checking import check_environment
from refiner_core.environments.registry import load_own
from tests.support.stage_io import FolderStageIO

README = Path(refiner_core.environments.__file__).with_name("README.md").read_text()
OWN = Path(__file__).parents[1] / "support" / "own_environment.py"
DESK = {"environment.name": "desk", "environment.demonstrations": 10}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment.max_turns": 0}, r"`environment\.max_turns` is 0.*at least 1"),
        ({"environment.demonstrations": 0}, r"environment\.demonstrations` is 0.*=500"),
        ({"data.sft_path": "mine.jsonl"}, "one source of demonstrations"),
        ({"data.rl_path": "mine.jsonl"}, r"`data\.rl_path`.*has no meaning with an environment"),
        (
            {"data.held_out_fraction": 0.3},
            r"`data\.held_out_fraction` is 0.3.*which has no meaning",
        ),
        ({"environment.user.base_url": "http://127.0.0.1:1/v1"}, r"user\.model` is ''"),
        ({"environment.name": "tau2"}, "a simulated user.*tau2-bench has no other"),
        (
            {"evaluate.user.model": "m", "evaluate.user.base_url": "http://me:key@host/v1"},
            "holds a user or password",
        ),
        ({"environment.user.api_key_env": "sk-abc"}, "never the key itself"),
        ({"environment.name": "desks"}, r"There is no environment 'desks'.*`desk`, `tau2`"),
        (
            {"environment.test_split": "train"},
            r"`environment\.test_split` is 'train'.*without a common",
        ),
    ],
)
def test_impossible_values_of_an_agent_are_refused(changes: dict[str, Any], said: str) -> None:
    config = replace_fields(RecipeConfig(), DESK | changes)
    with pytest.raises(ConfigurationError, match=said):
        check_config(config)


def _quoted(protocol: dict[str, Any]) -> str:
    return json.dumps(json.dumps(protocol))


def test_a_protocol_file_may_fix_an_agents_user_and_sampling() -> None:
    """Also in recipes whose evaluation has its own user, such as tau2."""
    user = {"model": "another", "base_url": "http://127.0.0.1:8000/v1"}
    protocol: dict[str, Any] = {"name": "p", "evaluate": {"num_samples": 2, "user": user}}
    check_config(load_recipe("tau2", [f"evaluate.protocols=[{_quoted(protocol)}]"]))
    check_config(load_recipe("tau2", ["evaluate.protocols=[held-out-greedy-v1]"]))
    protocol["evaluate"] = {"user": {**user, "base_url": "http://me:secret@127.0.0.1/v1"}}
    with pytest.raises(ConfigurationError, match=r"Under protocol p: .*holds a user or password"):
        check_config(load_recipe("tau2", [f"evaluate.protocols=[{_quoted(protocol)}]"]))
    rows = {"name": "p", "data": {"rl_path": "builtin:synthetic"}}  # agents have tasks, no rows
    with pytest.raises(ConfigurationError, match=r"Under protocol p: `data\.\w+` is"):
        check_config(load_recipe("tiny-tools", [f"evaluate.protocols=[{_quoted(rows)}]"]))


def test_an_environment_file_is_found_beside_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "lamps.py").write_bytes(OWN.read_bytes())
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("stages: [data, evaluate]\nenvironment: {name: 'lamps.py:Lamps'}\n")
    config = load_recipe(str(recipe))
    assert config.environment.name == f"{tmp_path / 'lamps.py'}:Lamps"
    moved = replace_fields(config, {"environment.name": f"{OWN}:Lamps"})
    ids = [[s.id for s in make_plan(c, resolve_sources(c)).stages] for c in (config, moved)]
    assert ids[0] == ids[1]  # where it lies is no part of what it is


@pytest.mark.parametrize("kind", ["data", "sample", "grpo", "evaluate"])
def test_no_stage_starts_under_rules_edited_after_planning(kind: str, tmp_path: Path) -> None:
    """A job may wait for days, and its record holds the plan."""
    file = tmp_path / "lamps.py"
    file.write_bytes(OWN.read_bytes())
    stages = ["data", "rft", "grpo", "evaluate"]
    config = replace_fields(RecipeConfig(), {"environment.name": f"{file}:Lamps", "stages": stages})
    planned = make_plan(config, resolve_sources(config)).find(kind)[0]
    file.write_text(OWN.read_text().replace("then finish", "and never finish"))
    work = StageWork(
        spec=StageSpec(
            *(1, planned.name, planned.kind, planned.fingerprint, planned.model, 1),
            *(planned.identity, planned.sources, planned.input_fingerprints),
        ),
        config=config,
        inputs={"data": tmp_path},
        input_stages={},
        output_dir=tmp_path / "out",
        io=FolderStageIO(tmp_path / "io"),
        stage_id=planned.id,
        workspace=Workspace(tmp_path / "workspace"),
    )
    with pytest.raises(ConfigurationError, match="is not what this stage was planned with"):
        run_stage(work)


def test_another_weight_of_partial_credit_samples_nothing_again() -> None:
    """Arms of a sweep share their attempts and their fine-tuning."""
    made = {}
    for changes in (
        {},
        {"environment.shaping.alpha": 0.5, "environment.unparsable": "exclude"},
        {"environment.shaping.weights": ["action=1"]},
        {"environment.user.temperature": 0.1},
    ):
        config = replace_fields(load_recipe("tiny-tools", []), changes)
        plan = make_plan(config, resolve_sources(config))
        made[str(changes)] = {s.name: s.fingerprint for s in plan.stages}
    first, alpha, weights, user = made.values()
    assert [name for name in first if first[name] != alpha[name]] == [
        *("grpo", "evaluate-grpo", "publish", "card")
    ]
    assert weights["sample"] != first["sample"] != user["sample"]


# ---------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["environments", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_environments_are_listed_shown_and_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, "list")
    assert (code, "desk" in out) == (0, True)
    code, out, _ = run(capsys, "show", "desk", "environment.domains=[orders]", "--tasks")
    assert code == 0
    assert "get_order(order)" in out
    assert "bookings" not in out
    code, out, _ = run(capsys, "check", "desk", "--most", "3")
    assert (code, out.split(";")[0]) == (0, "0 errors")
    file = tmp_path / "wrong.py"
    file.write_text(OWN.read_text().replace('"finish", "end"', '"finish", ""').replace(
        'tool_error="wrong_tool"', 'tool_error=""'))  # fmt: skip
    code, out, _ = run(capsys, "check", f"{file}:Lamps")
    assert code == 3
    assert "instead of 'wrong_tool'" in out
    file.write_text(OWN.read_text().replace(".get(split, ())", ".get(split, ('x',))"))
    assert run(capsys, "check", f"{file}:Lamps")[0] == 3


def test_a_task_is_played_by_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = 'what?\nswitch lamp=red\n{"name": "finish"}\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    code, out, err = run(capsys, "play", f"{OWN}:Lamps", "--task", "lamps/t-red")
    assert code == 0, err
    assert "user: switch on the red lamp" in out
    assert "reward 1" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("finish\n"))
    code, out, _ = run(capsys, "play", f"{OWN}:Lamps")
    assert code == 1
    assert "missing environment: lamp" in out


# ---------------------------------------------------------------- the README


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.S)
    return str(found)


def test_the_environment_in_the_readme_follows_the_protocol(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(block("python"))
    environment = load_own(EnvironmentConfig(name=f"{file}:Guess"), UserConfig())
    checked = check_environment(environment, ("train", "test"))
    assert not checked.errors
    assert checked.tasks == {"train": 5, "test": 5}
