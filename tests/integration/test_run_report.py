"""The report of a run from its records: whole, running, damaged or reclaimed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.reporting.run import report_of_run, report_run
from infra.store.orchestrators import take_up
from infra.store.workspace import Workspace
from refiner_core.contract.records import AttemptOutcome
from refiner_core.report.run.run_report import Row, RunReport, StageRow
from tests.support.recorded_run import RecordedRun

MODELS = "evaluate.models=[base,sft,grpo]"


def write_metrics(run: RecordedRun, name: str, metrics: Mapping[str, list[float | None]]) -> Path:
    """What the newest attempt at a stage has logged, a line per step."""
    stage = run.stage(name).id
    attempt = run.workspace.layout.stage(stage).attempt_numbers()[-1]
    path = run.workspace.layout.attempt(stage, attempt).metrics
    steps = max(map(len, metrics.values()))
    lines = [
        {"step": step + 1, "metrics": {m: v[step] for m, v in metrics.items() if step < len(v)}}
        for step in range(steps)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_events(run: RecordedRun, *events: Mapping[str, Any]) -> None:
    path = run.workspace.layout.run(run.run.run).events
    with path.open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def finish(run: RecordedRun) -> None:
    """Everything up to the evaluations; GRPO was preempted once and makes the model better."""
    run.data()
    run.train("sft")
    write_metrics(run, "sft", {"loss/train_avg": [4.0, 2.0, None, 1.0]})
    run.fail("grpo", AttemptOutcome("preempted", "resume", "the node was taken away", step=3), 30.0)
    run.train("grpo", judge={"asked": 40, "calls": 25, "prompt_tokens": 900})
    write_metrics(run, "grpo", {"scores": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]})
    run.evaluate("evaluate-base", quality=0.0)
    run.evaluate("evaluate-sft", quality=0.5)
    run.evaluate("evaluate-grpo", quality=1.0)
    write_events(
        run,
        *({"event": "claim", "stage": s.name, "attempt": 1} for s in run.plan.stages),
        {"event": "claim", "stage": "grpo", "attempt": 2},
        {"event": "reclaimed", "bytes": 5000},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = RecordedRun(
        tmp_path_factory.mktemp("finished") / "runs",
        *(MODELS, "stages=[data,sft,grpo,evaluate]", "publish.price_per_gpu_hour=2.5"),
        *("grpo.resources.gpus=2", 'judge.extra_body={"user":"hunter2"}'),
    )
    finish(run)
    return run


@pytest.fixture(scope="module")
def report(finished: RecordedRun) -> RunReport:
    return report_of_run(finished.run.run, finished.workspace.root)


@pytest.fixture
def copied(finished: RecordedRun, tmp_path: Path) -> Workspace:
    """The finished run, to be damaged."""
    shutil.copytree(finished.workspace.root, tmp_path / "runs")
    return Workspace.read_only(tmp_path / "runs")


def row_of(report: RunReport, name: str) -> StageRow:
    return next(row for row in report.stages if row.name == name)


def examples_of(report: RunReport, kind: str) -> list[Row]:
    return [example for example in report.examples if example["kind"] == kind]


def folder_of(workspace: Workspace, kind: str, rest: str = "") -> Path:
    (folder,) = workspace.layout.stages.glob(f"{kind}-*")
    return folder / rest


# ---------------------------------------------------------------- a whole run


def test_every_stage_has_its_attempts_times_and_inputs(report: RunReport) -> None:
    assert (report.state, report.warnings) == ("done", ())
    names = [row.name for row in report.stages]
    assert names[:3] == ["data", "sft", "grpo"]
    grpo = row_of(report, "grpo")
    assert grpo.inputs == ("data", "sft")
    first = grpo.attempts[0]
    assert (first["number"], first["outcome"], first["seconds"]) == (1, "preempted", 30.0)
    assert grpo.attempts[1]["outcome"] == "done"
    assert grpo.attempts[0]["text"] == "the node was taken away"
    assert grpo.seconds >= 30.0
    assert grpo.output_bytes
    assert Path(grpo.output).is_dir()
    assert all(not row.skipped and row.made_by == "" for row in report.stages)


def test_changes_by_training_are_paired_and_have_intervals(report: RunReport) -> None:
    (valid,) = (c for c in report.changes if c["metric"] == "format_valid")
    assert (valid["before"], valid["after"], valid["n"]) == ("sft", "grpo", 6)
    assert valid["difference"] == pytest.approx(0.5)
    assert valid["low"] < 0.5 < (valid["high"] or 0.0)


def test_answers_before_and_after_show_what_each_part_of_the_reward_added(
    report: RunReport,
) -> None:
    best = examples_of(report, "before and after")[0]
    assert (best["why"], best["metric"]) == ("improved most", "reward")
    assert best["question"]
    assert best["question"] in best["prompt"]
    before, after = best["said"]
    assert (before["model"], before["status"]) == ("sft", "malformed")
    assert before["text"] == "I do not know."
    assert (after["model"], after["status"]) == ("grpo", "scored")
    assert after["judgements"]
    shares = [part["share"] or 0.0 for part in after["parts"]]
    assert sum(shares) == pytest.approx(after["reward"])
    assert best["change"] == pytest.approx((after["reward"] or 0.0) - (before["reward"] or 0.0))


def test_samples_of_the_last_step_are_shown_the_best_and_the_worst(report: RunReport) -> None:
    shown = {e["why"]: e for e in examples_of(report, "rollout")}
    assert shown.keys() >= {"best", "worst"}
    assert [said["model"] for said in shown["best"]["said"]] == ["step 6"]
    assert shown["best"]["question"]


def test_cost_counts_devices_money_and_the_judge(report: RunReport) -> None:
    grpo = row_of(report, "grpo")
    assert report.cost["gpu_hours"] == pytest.approx((grpo.seconds or 0.0) * 2 / 3600)
    assert report.cost["money"] == pytest.approx(2.5 * (report.cost["gpu_hours"] or 0.0))
    assert report.cost["judge"]["asked"] == 40
    assert report.disk["used"]["rollouts"] > 0
    assert report.disk["reclaimed_bytes"] == 5000
    assert report.disk["free_bytes"]


def test_settings_are_those_that_are_not_defaults_and_no_secrets(report: RunReport) -> None:
    assert report.settings["grpo.num_training_steps"] == 6
    assert "grpo.async_steps" not in report.settings
    assert "hunter2" not in json.dumps([report.settings, report.overrides, report.command])
    assert "judge.extra_body=(not shown)" in report.overrides
    assert report.provenance["commit"] == "c0ffee"


# ---------------------------------------------------------------- other runs


def test_reused_stages_name_their_run_and_cost_nothing(finished: RecordedRun) -> None:
    second = RecordedRun(finished.workspace.root, *finished.overrides[8:])
    assert second.run.stages == finished.run.stages
    report = report_of_run(second.run.run, second.workspace.root)
    assert report.state == "done"
    assert all(row.skipped and row.made_by == finished.run.run for row in report.stages)
    assert (report.cost["seconds"], report.cost["judge"], report.incidents) == (None, {}, ())
    assert report.numbers
    assert report.curves
    assert report.examples
    shutil.rmtree(second.workspace.layout.run(second.run.run).folder)


def test_losses_of_an_earlier_run_are_no_cost_of_a_later_one(tmp_path: Path) -> None:
    first = RecordedRun(tmp_path / "runs", "stages=[data,sft]")
    first.data()
    first.fail("sft", AttemptOutcome("preempted", "resume", "taken away", step=2), 1000.0)
    cost = report_of_run(first.run.run, first.workspace.root).cost
    assert cost["seconds"] >= 1000.0
    time.sleep(1.1)  # ids of runs, and times of records, are told apart by it
    second = RecordedRun(first.workspace.root, "stages=[data,sft]")
    second.train("sft")
    report = report_of_run(second.run.run, second.workspace.root)
    assert report.cost["seconds"] < 100.0
    assert (report.cost["lost_seconds"], report.cost["lost_steps"]) == (0.0, 0)
    assert row_of(report, "sft").seconds == pytest.approx(1000.0, abs=100.0), "of all attempts"


def test_a_running_run_reports_its_progress(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs", "stages=[data,sft,grpo]")
    run.data()
    run.train("sft")
    run.begin("grpo")
    write_metrics(run, "grpo", {"scores": [1.0, 2.0], "judge/asked": [8, 9]})
    take_up(run.workspace, run.run.run)
    written = report_run(run.run.run, run.workspace.root)
    report = written.report
    assert (report.state, report.ended_at) == ("running", "")
    assert report.state_text.startswith("2 of 3 stages done")
    (attempt,) = row_of(report, "grpo").attempts
    assert attempt["outcome"] == "under way"
    assert [c["values"] for c in report.curves if c["metric"] == "scores"] == [(1.0, 2.0)]
    assert any("--watch" in command for command in report.next_commands)
    assert written.page.exists()


def test_a_reason_with_half_a_character_or_a_token_can_be_written(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs", "stages=[data,sft,grpo]")
    run.data()
    why = "half \ud83d of it, hf_abcdefgh12"
    run.fail("sft", AttemptOutcome("bug", "stop", why, exit_code=1))
    written = report_run(run.run.run, run.workspace.root)
    for name in ("report.json", "report.md", "report.html"):
        text = (written.folder / name).read_text()
        assert "of it, " in text
        assert "hf_abc" not in text


def test_a_failed_run_reports_the_cause_and_the_next_command(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "runs", "stages=[data,sft,grpo]")
    run.data()
    run.fail("sft", AttemptOutcome("not_finite", "stop", "the loss is NaN", exit_code=5, step=2))
    report = report_of_run(run.run.run, run.workspace.root)
    assert report.state == "failed"
    assert report.state_text == "sft failed: the loss is NaN."
    assert [c.split()[1] for c in report.next_commands[:2]] == ["logs", "resume"]
    assert row_of(report, "grpo").state == "waiting"
    assert row_of(report, "grpo").seconds is None
    assert not report.incidents[0]["resolved"]
    text = (report_run(run.run.run, run.workspace.root).folder / "report.md").read_text()
    assert "not tried again by itself (open)" in text


def test_a_rollout_whose_judge_failed_has_no_score_and_the_cause(
    copied: Workspace, finished: RecordedRun
) -> None:
    from infra.store.traces import encode_rollouts

    failed = {"kind": "rubric", "score": None, "status": "failed", "detail": "timed out"}
    common = {"step": 6, "sample_index": 0, "finish_reason": "stop", "response_text": "…"}
    rows = [
        {**common, "sample_id": "row-6", "status": "unscored", "reward": None,
         "judgements": [failed], "reward/claims": 1.0},
        {**common, "sample_id": "row-7", "status": "scored", "reward": 1.0,
         "judgements": [], "reward/claims": 1.0},
    ]  # fmt: skip
    folder = folder_of(copied, "grpo", "attempts/0002/rollouts")
    (folder / "step-00000006.parquet").write_bytes(encode_rollouts(rows))
    report = report_of_run(finished.run.run, copied.root)
    (unscored,) = (e for e in report.examples if e["why"] == "no score")
    assert (unscored["said"][0]["reward"], unscored["said"][0]["failed"]) == (None, "timed out")


# ---------------------------------------------------------------- damaged, reclaimed


def test_reclaimed_rollouts_and_prompts_are_reported_and_the_rest_is_kept(
    copied: Workspace, finished: RecordedRun
) -> None:
    shutil.rmtree(folder_of(copied, "grpo", "attempts/0002/rollouts"))
    folder_of(copied, "data", "attempts/0001/output/rl_test.parquet").unlink()
    report = report_of_run(finished.run.run, copied.root)
    assert examples_of(report, "rollout") == []
    said = " ".join(report.warnings)
    assert "rollouts of grpo" in said
    assert "prompts of evaluations" in said
    (first, *_) = examples_of(report, "before and after")
    assert (first["question"], bool(first["said"])) == ("", True)


def damage_record(workspace: Workspace) -> None:
    folder_of(workspace, "sft", "spec.json").write_text("{")


def damage_metrics(workspace: Workspace) -> None:
    folder_of(workspace, "grpo", "attempts/0002/metrics.jsonl").write_text("what?\n")


def damage_samples(workspace: Workspace) -> None:
    for path in workspace.layout.stages.glob("evaluate-*/attempts/*/output/samples-greedy.parquet"):
        path.write_bytes(path.read_bytes()[:100])


def damage_rollouts(workspace: Workspace) -> None:
    for path in workspace.layout.stages.glob("grpo-*/attempts/*/rollouts/*.parquet"):
        path.write_bytes(b"PAR1")


def damage_orchestrator(workspace: Workspace) -> None:
    for folder in workspace.layout.runs.iterdir():
        (folder / "orchestrator.json").write_text("[")
        (folder / "events.jsonl").write_bytes(b"\xff\xfe nonsense")


@pytest.mark.parametrize(
    "damage", [damage_record, damage_metrics, damage_samples, damage_rollouts, damage_orchestrator]
)
def test_a_damaged_file_is_a_warning_and_costs_its_part_alone(
    copied: Workspace, finished: RecordedRun, damage: Any
) -> None:
    damage(copied)
    assert main(["report", finished.run.run, f"workspace={copied.root}"]) == 0
    report = json.loads((copied.layout.reports / finished.run.run / "report.json").read_text())
    assert report["warnings"]
    assert len(report["stages"]) == 6
    assert report["numbers"]
    if damage is damage_record:
        (sft,) = (row for row in report["stages"] if row["name"] == "sft")
        assert (sft["state"], report["state"]) == ("unreadable", "failed")


# ---------------------------------------------------------------- the command


@pytest.fixture
def at(finished: RecordedRun) -> Iterator[str]:
    yield f"workspace={finished.workspace.root}"
    shutil.rmtree(finished.workspace.layout.reports, ignore_errors=True)


def test_the_newest_run_is_reported_without_a_sweep(
    finished: RecordedRun, at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", at]) == 0
    printed = capsys.readouterr()
    folder = finished.workspace.layout.reports / finished.run.run
    reports = {"report.html", "report.md", "report.json"}
    assert {p.name for p in folder.iterdir()} == {*reports, "samples.html", "samples"}
    assert f"Page: {folder}/report.html" in printed.err
    assert "grpo minus sft" in printed.out
    assert "## 1 incident" in printed.out
    assert "preempted" in (folder / "report.md").read_text()
    assert finished.run.run in (folder / "report.html").read_text()


def test_json_has_the_whole_report_and_out_and_short_ids_are_accepted(
    finished: RecordedRun, at: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["report", finished.run.run[-6:], at, "--out", str(out), "--json"]
    assert main([*words, "--watch"]) == 0, "nobody works on it: watching ends at once"
    values = json.loads(capsys.readouterr().out)
    assert (values["run"], values["folder"]) == (finished.run.run, str(out))
    assert not finished.workspace.layout.reports.exists()
