"""`refiner report A B C`: several runs on one page, by the statistics of a sweep."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from flows.cli.main import main
from flows.reporting.several import compare_runs
from flows.reporting.writing import make_sweep_report
from flows.runs.ui import app
from infra.store.workspace import Workspace
from refiner_core.contract.records import trial_of
from refiner_core.report.sweep.sweep_report import ArmNumber, SweepReport
from tests.support.recorded_sweep import RecordedSweep

BETAS = {"base": 0.0, "more": 0.05}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RecordedSweep:
    """Two arms with two seeds each; every run has its arm's `grpo.beta`, given by hand."""
    sweep = RecordedSweep(
        tmp_path_factory.mktemp("sweep") / "runs", tuple(BETAS), (1, 2), effects={"more": 0.1}
    )
    sweep.write()
    for path in sweep.root.glob("runs/*/run.json"):
        record = json.loads(path.read_text())
        _, arm, seed = trial_of(record["provenance"]) or ("", "", 0)
        record["config"]["grpo"]["beta"], record["config"]["seed"] = BETAS[arm], seed
        record["config"]["grpo"]["learning_rate"] = 0.002
        record["overrides"] = [f"grpo.beta={BETAS[arm]}", f"seed={seed}", "sft.pack_length=2048"]
        path.write_text(json.dumps(record))
    return sweep


def runs_of(made: RecordedSweep, arm: str, *seeds: int) -> list[str]:
    workspace = Workspace.read_only(made.root)
    trials = {trial_of(run.provenance): run.run for run in workspace.runs()}
    return [trials[made.name, arm, seed] for seed in seeds]


def compared(report: SweepReport) -> ArmNumber:
    (number,) = [n for n in report.primary.numbers if n.arm != report.baseline]
    return number


def test_runs_that_differ_in_their_seed_are_seeds_of_one_arm(made: RecordedSweep) -> None:
    runs = [*runs_of(made, "base", 1, 2), *runs_of(made, "more", 1, 2)]
    found, sweep = (compared(r) for r in (
        compare_runs(runs, made.root), make_sweep_report(made.name, made.root)
    ))  # fmt: skip
    assert (found.arm, found.seeds, found.verdict) == ("beta=0.05", 2, sweep.verdict)
    assert (found.difference, found.difference_low) == (sweep.difference, sweep.difference_low)


def test_runs_with_other_seeds_are_compared_with_a_warning(made: RecordedSweep) -> None:
    report = compare_runs([*runs_of(made, "base", 1), *runs_of(made, "more", 2)], made.root)
    assert compared(report).difference == pytest.approx(0.1, abs=0.05)
    assert any("seed" in text and "1, 2" in text for text in report.warnings)
    assert {c["arm"] for c in report.curves} == set(report.arms)
    assert any(c["metric"] == "other/3" for c in report.curves)
    assert len({a["arm"] for a in report.side_by_side[0]["answers"]}) == 2


def test_what_one_has_set_that_differs_comes_first(made: RecordedSweep) -> None:
    report = compare_runs([*runs_of(made, "base", 1), *runs_of(made, "more", 1)], made.root)
    rows = [(row["field"], row["differs"], row["own"]) for row in report.settings]
    assert rows[0] == ("grpo.beta", True, True)
    assert ("grpo.learning_rate", False, False) in rows
    assert list(report.settings[0]["values"].values()) == [0.0, 0.05]


def test_a_selection_in_the_browser_has_a_page(made: RecordedSweep) -> None:
    client = TestClient(app(made.root, "key"), base_url="http://localhost")
    client.get("/", params={"key": "key"})
    runs = [*runs_of(made, "base", 1), *runs_of(made, "more", 1)]
    assert "2 runs compared" in client.get(f"/runs/{','.join(runs)}").text
    assert client.get(f"/runs/{runs[0]}").status_code == 404


def test_the_command_writes_a_page_and_prints_the_settings(
    made: RecordedSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = *runs_of(made, "base", 1), *runs_of(made, "more", 1)
    where = [f"workspace={made.root}", "--out", str(tmp_path / "page")]
    assert main(["report", first, second, *where]) == 0
    said = capsys.readouterr()
    assert said.out.index("grpo.beta") < said.out.index("Answer")
    assert f"refiner diff {first} {second}" in said.err
    page = (tmp_path / "page/report.html").read_text()
    assert first in page
    assert not re.search(r"\b[Ss]weep\b", page.partition("<main")[2].partition("<script")[0])
    assert main(["report", first, second, first, *where]) == 2
    assert "twice" in capsys.readouterr().err
