"""Evidence of a sweep from a workspace, and several runs on one page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from flows.cli.main import main
from flows.reporting.samples import SamplesReader
from flows.reporting.several import compare_runs
from flows.reporting.writing import gather, make_sweep_report
from flows.running.status import find_run
from flows.runs.ui import app
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import trial_of
from refiner_core.evaluation.metrics import load_samples, write_samples
from refiner_core.report.sweep.comparing import make_report
from refiner_core.report.sweep.sweep_report import ArmNumber, SweepReport
from tests.support.recorded_sweep import RecordedSweep

ARMS = ("base", "more", "lenient", "gone")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RecordedSweep:
    root = tmp_path_factory.mktemp("sweep") / "runs"
    sweep = RecordedSweep(
        root,
        ARMS,
        seeds=(1, 2, 3, 4),
        effects={"more": 0.1},
        shifts={"lenient": 0.2},
        without=[("gone", s) for s in (1, 2, 3, 4)],
        question={"metric": "rubric_score", "text": "Does more help?"},
    )
    sweep.write()
    return sweep


@pytest.fixture(scope="module")
def report(made: RecordedSweep) -> SweepReport:
    return make_report(gather(Workspace.read_only(made.root), made.name))


def test_a_trial_without_its_sweep_is_refused_with_a_hint(made: RecordedSweep) -> None:
    workspace = Workspace.read_only(made.root)
    for word in ("base/seed1", "drawn/base/seed1"):
        with pytest.raises(ConfigurationError, match="Did you mean 'drawn:base/seed1'"):
            find_run(workspace, word)
    with pytest.raises(ConfigurationError, match="a trial is SWEEP:ARM/seedN"):
        find_run(workspace, "drawn")


def test_a_report_is_made_from_records_alone(made: RecordedSweep, report: SweepReport) -> None:
    assert report.question == "Does more help?"
    verdicts = {n.arm: n.verdict for n in report.primary.numbers}
    assert verdicts == {
        "base": None, "more": "better", "lenient": "judge moved", "gone": "missing"
    }  # fmt: skip
    assert {t["state"] for t in report.trials} == {"done", "waiting"}
    assert report.state == "stopped"
    assert report.provenance["evaluations read"] == 16
    assert {c["arm"] for c in report.curves} == {"base", "more", "lenient"}
    assert all(len(c["steps"]) == made.steps for c in report.curves)


def test_rubrics_have_credit_by_arm(report: SweepReport) -> None:
    rows = {row["rubric"]: row for row in report.rubrics}
    assert set(rows) == {"Cites", "Pads"}
    assert rows["Cites"]["differences"]["more"][0] == pytest.approx(0.1, abs=0.03)
    # More of what is bad is less credit.
    assert rows["Pads"]["differences"]["more"][0] == pytest.approx(-0.1, abs=0.03)


def test_an_evaluation_that_is_damaged_is_missing_and_named(tmp_path: Path) -> None:
    made = RecordedSweep(tmp_path, ("base", "more"), prompts=10)
    made.write()
    stage = made.stages("more", 2)["evaluate-grpo"]
    output = made.workspace.layout.attempt(stage, 1).output
    (output / "samples-sampled.parquet").write_bytes(b"PAR1 no more")
    report = make_report(gather(made.workspace, made.name))
    assert any(stage in w and "samples-sampled" in w for w in report.warnings)
    (more,) = [n for n in report.primary.numbers if n.arm == "more"]
    assert more.seeds == 2
    assert "eed 2 is missing: evaluate-grpo is left out: see the warnings" in more.note


def test_arms_that_were_made_with_different_code_are_warned_of(tmp_path: Path) -> None:
    made = RecordedSweep(tmp_path, arms=("base", "more"), seeds=(1, 2), prompts=4)
    made.write()
    assert not make_report(gather(made.workspace, made.name)).warnings
    trial = next(t for t in read_sweep(made.workspace, made.name).trials if t.arm == "more")
    path = made.workspace.layout.stage(trial.stages["evaluate-grpo"]).result
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "provenance": {"code": "0" * 16}}))
    (warning,) = make_report(gather(made.workspace, made.name)).warnings
    assert "2 versions of the code, more/seed1 with another one than" in warning
    assert f"refiner diff {made.name}:" in warning


def test_means_per_prompt_are_those_of_the_rows(tmp_path: Path) -> None:
    """In any order of rows, with other numbers of samples, and with gaps."""
    rng = np.random.default_rng(0)
    rows = [
        {
            "sample_id": f"p{p}", "sample_index": s, "response_text": "", "finish_reason": "stop",
            "status": "scored", "oracle": None if rng.random() < 0.3 else float(rng.random()),
            "judgements": "[]",
        }
        for p in rng.permutation(12).tolist()
        for s in range(1 + p % 4)
    ]  # fmt: skip
    path = tmp_path / "samples.parquet"
    write_samples(path, rows)
    found = SamplesReader().means(path)
    assert found.metrics == ("oracle",)
    assert list(found.prompts) == sorted({r["sample_id"] for r in load_samples(path)})
    for prompt, value in zip(found.prompts, found.values[0], strict=True):
        known = [r["oracle"] for r in rows if r["sample_id"] == prompt and r["oracle"] is not None]
        assert value == pytest.approx(np.mean(known)) if known else np.isnan(value)


# ---------------------------------------------------------------- several runs


BETAS = {"base": 0.0, "more": 0.05}


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> RecordedSweep:
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


def test_runs_that_differ_in_their_seed_are_seeds_of_one_arm(paired: RecordedSweep) -> None:
    runs = [*runs_of(paired, "base", 1, 2), *runs_of(paired, "more", 1, 2)]
    found, sweep = (compared(r) for r in (
        compare_runs(runs, paired.root), make_sweep_report(paired.name, paired.root)
    ))  # fmt: skip
    assert (found.arm, found.seeds, found.verdict) == ("beta=0.05", 2, sweep.verdict)
    assert (found.difference, found.difference_low) == (sweep.difference, sweep.difference_low)


def test_runs_with_other_seeds_are_compared_with_a_warning(paired: RecordedSweep) -> None:
    report = compare_runs([*runs_of(paired, "base", 1), *runs_of(paired, "more", 2)], paired.root)
    assert compared(report).difference == pytest.approx(0.1, abs=0.05)
    assert any("seed" in text and "1, 2" in text for text in report.warnings)
    assert {c["arm"] for c in report.curves} == set(report.arms)
    assert any(c["metric"] == "other/3" for c in report.curves)
    assert len({a["arm"] for a in report.side_by_side[0]["answers"]}) == 2


def test_a_selection_in_the_browser_has_a_page(paired: RecordedSweep) -> None:
    client = TestClient(app(paired.root, "key"), base_url="http://localhost")
    client.get("/", params={"key": "key"})
    runs = [*runs_of(paired, "base", 1), *runs_of(paired, "more", 1)]
    assert "2 runs compared" in client.get(f"/runs/{','.join(runs)}").text
    assert client.get(f"/runs/{runs[0]}").status_code == 404


def test_the_command_writes_a_page_and_prints_the_settings(
    paired: RecordedSweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = *runs_of(paired, "base", 1), *runs_of(paired, "more", 1)
    where = [f"workspace={paired.root}", "--out", str(tmp_path / "page")]
    assert main(["report", first, second, *where]) == 0
    said = capsys.readouterr()
    assert said.out.index("grpo.beta") < said.out.index("Answer")
    assert f"refiner diff {first} {second}" in said.err
    page = (tmp_path / "page/report.html").read_text()
    assert first in page
    assert not re.search(r"\b[Ss]weep\b", page.partition("<main")[2].partition("<script")[0])
    assert main(["report", first, second, first, *where]) == 2
    assert "twice" in capsys.readouterr().err
