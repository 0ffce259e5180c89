"""`refiner runs` and `tag`: rows, filters, notes, and an index that is never stale."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.runs.run_table import changes_of, list_rows
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from tests.bench.many_runs import write_runs
from tests.support.plans import claim, run_record, small_plan


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three finished runs; their rewards are known, their `grpo.beta` differ."""
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    write_runs(tmp_path / "runs", 3)
    return tmp_path / "runs"


def call(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_row_has_state_changes_metrics_and_cost(place: Path) -> None:
    rows = list_rows(place)
    assert [row.run for row in rows] == sorted((row.run for row in rows), reverse=True)
    assert {row.state for row in rows} == {"done"}
    assert all(row.model == "grpo" and row.metrics["reward"]["n"] == 100 for row in rows)
    assert all(row.cpu_hours == pytest.approx(3 / 60, rel=0.01) for row in rows)
    assert all(changes_of(rows)[row.run] == row.overrides for row in rows)


def test_the_base_model_is_no_result_of_a_run_that_trains(place: Path) -> None:
    run = Workspace.open(place).run_ids()[-1]
    stage = Workspace.open(place).read_run(run).stages["evaluate-grpo"]
    path = place / "stages" / stage / "result.json"
    result = json.loads(path.read_text())
    for entry in result["report"]["evaluations"]:
        entry["stage"] = "base"
    path.write_text(json.dumps(result))
    (row,) = (row for row in list_rows(place) if row.run == run)
    assert (row.model, row.metrics) == ("", {})


def test_what_all_runs_of_a_recipe_share_is_no_change(place: Path) -> None:
    rows = [replace(r, overrides=("seed=2", *r.overrides)) for r in list_rows(place)]
    assert all("seed=2" not in changes for changes in changes_of(rows).values())


@pytest.mark.parametrize(
    ("where", "matches"),
    [
        ("reward >= 0", lambda row: row.metrics["reward"]["value"] >= 0),
        ("grpo.beta < 0.005", lambda row: row.fields.get("grpo.beta", 0.0) < 0.005),
        ("0.2 < reward < 0.8 or state != 'done'", lambda row: 0.2 < row.value("reward") < 0.8),
        (
            'metric["oracle"] > 0.5 and recipe in ["tiny", "x"]',
            lambda row: row.value("oracle") > 0.5,
        ),
        ("judge_calls > 0", lambda row: False),  # missing values match nothing
        ("not judge_calls > 0", lambda row: True),
        ("sft.learning_rate == 3.0e-3", lambda row: True),  # set by the recipe, not by an override
    ],
)
def test_filters(place: Path, where: str, matches: Any) -> None:
    assert list_rows(place, where=where) == [row for row in list_rows(place) if matches(row)]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("__import__('os').system('id')", "has `__import__"),
        ("(lambda: 1)()", "has `"),
        ("reward + 1 > 2", "has `reward \\+ 1`"),
        ("reward >", "is not understood"),
        ("grpo.bta > 1", "Did you mean 'grpo.beta'"),
        ("state > 3", "compares 'done' with 3"),
    ],
)
def test_filters_that_are_refused(place: Path, where: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        list_rows(place, where=where)


def test_repetitions_and_nights_are_folded_away(place: Path) -> None:
    workspace = Workspace.open(place)
    run = workspace.read_run(list_rows(place)[0].run)
    again = replace(run, run="20270101-000000-tiny-ffff", started_at="2027-01-01T00:00:00+00:00")
    workspace.write_run(again)
    night = {**again.provenance, "nightly": "n"}
    workspace.write_run(replace(again, run="20270102-000000-tiny-eeee", provenance=night))
    assert len(list_rows(place)) == 3
    assert len(list_rows(place, every=True)) == 5


def test_an_unfinished_run_is_read_again_when_an_attempt_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFINER_STATE_DIR", str(tmp_path / "state"))
    workspace, plan = Workspace.open(tmp_path / "runs"), small_plan()
    workspace.write_run(run_record(workspace, plan))
    assert [row.state for row in list_rows(workspace.root)] == ["not begun"]
    claim(workspace, plan, "data")
    assert [row.state for row in list_rows(workspace.root)] != ["not begun"]


def test_a_damaged_record_hides_no_other_run(place: Path) -> None:
    rows = list_rows(place)
    (next(iter((place / "stages").glob("evaluate-*/result.json")))).write_text("{")
    (place / "runs" / rows[-1].run / "run.json").write_text("{")
    list_rows(place)
    shutil.rmtree(place.parent / "state")
    assert 1 <= len(list_rows(place)) <= 2


def test_notes_and_tags(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, where = list_rows(place)[0].run, f"workspace={place}"
    label = call(capsys, "tag", run[-6:], "good", "keep", "--note", "try beta", where)
    assert (label["run"], label["note"], label["tags"]) == (run, "try beta", ["good", "keep"])
    call(capsys, "tag", run, "keep", "--remove", where)
    (row,) = call(capsys, "runs", "--where", '"good" in tags and "beta" in note', where)["runs"]
    assert (row["run"], row["tags"]) == (run, ["good"])
    assert main(["status", run, where]) == 0
    assert "try beta #good" in capsys.readouterr().out
    assert main(["report", run, where, "--out", str(place.parent / "page")]) == 0
    assert "try beta #good" in capsys.readouterr().out.replace("\\", "")
    assert "try beta #good" in (place.parent / "page/report.html").read_text()
