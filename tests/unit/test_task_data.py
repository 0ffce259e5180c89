"""The data stage of agents: which tasks and demonstrations there are, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.fields import replace_fields
from refiner_core.data.conversations import read_conversations
from refiner_core.data.prepared import load_demonstrations, load_prompts
from refiner_core.data.tasks import prepare_tasks
from refiner_core.environments.checking import check_environment
from refiner_core.environments.protocol import Task, task_of_row
from refiner_core.environments.registry import (
    environment_digest,
    load_own,
    open_environment,
)
from refiner_core.models import tiny_tokenizer

OWN = Path(__file__).parents[1] / "support" / "own_environment.py"
DESK = {
    "environment.name": "desk",
    "environment.demonstrations": 40,
    "environment.flawed_demonstrations": 0.5,
    "data.max_prompt_token_length": 4096,
}
LAMPS = {"environment.name": f"{OWN}:Lamps", "stages": ["data", "grpo", "evaluate"]}


def config_of(*changes: dict[str, Any]) -> RecipeConfig:
    values = {key: value for change in changes for key, value in change.items()}
    return replace_fields(RecipeConfig(), values)


def prepared(config: RecipeConfig, folder: Path) -> dict[str, Any]:
    return prepare_tasks(
        config,
        environment=open_environment(config, evaluation=False),
        digest=environment_digest(config),
        tokenizer=tiny_tokenizer(),
        output_dir=folder,
    )


def conversation(*turns: str, **more: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Serve the user."},
        {"role": "user", "content": "my order is S_k3F7"},
    ]
    for turn in turns:
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "tool", "content": '{"state": "open"}'})
    return {"messages": messages, **more}


CALL = '<tool_call>{"name": "get_order", "arguments": {"order": "S_k3F7"}}</tool_call>'


def with_rows(tmp_path: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.sft_path": str(file), "environment.demonstrations": 0}
    return {**DESK, **changes, "data.validation_fraction": 0.0}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("desk")
    return folder, prepared(config_of(DESK), folder)


def test_tasks_come_back_as_they_were(desk: tuple[Path, dict[str, Any]]) -> None:
    folder, report = desk
    environment = open_environment(config_of(DESK), evaluation=False)
    for file, split in (("rl_train.parquet", "train"), ("rl_test.parquet", "test")):
        rows = load_prompts(folder / file)
        assert [task_of_row(row) for row in rows] == list(environment.tasks(split))
        assert sum(report["domains"][split].values()) == len(rows)
    assert report["rl"]["read"] == report["rl"]["kept"] + sum(report["rl"]["dropped"].values())


def test_demonstrations_learn_turns_and_their_ends_alone(
    desk: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = desk
    tokenizer = tiny_tokenizer()
    rows = load_demonstrations(folder / "sft_train.parquet")
    for row in rows[:8]:
        learned = [i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
        text = tokenizer.decode(learned)
        turns = [part for part in text.split("<|im_end|>") if part.strip()]
        assert all(turn.strip().startswith("<tool_call>") for turn in turns), text
        assert "<tool_response>" not in text
    assert 0 < report["sft"]["flawed"] < report["sft"]["read"]
    kept = report["sft"]["kept"]
    assert kept == report["files"]["sft_train.parquet"]["rows"] + len(
        load_demonstrations(folder / "sft_val.parquet")
    )


def test_demonstrations_at_one_task_are_on_one_side(desk: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = desk
    sides = [
        {row.sample_id.partition("#")[0] for row in load_demonstrations(folder / name)}
        for name in ("sft_train.parquet", "sft_val.parquet")
    ]
    assert sides[0]
    assert sides[0].isdisjoint(sides[1])


def test_the_same_recipe_gives_the_same_bytes(
    desk: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, report = desk
    assert prepared(config_of(DESK), tmp_path)["files"] == report["files"]


def test_fewer_tasks_are_a_choice_from_all_domains(tmp_path: Path) -> None:
    report = prepared(config_of(DESK, {"environment.max_train_tasks": 30}), tmp_path)
    assert sum(report["domains"]["train"].values()) == 30
    assert len(report["domains"]["train"]) == 3
    asked = {row.sample_id for row in load_prompts(tmp_path / "rl_train.parquet")}
    rows = load_demonstrations(tmp_path / "sft_train.parquet")
    shown = {row.sample_id.partition("#")[0] for row in rows}
    assert shown <= asked, "else SFT learns from tasks that the recipe does not use"
    whole = len(open_environment(config_of(DESK), evaluation=False).tasks("train"))
    assert report["rl"]["dropped"] == {"over_max_rows": whole - 30}


def test_tasks_that_do_not_fit_name_the_fields(tmp_path: Path) -> None:
    short = {"data.max_prompt_token_length": 64}
    with pytest.raises(DataError, match=r"data\.max_prompt_token_length=\d+ and grpo\.max_token"):
        prepared(config_of(DESK, short), tmp_path)


def test_a_test_task_among_the_training_tasks_is_refused(tmp_path: Path) -> None:
    config = config_of(LAMPS)
    environment = load_own(config.environment, config.environment.user)
    leaky = {"train": environment.tasks("train"), "test": environment.tasks("train")[:1]}
    environment.tasks = lambda split: leaky[split]  # type: ignore[method-assign]
    with pytest.raises(DataError, match="has the id of lamps/t-red of 'train'"):
        prepare_tasks(
            config,
            environment=environment,
            digest="x",
            tokenizer=tiny_tokenizer(),
            output_dir=tmp_path,
        )
    renamed = Task("other", "lamps", "test", "red lamp", {"lamp": "red"})
    leaky["test"] = (renamed,)
    with pytest.raises(DataError, match="has the content of"):
        prepare_tasks(
            config,
            environment=environment,
            digest="x",
            tokenizer=tiny_tokenizer(),
            output_dir=tmp_path,
        )


def test_an_environment_without_an_expert_makes_no_demonstrations(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no expert"):
        prepared(config_of(LAMPS, {"environment.demonstrations": 5}), tmp_path)


def test_rows_of_conversations_in_both_forms_are_the_same_tokens(tmp_path: Path) -> None:
    call = {"function": {"name": "get_order", "arguments": '{"order": "S_k3F7"}'}}
    structured = conversation(CALL)
    structured["messages"][2] = {"role": "assistant", "content": None, "tool_calls": [call]}
    written = conversation(CALL)
    from refiner_core.environments.protocol import ToolCall
    from refiner_core.environments.turns import call_text

    written["messages"][2]["content"] = call_text(ToolCall("get_order", {"order": "S_k3F7"}))
    written["extra"] = 1  # another row, so that it is no duplicate by its messages
    written["messages"].append({"role": "user", "content": "thanks"})
    report = prepared(config_of(with_rows(tmp_path, structured, written)), tmp_path)
    assert report["sft"]["kept"] == 2
    one, two = load_demonstrations(tmp_path / "sft_train.parquet")
    assert one.input_ids == two.input_ids  # what follows the last turn teaches nothing
    assert one.loss_mask == two.loss_mask


def test_what_becomes_of_rows_that_cannot_be_used_is_counted(tmp_path: Path) -> None:
    held_out = open_environment(config_of(DESK), evaluation=False).tasks("test")[0]
    rows = (
        conversation(CALL),
        conversation(CALL),
        conversation("I will look."),
        conversation(CALL, CALL, task_id=held_out.id),
        conversation(CALL, CALL, CALL, metadata={"task_id": "mine", "domain": "orders"}),
    )
    report = prepared(config_of(with_rows(tmp_path, *rows)), tmp_path)
    assert report["sft"]["dropped"] == {"duplicate": 1, "held_out_task": 1, "no_call": 1}
    assert report["sft"]["domains"] == {"orders": 1, "unnamed": 1}
    assert report["sft"]["unnamed_task"] == 1, "nobody can tell whether that one is held out"


@pytest.mark.parametrize("between", ["-", "/"])
def test_a_held_out_task_is_told_by_its_id_within_its_domain(tmp_path: Path, between: str) -> None:
    """Ids of tau2-bench are unique within a domain, and rows of one's own name them like that."""
    conversations = _conversations({f"retail{between}12"}, tmp_path, {"domain": "retail"})
    assert conversations == ["held_out_task", True]
    assert _conversations({f"retail{between}12"}, tmp_path, {"domain": "airline"}) == [True, True]


