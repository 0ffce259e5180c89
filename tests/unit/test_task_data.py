"""Data of agents: tasks, demonstrations, conversations, leaks and refusals."""

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
from refiner_core.environments.protocol import Task, ToolCall, task_of_row
from refiner_core.environments.registry import environment_digest, load_own, open_environment
from refiner_core.environments.turns import call_text
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


def prepared(config: RecipeConfig, folder: Path, environment: Any = None) -> dict[str, Any]:
    return prepare_tasks(
        config,
        environment=environment or open_environment(config, evaluation=False),
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


USER = {"role": "user", "content": "x"}
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


def test_prepared_tasks_and_demonstrations(desk: tuple[Path, dict[str, Any]], tmp_path) -> None:
    folder, report = desk
    environment = open_environment(config_of(DESK), evaluation=False)
    for file, split in (("rl_train.parquet", "train"), ("rl_test.parquet", "test")):
        rows = load_prompts(folder / file)
        assert [task_of_row(row) for row in rows] == list(environment.tasks(split))
        assert sum(report["domains"][split].values()) == len(rows)
    assert report["rl"]["read"] == report["rl"]["kept"] + sum(report["rl"]["dropped"].values())
    train, val = (load_demonstrations(folder / f"sft_{side}.parquet") for side in ("train", "val"))
    for row in train[:8]:  # loss covers turns and their ends alone
        learned = [i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
        text = tiny_tokenizer().decode(learned)
        turns = [part for part in text.split("<|im_end|>") if part.strip()]
        assert all(turn.strip().startswith("<tool_call>") for turn in turns), text
        assert "<tool_response>" not in text
    assert 0 < report["sft"]["flawed"] < report["sft"]["read"]
    assert report["sft"]["kept"] == len(train) + len(val)
    sides = [{row.sample_id.partition("#")[0] for row in rows} for rows in (train, val)]
    assert sides[0]
    assert sides[0].isdisjoint(sides[1]), "demonstrations of one task are on one side"
    assert prepared(config_of(DESK), tmp_path)["files"] == report["files"], "the same bytes"


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**DESK, "data.max_prompt_token_length": 64}, r"data\.max_prompt_token_length=\d+ and"),
        ({**LAMPS, "environment.demonstrations": 5}, "has no expert"),
    ],
)
def test_tasks_that_do_not_fit_and_missing_experts_are_refused(changes, said, tmp_path) -> None:
    with pytest.raises((ConfigurationError, DataError), match=said):
        prepared(config_of(changes), tmp_path)


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (None, "has the id of lamps/t-red of 'train'"),
        (Task("other", "lamps", "test", "red lamp", {"lamp": "red"}), "has the content of"),
    ],
)
def test_a_test_task_among_the_training_tasks_is_refused(leak, said, tmp_path) -> None:
    config = config_of(LAMPS)
    environment = load_own(config.environment, config.environment.user)
    train = environment.tasks("train")
    splits = {"train": train, "test": (leak or train[0],)}
    environment.tasks = splits.__getitem__
    with pytest.raises(DataError, match=said):
        prepared(config, tmp_path, environment)


def test_rows_of_conversations_in_both_forms_are_the_same_tokens(tmp_path: Path) -> None:
    call = {"function": {"name": "get_order", "arguments": '{"order": "S_k3F7"}'}}
    structured = conversation(CALL)
    structured["messages"][2] = {"role": "assistant", "content": None, "tool_calls": [call]}
    written = conversation(CALL)
    written["messages"][2]["content"] = call_text(ToolCall("get_order", {"order": "S_k3F7"}))
    written["extra"] = 1  # another row, so that it is no duplicate by its messages
    written["messages"].append({"role": "user", "content": "thanks"})
    report = prepared(config_of(with_rows(tmp_path, structured, written)), tmp_path)
    assert report["sft"]["kept"] == 2
    one, two = load_demonstrations(tmp_path / "sft_train.parquet")
    assert one.input_ids == two.input_ids  # what follows the last turn teaches nothing
    assert one.loss_mask == two.loss_mask


def test_unusable_rows_are_counted_by_reason(tmp_path: Path) -> None:
    held_out = open_environment(config_of(DESK), evaluation=False).tasks("test")[0]
    rows = (
        conversation(CALL),
        conversation(CALL),
        conversation("I will look."),
        conversation(CALL, CALL, task_id=held_out.id),
        conversation(CALL, CALL, CALL, metadata={"task_id": "mine", "domain": "orders"}),
        {"prompt": conversation(*[CALL] * 4)["messages"], "metadata": {"domain": "orders"}},
    )
    report = prepared(config_of(with_rows(tmp_path, *rows)), tmp_path)
    assert report["sft"]["dropped"] == {"duplicate": 1, "held_out_task": 1, "no_call": 1}
    assert report["sft"]["domains"] == {"orders": 2, "unnamed": 1}
    assert report["sft"]["unnamed_task"] == 2, "these might be held out"


@pytest.mark.parametrize(("between", "key"), [("-", "task_id"), ("/", "tau2_task_id")])
def test_a_held_out_task_is_known_by_its_id_within_its_domain(tmp_path, between, key) -> None:
    """Ids of tau2-bench are unique within a domain; the user's rows name them alike."""
    for domain, expected in (("retail", ["held_out_task", True]), ("airline", [True, True])):
        rows = [
            conversation(*[CALL] * n, metadata={key: str(11 + n), "domain": domain}) for n in (1, 2)
        ]
        config = config_of(with_rows(tmp_path, *rows))
        found = read_conversations(config, tiny_tokenizer(), {f"retail{between}12"})
        assert [one if isinstance(one, str) else one.named for one in found] == expected


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "no"}, r"rows\.jsonl:1 has no turns"),
        ({"messages": [{"role": "human", "content": "x"}]}, "turn 1 has the role 'human'"),
        (conversation(CALL, tools="{"), "`tools` that cannot be read"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": ["x"]}]}, "a tool call that"),
    ],
)
def test_a_malformed_conversation_is_refused_with_its_place(row, said, tmp_path) -> None:
    with pytest.raises(DataError, match=said):
        prepared(config_of(with_rows(tmp_path, row)), tmp_path)


# ---------------------------------------------------------------- the user's environment


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def Lamps(): pass", "Lamps", "cannot be made: TypeError"),
        ("def Lamps(config, user): return 3", "Lamps", "has no name, version"),
    ],
)
def test_a_malformed_environment_file_is_refused(text: str, name: str, said: str, tmp_path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(text)
    config = config_of({"environment.name": f"{file}:{name}"})
    with pytest.raises(ConfigurationError, match=said):
        load_own(config.environment, config.environment.user)
