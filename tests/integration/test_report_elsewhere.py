"""A sweep's report beside its picture in Prefect, and its tables in W&B."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.picture.feed import Drawing, Node, Story
from flows.reporting.tracked import log_report
from flows.reporting.writing import Written, write_files
from flows.running.pipeline import run_drawn
from infra.host.processes import ProcessId
from infra.store.layout import sweep_call
from infra.store.workspace import Workspace
from refiner_core.contract.views import StageView
from tests.support.prefect_server import PrefectApi, eventually
from tests.support.sweep_reports import full_report


class Quiet:
    """A console that remembers warnings."""

    def __init__(self) -> None:
        self.warned: list[str] = []

    def show(self, views: Mapping[str, StageView]) -> None: ...
    def note(self, message: str) -> None: ...
    def finish(self, views: Mapping[str, StageView]) -> None: ...
    def close(self) -> None: ...

    def warn(self, message: str) -> None:
        self.warned.append(message)


class Work:
    """A sweep of one trial whose work is to write its report."""

    def __init__(self, written: Written) -> None:
        self._written = written
        self._views = {"a/seed1": StageView("a/seed1", "trial", "", "waiting")}

    def start(self) -> None: ...
    def request_stop(self, reason: str) -> None: ...

    def views(self) -> dict[str, StageView]:
        return self._views

    def join(self) -> dict[str, StageView]:
        write_files(self._written)
        self._views = {"a/seed1": StageView("a/seed1", "trial", "", "done")}
        return self._views


@pytest.mark.prefect
def test_the_report_stands_beside_the_picture_of_its_sweep(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    workspace = Workspace.open(tmp_path)
    report = full_report()
    written = Written(report, workspace.layout.reports / report.sweep)
    call = sweep_call(report.sweep)
    story = Story(str(workspace.layout.run(call).events))
    nodes = (Node("a/seed1", "trial", "a/seed1", "", ()),)
    drawing = Drawing(report.sweep, call, str(ProcessId.of()), nodes, story)
    console = Quiet()
    run_drawn(Work(written), drawing, use_server=True, console=console)
    assert console.warned == []
    flow_run = prefect.flow_run(call)
    assert flow_run is not None
    artifacts = prefect.artifacts(flow_run["id"])
    assert "mixed-0 is better than static-0" in artifacts["rubrics-x-citations-report"]["data"]
    assert written.page.as_uri() in artifacts["rubrics-x-citations-report-page"]["data"]


class LateReport(Work):
    """Its trial has ended a while before the last report says so, as a report takes its time."""

    def __init__(self, written: Written, drawn: Callable[[], object]) -> None:
        super().__init__(written)
        self._drawn = drawn

    def join(self) -> dict[str, StageView]:
        write_files(replace(self._written, report=replace(self._written.report, comparisons=())))
        eventually(self._drawn)
        self._views = {"a/seed1": StageView("a/seed1", "trial", "", "done")}
        time.sleep(5)  # in which a picture that does not wait for it is complete
        write_files(self._written)
        return self._views


@pytest.mark.prefect
def test_the_last_report_of_a_sweep_is_shown_though_it_comes_after_the_last_trial(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    """The picture was complete without it, and said for ever how many trials were running."""
    workspace = Workspace.open(tmp_path)
    report = replace(full_report(), sweep="late")
    call = sweep_call(report.sweep)
    story = Story(str(workspace.layout.run(call).events))
    nodes = (Node("a/seed1", "trial", "a/seed1", "", ()),)
    drawing = Drawing(report.sweep, call, str(ProcessId.of()), nodes, story)

    def shown() -> list[str]:
        flow_run = prefect.flow_run(call)
        wanted = {"flow_runs": {"id": {"any_": [flow_run["id"] if flow_run else ""]}}}
        found = prefect.post("/artifacts/filter", wanted) if flow_run else []
        return [a["data"] for a in found if a["key"] == "late-report"]

    work = LateReport(Written(report, workspace.layout.reports / report.sweep), shown)
    run_drawn(work, drawing, use_server=True, console=Quiet())
    found = shown()
    assert len(found) == 2
    assert any("mixed-0 is better than static-0" in text for text in found)


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