def _conversations(
    held_out: set[str], tmp_path: Path, more: dict[str, str], *, ids: bool = True
) -> list[Any]:
    own = [{"task_id": 12}, {"task_id": 13}] if ids else [{}, {}]
    rows = [conversation(CALL, **own[0], **more), conversation(CALL, CALL, **own[1], **more)]
    config = config_of(with_rows(tmp_path, *rows))
    found = read_conversations(config, tiny_tokenizer(), held_out)
    return [one if isinstance(one, str) else one.named for one in found]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "no"}, r"rows\.jsonl:1 has no turns"),
        ({"messages": [{"role": "human", "content": "x"}]}, "turn 1 has the role 'human'"),
        ({"messages": [{"role": "user", "content": 5}]}, "turn 1 has no content"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no turn of the assistant"),
        (conversation(CALL, tools="{"), "`tools` that cannot be read"),
        (conversation(CALL, tools=[{}]), "KeyError: 'name'"),
        (conversation(CALL, tools=5), "`tools` that cannot be read"),
        (conversation(CALL, tools=[{"name": "x", "parameters": [1]}]), "`tools` that cannot"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": ["x"]},
                ]
            },
            "a tool call that cannot be read",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        prepared(config_of(with_rows(tmp_path, row)), tmp_path)


# ---------------------------------------------------------------- an environment of one's own


def test_an_environment_of_ones_own_is_a_file(tmp_path: Path) -> None:
    report = prepared(config_of(LAMPS), tmp_path)
    assert report["domains"] == {"train": {"lamps": 2}, "test": {"lamps": 1}}


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("", "Lamps", "no attribute 'Lamps'"),
        ("import nothing_of_that_name", "Lamps", "cannot be imported: ModuleNotFoundError"),
        ("def Lamps(): pass", "Lamps", "cannot be made: TypeError"),
        ("def Lamps(config, user): return 3", "Lamps", "has no name, version"),
    ],
)
def test_a_file_that_is_no_environment_says_what_is_missing(
    text: str, name: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    config = config_of({"environment.name": f"{file}:{name}"})
    with pytest.raises(ConfigurationError, match=said):
        load_own(config.environment, config.environment.user)


def test_the_check_finds_what_a_run_would_stumble_over() -> None:
    config = config_of(LAMPS)
    environment: Any = load_own(config.environment, config.environment.user)
    episode = environment.episode

    def careless(task: Task) -> Any:
        made = episode(task)
        step = made.step
        made.step = lambda call: step(call) if call.name != "no_such_tool" else {}[call.name]
        return made

    environment.episode = careless
    environment.speak = "say"
    found = check_environment(environment, ("train",)).errors
    assert any("raises KeyError" in f.what for f in found)
    assert any("no tool 'say'" in f.what for f in found)
