"""Checkpoints are published during training and by hand; training never waits for it.

Real runs through the command, a real Hub client, a Hub on loopback over real git.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.records import from_json
from refiner_core.training.export import export_checkpoint
from tests.support.command import Finished, Stage, refiner, start, wait_until
from tests.support.git_hub import Fault, LoopbackHub
from tests.support.stage_io import FolderStageIO

STEPS = (
    *("stages=[data,grpo,publish,evaluate]", "evaluate.models=[grpo]"),
    *("grpo.num_training_steps=12", "grpo.save_freq=6", "grpo.keep=1", "dispatch.poll_s=0.1"),
    *("evaluate.decoding=[greedy]", "evaluate.max_prompts=2"),
)
CLAIM = ("claim", "export-step6")
HUB = ("publish.target=hub", "publish.repo_id=me/refiner", "publish.private=false")


def events_of(workspace: Path) -> list[dict[str, Any]]:
    """The event log of the only run."""
    (path,) = workspace.glob("runs/*/events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- during training


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, with_data: Callable[[Path], Path]) -> Path:
    return with_data(tmp_path_factory.mktemp("steps") / "runs")


@pytest.fixture(scope="module")
def published(workspace: Path, small: tuple[str, ...]) -> Finished:
    """A run that publishes every save to a folder. It keeps one checkpoint: the trainer would have
    deleted the others long before it ends."""
    done = refiner(
        *("run", "tiny", f"workspace={workspace}", *small, *STEPS),
        *("publish.which=every-save", "--no-server", "--json"),
    )
    assert done.code == 0, done.stderr
    return done


def target(done: Finished, name: str) -> Path:
    return Path(next(s["target"] for s in done.json["stages"] if s["name"] == name))


def test_every_save_is_published_with_its_card(published: Finished, workspace: Path) -> None:
    events = events_of(workspace)
    claimed = next(i for i, e in enumerate(events) if (e["event"], e.get("stage")) == CLAIM)
    trained = [(e.get("stage"), e.get("state")) for e in events].index(("grpo", "done"))
    assert claimed < trained, "the first one before training ends"
    folders = [target(published, n) for n in ("publish-step6", "publish")]
    weights = {(f / "model.safetensors").read_bytes() for f in folders}
    assert len(weights) == 2, "each step has weights of its own"
    assert list(workspace.glob("stages/*/holds/*")) == [], "nothing is held any more"
    card, last = [(folder / "README.md").read_text() for folder in folders]
    assert "step 6" in card
    assert "No evaluation of this checkpoint is recorded" not in card
    assert "step 6" in last, "its card has the progress of training"


def test_an_export_equals_training(published: Finished, workspace: Path, tmp_path: Path) -> None:
    grpo = Stage(workspace, "grpo")
    config = from_json(
        RecipeConfig, json.loads((grpo.attempts[-1] / "intent.json").read_text())["config"]
    )
    (checkpoint,) = grpo.folder.glob("checkpoints/step-*12")
    # The job that exports has no GPU, whatever the trainer computes attention with.
    elsewhere = replace(config.model, attn_implementation="flash_attention_2")
    report = export_checkpoint(
        replace(config, model=elsewhere),
        checkpoint=checkpoint,
        model_ref=config.model.name_or_path,
        output_dir=tmp_path,
        io=FolderStageIO(tmp_path / "io"),
    )
    final = grpo.attempts[-1] / "output" / "model"
    names = {p.name for p in final.iterdir()}
    assert names == {p.name for p in (tmp_path / "model").iterdir()}
    for name in names:
        assert (tmp_path / "model" / name).read_bytes() == (final / name).read_bytes(), name
    told = grpo.result()["report"]
    assert {k: told[k] for k in ("steps", "episodes", "counts", "curves")} == {
        k: report[k] for k in ("steps", "episodes", "counts", "curves")
    }


def test_by_hand_what_is_published_is_not_published_again(
    published: Finished, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = refiner(
        "publish", f"workspace={workspace}", "--step", "6", "--step", "12", "--json", "--no-server"
    )
    assert again.code == 0, again.stderr
    assert {s["state"] for s in again.json["stages"]} == {"skipped"}
    back = refiner("resume", again.json["run"], f"workspace={workspace}", "--no-server")
    assert back.code == 0, back.stderr
    assert "have changed" not in back.stderr, "it is the publication that was asked for"
    for wrong, named in (
        (["--step", "8"], "6, 12"),
        (["grpo.beta=0.5"], "the training is recorded"),
        (["publish.which=best", "--dry-run"], "--step N"),
    ):
        assert main(["publish", f"workspace={workspace}", *wrong]) == 2
        assert named in capsys.readouterr().err


# ---------------------------------------------------------------- when something is in the way


def test_a_dead_run_is_published(
    hub: LoopbackHub, small: tuple[str, ...], tmp_path: Path, with_data: Callable[[Path], Path]
) -> None:
    workspace = with_data(tmp_path / "runs")
    arguments = ("run", "tiny", f"workspace={workspace}", *small, *STEPS, "stages=[data,grpo]")
    run = start(*arguments, "--no-server")
    grpo = Stage(workspace, "grpo")
    wait_until(lambda: list(workspace.glob("stages/grpo-*/checkpoints/step-*6")), "a checkpoint")
    run.send_signal(signal.SIGKILL)
    worker = wait_until(lambda: grpo.worker, "the worker")
    worker.kill_group()
    run.communicate(timeout=400)
    done = refiner("publish", f"workspace={workspace}", "--step", "6", *HUB, "--no-server")
    steps = [p.name for p in workspace.glob("stages/grpo-*/checkpoints/step-*")]
    assert done.code == 0, (done.stderr, steps)
    assert "tags/step-6" in hub.refs("me/refiner")
    assert "model.safetensors" in hub.contents("me/refiner", "step-6")


def test_a_hub_that_refuses_stops_no_training_and_the_same_command_publishes_later(
    hub: LoopbackHub, small: tuple[str, ...], tmp_path: Path, with_data: Callable[[Path], Path]
) -> None:
    """The token expires while the run trains."""
    workspace = with_data(tmp_path / "runs")
    arguments = (
        *("run", "tiny", f"workspace={workspace}", *small, *STEPS, *HUB),
        *("stages=[data,grpo,publish]", "publish.which=every-save", "publish.patience_s=2"),
        *("dispatch.backoff_s=0.2", "--no-server"),
    )
    refused = Fault("answer", where=lambda r: r.writes, times=1e9, status=401, says="expired")
    hub.faults = [refused]
    first = refiner(*arguments, "--json")
    assert first.code == 9, first.stderr
    states = {s["name"]: s["state"] for s in first.json["stages"]}
    assert states["grpo"] == "done"
    assert states["export-step6"] == "done"
    assert states["publish-step6"] == "interrupted"
    hub.faults = []
    second = refiner(*arguments, "--json")
    assert second.code == 0, second.stderr
    states = {s["name"]: s["state"] for s in second.json["stages"]}
    assert states["grpo"] == "skipped"
    assert {states["publish-step6"], states["publish"]} == {"done"}
    refs = hub.refs("me/refiner")
    assert "tags/step-6" in refs
    main = hub.contents("me/refiner")
    final = Stage(workspace, "grpo").attempts[-1] / "output" / "model" / "model.safetensors"
    assert main["model.safetensors"] == final.read_bytes(), "main ends at the last step"
