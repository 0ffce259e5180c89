"""The status of a run: states, rates, its orchestrator, its logs, and which run is the newest."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cards.inspection import show_card
from flows.cli.main import main
from flows.nightly.checkpoints import resolve
from flows.publishing.by_hand import _run_with_model
from flows.running.status import (
    BackgroundRouter,
    RunStatus,
    RunWatcher,
    StageStatus,
    eta_s,
    find_run,
    newest_runs,
)
from infra.host.processes import ProcessId
from infra.jobs.dispatch import Router
from infra.jobs.dispatcher import AttemptRef, JobStatus, OpenAttempt
from infra.jobs.failures import outcome_of
from infra.store.orchestrators import orchestrator_of, take_up
from infra.store.workspace import Workspace
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.records import Attempt, AttemptOutcome, RunRecord, to_json
from refiner_core.nightly.definition import Checkpoint, CheckpointSource
from tests.support.plans import OWNER, claim, run_record, small_plan
from tests.support.recorded_run import RecordedRun


@pytest.fixture
def run(workspace: Workspace) -> RunRecord:
    plan = small_plan()
    run = replace(run_record(workspace, plan), config=to_json(plan.config))
    workspace.write_run(run)
    return run


def look(workspace: Workspace, run: RunRecord) -> RunStatus:
    return RunWatcher(workspace, run).observe()


def stage(status: RunStatus, name: str) -> StageStatus:
    return next(s for s in status.stages if s.name == name)


def test_a_pause_by_the_monitor_is_no_failure(workspace: Workspace, run: RunRecord) -> None:
    planned = claim(workspace, small_plan(), "sft")
    outcome = AttemptOutcome("monitor_pause", "stop", "GRPO is paused after step 10", 6, 10)
    workspace.close_attempt(planned.id, 1, outcome, 10.0)
    row = stage(look(workspace, run), "sft")
    assert (row.state, row.reason) == ("paused", "GRPO is paused after step 10")


def test_a_waiting_stage_has_the_orchestrators_reason(workspace: Workspace, run: RunRecord) -> None:
    event = {"event": "stage", "stage": "sft", "state": "paused", "message": "waits for room"}
    event["at"] = "2026-11-21T03:12:00+00:00"
    workspace.layout.run(run.run).events.write_text(f"{json.dumps(event)}\n")
    assert stage(look(workspace, run), "sft").state == "waiting"  # nobody works: it does not
    take_up(workspace, run.run)
    row = stage(look(workspace, run), "sft")
    assert (row.state, row.reason) == ("paused", "waits for room")


def test_the_rate_is_of_this_attempt() -> None:
    beat = {"progress": {"done": 60, "total": 100}, "moved_at_s": 50.0, "seconds": 80.0}
    assert eta_s(beat, resumed_from=50) == 40 * 5.0
    assert eta_s(beat, resumed_from=None) == pytest.approx(40 * 50 / 60, abs=0.1)
    assert eta_s(beat, resumed_from=60) is None  # not one step yet
    assert eta_s({}, None) is None


class Silent:
    """A scheduler that does not answer for a long time."""

    executor = "slurm"

    def observe(self, attempts: Sequence[OpenAttempt]) -> dict[AttemptRef, JobStatus]:
        time.sleep(30)
        return {}


def test_a_silent_scheduler_delays_no_status() -> None:
    attempt = Attempt(1, "c", "slurm", OWNER, "2026-11-21T01:00:00+00:00", job_id="9")
    ref = AttemptRef("grpo-1", 1)
    slow = Router({"slurm": Silent()}, lambda _: "slurm")
    router = BackgroundRouter(slow, 0.1)
    assert router.observe([OpenAttempt(ref, attempt)])[ref].liveness == "unknown"
    assert "0.1 s" in router.late


def test_a_run_is_found_by_a_part_of_its_id(workspace: Workspace, run: RunRecord) -> None:
    assert find_run(workspace, run.run[-4:]) == find_run(workspace) == run
    with pytest.raises(ConfigurationError, match=f"Did you mean '{run.run}'"):
        find_run(workspace, run.run[:-1] + "x")
    workspace.write_run(replace(run, run=run.run[:-4] + "zzzz"))
    with pytest.raises(ConfigurationError, match="may mean 2 runs"):
        find_run(workspace, run.run[:8])


def test_a_run_has_one_orchestrator(workspace: Workspace, run: RunRecord) -> None:
    take_up(workspace, run.run)
    assert orchestrator_of(workspace, run.run).standing == "running"
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        take_up(workspace, run.run)
    assert workspace.newest_turn(run.run)[0] == 1


def test_a_dead_process_is_followed_by_the_next(workspace: Workspace, run: RunRecord) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    workspace.take_turn(run.run, 0, {"process": str(ProcessId.of(process.pid))})
    assert orchestrator_of(workspace, run.run).standing == "running"
    process.communicate(b"\n")
    assert orchestrator_of(workspace, run.run).standing == "gone"
    take_up(workspace, run.run)
    assert workspace.newest_turn(run.run)[0] == 2


def test_another_hosts_process(workspace: Workspace, run: RunRecord, monkeypatch) -> None:
    workspace.take_turn(run.run, 0, {"process": OWNER, "job": "17"})
    workspace.write_orchestrator(run.run, {"process": OWNER, "state": "running"})
    assert orchestrator_of(workspace, run.run).standing == "elsewhere"
    with pytest.raises(ConfigurationError, match="--take-over"):
        take_up(workspace, run.run)
    monkeypatch.setenv("SLURM_JOB_ID", "17")  # the same job, which Slurm has started again
    take_up(workspace, run.run)
    assert workspace.newest_turn(run.run)[1]["job"] == "17"


def test_status_is_read_only(workspace: Workspace, run: RunRecord, capsys) -> None:
    before = sorted(p for p in workspace.root.rglob("*"))
    assert main(["status", f"workspace={workspace.root}"]) == 0
    shown = capsys.readouterr().out
    assert f"refiner resume {run.run} workspace={workspace.root}" in shown
    assert main(["status", run.run, f"workspace={workspace.root}", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert {"run", "stages", "orchestrator", "incidents", "disk", "scheduler"} <= set(value)
    assert sorted(p for p in workspace.root.rglob("*")) == before


def test_logs_of_a_worker_that_never_began(workspace: Workspace, run: RunRecord, capsys) -> None:
    planned = claim(workspace, small_plan(), "sft")
    folder = workspace.layout.attempt(planned.id, 1).submitit
    folder.mkdir()
    (folder / "17_0_log.err").write_text("slurmstepd: no such interpreter\n")
    assert main(["logs", "sft", f"workspace={workspace.root}"]) == 0
    assert "no such interpreter" in capsys.readouterr().out
    assert main(["logs", "sft", "--attempt", "7", f"workspace={workspace.root}"]) == 2
    assert main(["logs", f"workspace={workspace.root}", "sft"]) == 0, "as other commands take it"
    assert main(["logs", f"workspace={workspace.root}"]) == 2
    assert "one of: 1" in capsys.readouterr().err


def test_logs_follow_the_next_attempt(workspace: Workspace, run: RunRecord, capsys) -> None:
    plan = small_plan()
    for number, failure in ((1, "preempted"), (2, "cancelled")):
        planned = claim(workspace, plan, "sft", after=number - 1)
        workspace.layout.attempt(planned.id, number).log.write_text(f"log {number} ü\n")
        decision: Any = "resume" if number == 1 else "stop"
        outcome = AttemptOutcome(failure, decision)
        workspace.close_attempt(planned.id, number, outcome)
    assert main(["logs", "-f", "sft", "--attempt", "1", f"workspace={workspace.root}"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "log 1 ü\nlog 2 ü\n"
    assert "attempt 1 ended: preempted" in shown.err


# ---------------------------------------------------------------- the newest run


NEWEST = Checkpoint("latest", CheckpointSource("newest", "recipe tiny"))
TRAINS = "stages=[data,sft,grpo]"


def trained(root: Path, seed: int, *words: str) -> RecordedRun:
    run = RecordedRun(root, f"seed={seed}", *(words or (TRAINS,)))
    if run.workspace.read_result(run.stage("data").id) is None:
        run.data()
    run.train("sft")
    run.train("grpo")
    return run


def newest(workspace: Workspace) -> str:
    return find_run(workspace).run


@pytest.mark.slow
def test_a_call_that_finds_everything_done_is_not_the_newest(tmp_path: Path) -> None:
    """Older weights were taken in the night for it, and it has nothing to show."""
    first = trained(tmp_path / "runs", 1, "stages=[data,sft,grpo,publish]")
    first.carry_out("publish")
    second = trained(tmp_path / "runs", 2)
    again = RecordedRun(tmp_path / "runs", "seed=1", TRAINS)
    assert show_card([], again.workspace.root).run == first.run.run, "the newest with a card"
    workspace = again.workspace
    assert newest(workspace) == second.run.run
    assert find_run(workspace, "tiny").run == second.run.run
    assert resolve(NEWEST, workspace).what == f"{second.stage('grpo').id} of {second.run.run}"
    assert _run_with_model(workspace, None).run == second.run.run
    assert [run.run for run in newest_runs(workspace)] == [second.run.run, first.run.run]
    assert find_run(workspace, again.run.run).run == again.run.run, "it can be named"
    assert find_run(Workspace.open(tmp_path / "none")) is None
    with pytest.raises(Exception, match="has trained anything"):
        _run_with_model(Workspace.open(tmp_path / "none"), None)


@pytest.mark.slow
def test_a_call_that_only_waits_is_not_the_newest(tmp_path: Path) -> None:
    """After kill -9 the same command takes up what still runs, and has a record of its own."""
    first = RecordedRun(tmp_path / "runs", TRAINS)
    first.data()
    number = first.begin("sft")
    repeat = RecordedRun(tmp_path / "runs", TRAINS)
    assert newest(repeat.workspace) == repeat.run.run, "as long as it is not over"
    first.workspace.close_attempt(first.stage("sft").id, number, outcome_of("killed"))
    repeat.train("sft")  # another attempt: now it has made something
    repeat.train("grpo")
    assert newest(repeat.workspace) == repeat.run.run
    third = RecordedRun(tmp_path / "runs", TRAINS)
    assert newest(third.workspace) == repeat.run.run


def test_a_night_is_not_the_newest(tmp_path: Path) -> None:
    run = trained(tmp_path / "runs", 1)
    weights = run.workspace.output_dir(run.stage("grpo").id)
    night = RecordedRun(
        tmp_path / "runs",
        f"model.name_or_path={weights}/model",
        "stages=[data,evaluate]",
        "evaluate.models=[base]",
        provenance={"nightly": {"name": "lab", "night": "2026-11-20", "checkpoint": "latest"}},
    )
    if night.workspace.read_result(night.stage("data").id) is None:
        night.data()
    night.evaluate("evaluate-base")
    assert newest(night.workspace) == run.run.run
    assert resolve(NEWEST, night.workspace).what.startswith(run.stage("grpo").id)


def test_a_training_that_goes_on_has_not_made_what_it_starts_from(tmp_path: Path) -> None:
    done = trained(tmp_path / "runs", 1)
    running = RecordedRun(tmp_path / "runs", "seed=1", TRAINS, "grpo.beta=0.5")
    running.begin("grpo")
    assert newest(running.workspace) == running.run.run
    what = resolve(NEWEST, running.workspace).what
    assert what == f"{done.stage('grpo').id} of {done.run.run}"
