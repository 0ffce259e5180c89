"""A sweep's report as tables in W&B."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.reporting.writing import Written, log_report
from infra.store.workspace import Workspace
from tests.support.sweep_reports import full_report


def test_tables_of_a_report_are_one_offline_run_that_can_be_read_back(tmp_path: Path) -> None:
    report = full_report()
    trials = tuple(replace(trial, run="") for trial in report.trials)  # none has begun
    written = Written(replace(report, trials=trials), tmp_path)
    folder = Path(log_report(Workspace.read_only(tmp_path / "runs"), written))
    assert folder.is_relative_to(tmp_path / "tracking")
    run, logged = _read_offline(folder)
    assert (run["run_group"], run["job_type"]) == (report.sweep, "report")
    table = json.loads((folder / "files" / logged["arms.path"]).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == 6 * len(report.comparisons)
    assert rows[2]["arm"] == "mixed-0"
    assert rows[2]["verdict"] == "better"
    assert rows[4]["value"] is None
    assert logged["trials.nrows"] == 18


def _read_offline(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run and what it has logged, by W&B's own reader."""
    reader = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(reader, capture_output=True, text=True, check=True).stdout.splitlines()
    records = {r["type"]: r[r["type"]] for r in map(json.loads, lines)}
    return records["run"], records["history"]["item"]
