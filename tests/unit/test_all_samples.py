"""Files of the page of all samples: complete, written once, and kept when rollouts are gone."""

import base64
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.reporting.run import all_samples
from flows.reporting.run.report import report_run
from flows.runs.bundling import bundle_run, unbundle
from infra.store.traces import read_rollouts
from refiner_core.contract.errors import DataError
from refiner_core.rejection.attempts import RejectionAttempt, write_attempts
from tests.support.recorded_run import RecordedRun
from tests.support.sampled_run import BAD, rollouts, sampled_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return sampled_run(tmp_path_factory.mktemp("runs"))


def index(folder: Path) -> Any:
    text = (folder / "samples" / "index.js").read_text()
    return json.loads(text.removeprefix("refinerSamples(").removesuffix(")\n"))


def unpacked(text: str) -> str:
    return gzip.decompress(base64.b64decode(text)).decode()


def samples(folder: Path, name: str) -> list[dict[str, Any]]:
    """Complete samples of a source."""
    source = next(one for one in index(folder)["sources"] if one["name"] == name)
    parts = [
        (folder / "samples" / f"{source['key']}-{n}.js").read_text().split('"')[3]
        for n in range(source["parts"])
    ]
    return [json.loads(line) for part in parts for line in unpacked(part).split("\n")]


def state(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in (folder / "samples").iterdir()}


def test_every_sample_is_on_the_page(run: RecordedRun, tmp_path: Path) -> None:
    report_run(workspace=run.workspace.root, folder=tmp_path)
    counts = {one["name"]: one["n"] for one in index(tmp_path)["sources"]}
    evaluations = {f"evaluate-{model}/greedy": 6 for model in ("base", "sft", "grpo")}
    assert counts == {**{f"grpo/{n}": 2 for n in range(1, 7)}, "grpo/7": 3, **evaluations}
    rows = read_rollouts(rollouts(run) / "step-00000003.parquet")
    assert [s["text"] for s in samples(tmp_path, "grpo/3")] == [r["response_text"] for r in rows]
    hostile, _, agent = samples(tmp_path, "grpo/7")
    assert hostile["text"] == BAD
    assert [j["outcome"] for j in hostile["judgements"]] == [0, 2]
    assert agent["talk"]["said"][1]["text"].startswith("look_up(")
    for path in (tmp_path / "samples").iterdir():
        assert "<" not in path.read_text().replace("<answer>", ""), "a script has a policy's text"


def test_a_second_report_writes_only_what_is_new(run: RecordedRun, tmp_path: Path) -> None:
    report_run(workspace=run.workspace.root, folder=tmp_path)
    before = state(tmp_path)
    new = rollouts(run) / "step-00000008.parquet"
    try:
        shutil.copy(rollouts(run) / "step-00000006.parquet", new)
        report_run(workspace=run.workspace.root, folder=tmp_path)
        after = state(tmp_path)
        assert {name for name in after if after[name] != before.get(name)} - {"index.js"} == {
            *(after.keys() - before.keys())
        }
        assert len(after) == len(before) + 1
        lost = tmp_path / "samples" / next(iter(after.keys() - before.keys()))
        lost.unlink()
        report_run(workspace=run.workspace.root, folder=tmp_path)
        assert lost.exists()
    finally:
        new.unlink()


def test_samples_of_deleted_rollouts_stay_also_in_a_bundle(tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "runs")
    report_run(workspace=run.workspace.root)
    shutil.rmtree(rollouts(run))
    written = report_run(workspace=run.workspace.root)
    assert len(samples(written.folder, "grpo/7")) == 3
    elsewhere = report_run(workspace=run.workspace.root, folder=tmp_path / "elsewhere")
    assert len(samples(elsewhere.folder, "grpo/7")) == 3
    bundle = bundle_run(workspace=run.workspace.root, out=tmp_path / "run.tar.gz")
    unbundle(bundle.file, tmp_path / "other")
    there = report_run(workspace=tmp_path / "other")
    assert len(samples(there.folder, "grpo/7")) == 3
    for script in ('refinerSamples("a-0","");alert(1)', "refinerSamples(alert(1))\n"):
        (written.folder / "samples" / "a-0.js").write_text(script)
        bad = bundle_run(workspace=run.workspace.root, out=tmp_path / f"{len(script)}.tar.gz")
        with pytest.raises(DataError, match="no script of a page of samples"):
            unbundle(bad.file, tmp_path / "another")


def test_a_long_training_shows_every_kth_step_and_the_last(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_samples, "MOST_SAMPLES", 26)
    report_run(workspace=run.workspace.root, folder=tmp_path)
    found = index(tmp_path)
    steps = [one["label"] for one in found["sources"] if one["stage"] == "grpo"]
    assert steps == ["1", "3", "5", "7"]
    assert found["left_out"] == 3


def test_attempts_of_rejection_sampling_are_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path, "stages=[data,rft]")
    run.data()

    def work(attempt: Any) -> dict[str, Any]:
        kept = RejectionAttempt("row-6", "", 0, 1, (1, 2), "kept text", "stop", reward=2.0)
        kept = RejectionAttempt(**{**vars(kept), "detail": [], "kept": True, "why": "full_success"})
        write_attempts(attempt.output_dir / "attempts.parquet", [kept])
        return {}

    run.do("sample", work)
    folder = report_run(workspace=tmp_path).folder
    (one,) = samples(folder, "sample/attempts")
    assert (one["text"], one["status"]) == ("kept text", "kept: full_success")
