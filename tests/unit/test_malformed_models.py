"""A model without a single well-formed answer: a warning, and no publication unless asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.running.console import Console, state_line
from flows.running.status import Watcher
from infra.jobs.failures import classify
from refiner_core.contract.errors import HealthStop
from refiner_core.contract.types import StageView
from tests.support.recorded_run import RecordedRun

#: Of a training whose rollouts had no answer block.
NOTHING: dict[str, Any] = {"episodes": 48, "counts": {"samples/malformed": 48}}
SAID = "all of its 48 rollouts were malformed"


def trained(root: Path, *overrides: str, **report: Any) -> RecordedRun:
    run = RecordedRun(root / "runs", *overrides)
    run.data()
    run.train("sft")
    run.train("grpo", **report)
    return run


def test_it_is_not_published_and_the_option_that_does_so_is_named(tmp_path: Path) -> None:
    run = trained(tmp_path, **NOTHING)
    with pytest.raises(HealthStop, match=rf"{SAID}.*publish\.malformed=true") as refused:
        run.carry_out("publish")
    outcome = classify(refused.value)
    assert (outcome.failure, outcome.decision) == ("unhealthy", "stop"), "it would be so again"
    told = RecordedRun(tmp_path / "runs", "publish.malformed=true")
    assert told.stage("publish").id == run.stage("publish").id, "the same publication"
    told.carry_out("publish")
    assert told.published("publish").is_dir()


def test_an_evaluation_counts_too_and_one_answer_is_enough(tmp_path: Path) -> None:
    """Demonstrations alone say nothing of the form of answers."""
    run = trained(tmp_path / "sft")
    run.evaluate("evaluate-grpo", quality=0.0)
    with pytest.raises(HealthStop, match=r"format_valid: 0 of 6 greedy"):
        run.carry_out("publish")
    report = {"episodes": 48, "counts": {"samples/malformed": 47, "samples/unscored": 0}}
    run = trained(tmp_path / "grpo", **report)
    run.evaluate("evaluate-base", quality=0.0)
    run.carry_out("publish")


def test_terminal_and_report_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, **NOTHING)
    rows = {row.name: row for row in Watcher(run.workspace, run.run, ask=False).look().stages}
    assert (rows["grpo"].state, rows["sft"].reason) == ("done", "")
    assert rows["grpo"].reason.startswith(f"warning: {SAID}")
    for command in ("status", "report"):
        assert main([command, run.run.run, f"workspace={tmp_path}/runs"]) == 0
        assert f"warning: {SAID}" in capsys.readouterr().out
    view = StageView("grpo", "grpo", "", "done", seconds=5.0, message=f"warning: {SAID}")
    assert state_line(view) == f"grpo: done (5.0 s), warning: {SAID}"
    heard = io.StringIO()
    console = Console(stream=heard, quiet=True)
    console.finish({"grpo": view})
    assert f"grpo: done: warning: {SAID}" in heard.getvalue(), "also where only warnings are wanted"
