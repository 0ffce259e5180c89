"""The newest run, where no run is named: the last call that has made something of its own."""

from pathlib import Path

import pytest

from flows.cards.inspection import show_card
from flows.nightly.checkpoints import resolve
from flows.publishing.by_hand import _run_with_model
from flows.running.status import find_run, newest_runs
from infra.jobs.failures import outcome_of
from infra.store.workspace import Workspace
from refiner_core.nightly.definition import Checkpoint, CheckpointSource
from tests.support.recorded_run import RecordedRun

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
