"""The closing lines of `refiner run` about publications."""

from __future__ import annotations

import shutil
from pathlib import Path

from flows.cli.run import summary_lines
from flows.running.calls import RunOutcome
from refiner_core.contract.types import StageView
from tests.support.recorded_run import RecordedRun


def said(run: RecordedRun) -> list[str]:
    """The closing lines, as far as they are about publications."""
    views = {}
    for stage in run.plan.stages:
        result = run.workspace.read_result(stage.id)
        report = {} if result is None else result.report
        state = "waiting" if result is None else "done"
        views[stage.name] = StageView(
            stage.name, stage.kind, stage.fingerprint, state, report=report
        )
    lines = list(summary_lines(RunOutcome(run.run.run, run.plan, views)))
    return [line for line in lines if "published" in line]


def published_steps(root: Path) -> RecordedRun:
    run = RecordedRun(root, "publish.which=every-save")
    run.data()
    run.train("sft")
    run.train("grpo")
    run.carry_out("publish")  # the last one is there first
    for step in (4, 2):
        run.export(step)
        run.carry_out(f"publish-step{step}")
    return run


def test_each_publication_is_one_line_and_one_that_is_gone_says_how_to_make_it_again(
    tmp_path: Path,
) -> None:
    run = published_steps(tmp_path / "runs")
    lines = [
        f"published: {run.published(f'publish{name}')} (step {step}, revision step-{step})"
        for name, step in (("-step2", 2), ("-step4", 4), ("", 6))
    ]
    assert said(run) == lines
    shutil.rmtree(run.published("publish-step2"))
    first, *rest = said(run)
    folder = run.workspace.layout.stage(run.stage("publish-step2").id).control
    assert first.endswith(f"delete {folder}")
    assert rest == lines[1:]
