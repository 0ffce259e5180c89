"""`refiner data`: rows of one's own are checked as a run would treat them, and converted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from refiner_core.contract.errors import DataError
from refiner_core.contract.loading import load_recipe
from refiner_core.data.prepare import prepare_data
from refiner_core.generation.load import load_tokenizer


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def bad_rows() -> list[Any]:
    return [{"question": "x", "answer": "y"}, "not json", {"conversations": [], "rubrics": {}}]


def test_the_examples_are_usable(tmp_path: Path) -> None:
    for which in ("sft", "rl"):
        file = write(tmp_path / f"{which}.jsonl", api.example_rows(which, 6))
        check = api.check_data(file, "tiny", which=which)
        assert (check.usable, check.problems, check.which) == (6, (), which)
        assert check.lengths["prompt"]["max"] <= 256


def test_every_bad_row_is_listed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = api.example_rows("rl", 3)
    bare = {"conversations": [{"role": "user", "content": "hi"}], "rubrics": good[0]["rubrics"]}
    file = write(tmp_path / "rows.jsonl", [*good, *bad_rows(), bare, good[0]])
    assert main(["data", "check", str(file), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["which"], found["rows"], found["usable"], found["refused"]) == ("rl", 8, 3, 3)
    assert [(p["line"], p["refused"]) for p in found["problems"]] == [
        *((4, True), (5, True), (6, True), (7, False), (8, False)),
    ]
    assert main(["data", "check", str(file)]) == 3
    assert "line 5" in capsys.readouterr().out


def test_the_data_stage_names_all_bad_rows_too(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [*api.example_rows("rl", 3), *bad_rows()])
    config = load_recipe("tiny", [f"data.rl_path={file}", "data.sft_path=null"])
    tokenizer = load_tokenizer(config.model.name_or_path, config.model)
    with pytest.raises(DataError, match=r"3 of 6 rows .*:4 .*:5 .*:6 ") as error:
        prepare_data(config, tokenizer=tokenizer, output_dir=tmp_path)
    assert "refiner data check" in error.value.fix


@pytest.mark.parametrize("words", [("plan", "tiny"), ("run", "tiny"), ("init", "mine")])
def test_nothing_begins_with_bad_rows(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", [*api.example_rows("rl", 3), *bad_rows()])
    named = ["--rl", "rows.jsonl"] if words[0] == "init" else ["data.rl_path=rows.jsonl"]
    assert main([*words, *named]) == 3
    said = capsys.readouterr().err
    assert all(f"rows.jsonl:{line} " in said for line in (4, 5, 6))
    assert "3 of 6 rows" in said
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_rows_are_dropped_for_the_reasons_of_the_data_stage(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", api.example_rows("rl", 40))
    overrides = ["data.max_prompt_token_length=100"]
    check = api.check_data(file, "tiny", overrides)
    config = load_recipe("tiny", [f"data.rl_path={file}", "data.sft_path=null", *overrides])
    tokenizer = load_tokenizer(config.model.name_or_path, config.model)
    report = prepare_data(config, tokenizer=tokenizer, output_dir=tmp_path)
    assert 0 < check.usable == report["rl"]["kept"]
    assert check.held_out == report["split"]["held_out_questions"]


def test_near_repetitions_across_the_split(tmp_path: Path) -> None:
    rows = api.example_rows("rl", 60)
    for number, row in enumerate(rows):
        prompt = row["conversations"][0]["content"]
        _, _, rest = prompt.partition("</query>")
        extra = "exactly" if number % 2 else "precisely"
        asked = f"Who measured the melting point of substance {number // 2} so {extra}"
        row["conversations"][0]["content"] = f"<query>{asked}</query>{rest}"
    check = api.check_data(write(tmp_path / "rows.jsonl", rows), "tiny")
    assert check.near
    for one in check.near:
        assert (one.training_line - 1) // 2 == (one.held_out_line - 1) // 2 or one.share >= 0.7


EVIDENCE = [{"id": "b7", "title": "T", "text": "B"}, "A wrote it."]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q", "answer": "A", "documents": EVIDENCE},
        {"prompt": "Q", "completion": "A", "contexts": EVIDENCE},
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
            "snippets": EVIDENCE,
        },
        {
            "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
            "passages": EVIDENCE,
        },
    ],
)
def test_other_layouts(tmp_path: Path, row: dict[str, Any]) -> None:
    row = {**row, "rubrics": ["Says A"], "id": 7, "split": "x"}
    file, out = write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl"
    assert api.convert_data(file, out) == {"rows": 1, "rubrics": 1}
    (made,) = map(json.loads, out.read_text().splitlines())
    asked, answered = made["conversations"]
    assert asked["content"].startswith("<query>Q</query>\n<tool_output>")
    assert answered == {"role": "assistant", "content": "A"}
    assert made["metadata"] == {"id": 7, "split": "x"}
    assert api.check_data(out, which="rl").usable == 1


def test_an_unknown_layout_writes_nothing(tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", [{"a": 1}]), tmp_path / "out.jsonl"
    with pytest.raises(DataError, match=r"in.jsonl:1 has no known layout \(it has a\)"):
        api.convert_data(file, out)
    assert not out.exists()
