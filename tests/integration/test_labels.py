"""`refiner reward label`, from the form to report and card; `refiner rubrics report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows import api
from flows.cli.main import main
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.types import JudgeRequest
from refiner_core.judges import build_judge
from tests.support.recorded_run import RecordedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run with an evaluated model that copies at random, and says nothing in some answers."""
    run = RecordedRun(
        tmp_path_factory.mktemp("labels") / "runs",
        *("stages=[data,sft,grpo,evaluate,publish]", "evaluate.models=[grpo]"),
        *("reward.rubric_source=instance+static", "publish.target=folder"),
    )
    run.data()
    run.train("sft")
    run.train("grpo")
    run.evaluate("evaluate-grpo", quality=0.8)
    run.carry_out("publish")
    run.carry_out("card")
    return run


def rows_of(form: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in form.read_text(encoding="utf-8").splitlines()]


def filled(form: Path, person: Path, label: Callable[[dict[str, Any]], Any]) -> Path:
    rows = [{**row, "label": label(row)} for row in rows_of(form)]
    person.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return person


def test_a_form_tells_nothing_and_its_labels_correct_report_and_card(
    run: RecordedRun, tmp_path: Path
) -> None:
    root = run.workspace.root
    made = api.write_label_form([], root, samples=6)
    rows = rows_of(Path(made["file"]))
    assert len(rows) == made["questions"] > 6
    shown = {key for row in rows for key in row}
    assert shown == {"form", "id", "asks", "question", "prompt", "answer", "criterion", "label"}
    assert "grpo" not in Path(made["file"]).read_text()
    never = filled(Path(made["file"]), tmp_path / "ann.jsonl", lambda row: 0)
    also = filled(
        Path(made["file"]), tmp_path / "bob.jsonl", lambda row: None if row["id"] > "0003" else 0
    )
    document = api.read_label_forms([never, also], root)
    assert document["people"] == {"ann": len(rows), "bob": 3}
    assert document["pairs"][0]["raw"]["value"] == 1.0
    (entry,) = document["corrected"]
    # People who find no merit and no fault give what negative criteria give.
    assert 0.0 < entry["value"] < entry["judged"]["value"]
    numbers = {(n["metric"], n["value"]) for n in api.report_of_run(run.run.run, root).numbers}
    assert ("rubric_score/people", entry["value"]) in numbers
    assert "`rubric_score/people`" in api.show_card([], root).card


def test_every_bad_row_is_named_at_once(run: RecordedRun, tmp_path: Path) -> None:
    root = run.workspace.root
    rows = rows_of(Path(api.write_label_form([], root, samples=6, seed=1)["file"]))
    bad = [{**rows[0], "label": 3}, {**rows[1], "label": 1}, {**rows[1], "label": 0}]
    lines = [*map(json.dumps, bad), "no JSON", json.dumps({**rows[2], "id": "9", "label": 1})]
    (tmp_path / "eve.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as error:
        api.read_label_forms([tmp_path / "eve.jsonl"], root)
    said = str(error.value)
    assert said.startswith("4 rows")
    for part in ("eve.jsonl:1: the label of 0001 is 3", ":3: 0002 has a label", ":4: is not JSON",
                 ":5: the form has no id 9"):  # fmt: skip
        assert part in said
    (tmp_path / "eve.jsonl").write_text('{"form": "../secret", "id": "0001", "label": 1}')
    with pytest.raises(ConfigurationError, match="has no form"):
        api.read_label_forms([tmp_path / "eve.jsonl"], root)


def test_people_as_the_judge_of_everything_give_the_judges_reward(
    run: RecordedRun, tmp_path: Path
) -> None:
    root = run.workspace.root
    made = api.write_label_form([], root, samples=6, citations=True)
    key = json.loads(Path(made["key"]).read_text())
    judge = build_judge(run.config.judge)

    def as_judge(row: dict[str, Any]) -> float | None:
        kind = key["rows"][int(row["id"]) - 1]["kind"]
        reference = row.get("criterion", row.get("reference"))
        request = JudgeRequest(kind, row["question"], row["answer"], reference)
        return judge.judge([request])[0].score

    same = filled(Path(made["file"]), tmp_path / "judge.jsonl", as_judge)
    document = api.read_label_forms([same], root)
    found = {entry["metric"]: entry for entry in document["corrected"]}
    assert {"rubric_score/people", "citation_f1/people", "reward/people"} <= found.keys()
    for entry in found.values():
        assert entry["value"] == pytest.approx(entry["judged"]["value"])
    assert document["judge"]["all"]["sensitivity"]["value"] > 0.9


@pytest.mark.slow
def test_a_smaller_set_is_a_file_that_rescore_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.integration.test_rescore import found as rescored
    from tests.integration.test_rescore import make_run

    mine = tmp_path / "mine.yaml"
    texts = ("Remark", "ends this", "zebra", "remark 1", "remark 2", "this")
    lines = (f"- {{title: {t}, description: 'Says \"{t}\"'}}\n" for t in texts)
    mine.write_text("rubrics:\n" + "".join(lines))
    run = make_run(tmp_path / "runs", f"reward.static_rubrics={mine}", steps=6)
    root = run.workspace.root
    assert main(["rubrics", "report", f"workspace={root}", "--keep", "0.6"]) == 0
    assert "| + zebra | mine | 0.00" in capsys.readouterr().out
    made = api.report_criteria(None, root, keep=0.6)
    assert made["smaller"]["reached"]
    assert len(made["smaller"]["kept"]) < len(texts)
    words = made["command"].split()
    entry = rescored(root, *words[words.index("--rubrics") :])
    assert entry["judging"][0]["calls"] == 0, "the criteria were judged already"
