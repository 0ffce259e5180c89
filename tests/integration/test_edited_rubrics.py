"""A job whose rubric file was edited between planning and starting judges nothing by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command import ROOT, environment
from tests.support.recorded_run import RecordedRun

SET = "rubrics:\n  - {title: t, description: Names the year of the opening.}\n"


def test_a_stage_whose_rubrics_were_edited_after_planning_is_refused(tmp_path: Path) -> None:
    rubrics = tmp_path / "mine.yaml"
    rubrics.write_text(SET)
    run = RecordedRun(
        tmp_path / "runs",
        "reward.rubric_source=instance+static",
        f"reward.static_rubrics={rubrics}",
    )
    run.data()
    stage, attempt = run.stage("evaluate-base"), run.claim("evaluate-base")
    rubrics.write_text(SET.replace("year", "date"))  # the job was still queued
    done = subprocess.run(
        [sys.executable, "-m", "flows.worker", "--workspace", str(run.workspace.root), stage.id,
         str(attempt)],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    record = run.workspace.read_record(stage.id)
    assert record is not None
    (closed,) = record.attempts
    assert closed.outcome is not None
    assert "has changed since this stage was planned" in str(closed.outcome)
    assert record.result is None
