"""`refiner adopt`: a dead run of anybody's is published and evaluated, one of ours goes on."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import (
    ROOT,
    SMALL,
    Stage,
    kill_orchestrator,
    refiner,
    start,
    wait_until,
)

TRAINER = ROOT / "tests" / "support" / "foreign_trainer.py"
TINY = ROOT / "refiner_core" / "models" / "tiny"
EVALUATED = (
    "publish.malformed=true",  # a model that was hardly trained says nothing yet
    "data.rl_path=builtin:synthetic",
    "data.synthetic_rl_rows=40",
    "data.max_prompt_token_length=256",
    "grpo.response_length=32",
    "evaluate.max_prompts=4",
    "evaluate.num_samples=2",
    "evaluate.bootstrap_samples=200",
    "tracking.wandb=disabled",
)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def dead_run(tmp_path: Path) -> Path:
    """Somebody's run with a last checkpoint that was cut off in the middle of its save."""
    out = tmp_path / "somebody's run"
    like = TINY / "model.safetensors"
    words = ("--out", out, "--steps", "12", "--step_s", "0", "--like", like)
    subprocess.run([sys.executable, TRAINER, *words], check=True, capture_output=True)
    weights = out / "ckpt_12" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    (out / "ckpt_12" / "trainer.json").unlink()
    return out


def test_a_dry_run_shows_every_checkpoint_and_changes_nothing(
    dead_run: Path, tmp_path: Path
) -> None:
    workspace = tmp_path / "ws"
    done = refiner("adopt", str(dead_run), f"workspace={workspace}", "--dry-run", "--json")
    assert done.code == 0, done.stderr
    assert [(c["step"], c["complete"]) for c in done.json["checkpoints"]] == [
        *((4, True), (8, True), (12, False))
    ]
    assert "truncated" in done.json["checkpoints"][-1]["note"]
    assert done.json["step"] == 8
    assert "lacks config.json" in done.json["notes"][0]
    assert "--companions" in done.json["next"]
    assert not workspace.exists()
    shown = refiner("adopt", str(dead_run), f"workspace={workspace}", "--dry-run").stdout
    assert "damaged: model.safetensors: truncated" in shown


def test_a_dead_run_of_anybodys_is_adopted_published_and_evaluated(
    dead_run: Path, tmp_path: Path
) -> None:
    workspace = tmp_path / "ws"
    given = (f"workspace={workspace}", *EVALUATED, "--companions", str(TINY), "--json")
    done = refiner("adopt", str(dead_run), *given)
    assert done.code == 0, done.stderr
    report = done.json
    weights = Path(report["adopted"]["model"]) / "model.safetensors"
    source = dead_run / "ckpt_8" / "model.safetensors"
    assert weights.samefile(source)  # a link: nothing was copied
    shutil.rmtree(dead_run)  # and nothing is lost with the source
    run = refiner(*report["next"][1:], "--no-server", "--json")
    assert run.code == 0, run.stderr
    states = {s["name"]: s["state"] for s in run.json["stages"]}
    assert states["command"] == "skipped"
    assert states["publish"] == states["evaluate-command"] == "done"
    assert {e["stage"] for e in run.json["evaluations"]} == {"command", "random_copier"}
    target = Path(next(s["target"] for s in run.json["stages"] if s["name"] == "publish"))
    assert sha256(target / "model.safetensors") == sha256(weights)
    card = (target / "README.md").read_text()
    assert "adopted from the folder of a run that had ended" in card
    assert "step 8" in card
    assert str(tmp_path) not in card


def test_adopting_twice_changes_nothing_and_copies_stand_alone(
    dead_run: Path, tmp_path: Path
) -> None:
    words = ("adopt", str(dead_run), f"workspace={tmp_path / 'ws'}", "--copy", "--json")
    one, two = (refiner(*words, "--step", "4").json for _ in range(2))
    assert (one["adopted"]["new"], two["adopted"]["new"]) == (True, False)
    assert one["adopted"]["id"] == two["adopted"]["id"]
    assert one["step"] == 4
    weights = Path(one["adopted"]["model"]) / "model.safetensors"
    assert not weights.samefile(dead_run / "ckpt_4" / "model.safetensors")
    in_place = refiner(*words[:2], f"workspace={tmp_path / 'other'}", "--in-place", "--json").json
    linked = Path(in_place["adopted"]["model"]) / "model.safetensors"
    assert linked.resolve() == (dead_run / "ckpt_8" / "model.safetensors").resolve()


# ---------------------------------------------------------------- refiner's own


def test_a_dead_workspace_goes_on_where_it_was_moved_and_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    words = ("run", "tiny", *SMALL, "stages=[data,sft]", "sft.max_train_steps=60", "--no-server")
    control, old, new = (tmp_path / name for name in ("control", "old", "new"))
    assert refiner(*words, f"workspace={control}").code == 0
    process = start(*words, f"workspace={old}")
    stage = Stage(old, "sft")
    wait_until(lambda: len(stage.steps()) >= 3, "three steps of SFT")
    kill_orchestrator(process)
    stage.kill()
    old.rename(new)
    run = refiner("resume", f"workspace={new}", "--no-server", "--json")
    assert run.code == 0, run.stderr
    here, there = Stage(new, "sft"), Stage(control, "sft")
    assert here.hashes() == there.hashes()
    assert here.trace() == there.trace()
    assert json.loads((here.attempts[-1] / "started.json").read_text())["resumed"]["step"] >= 1


def test_a_stage_folder_that_was_copied_out_goes_on_in_any_workspace(tmp_path: Path) -> None:
    words = ("run", "tiny", *SMALL, "stages=[data,sft]", "--no-server")
    control = tmp_path / "control"
    assert refiner(*words, f"workspace={control}").code == 0
    folder = Stage(control, "sft").folder
    assert folder is not None
    copied = tmp_path / "new" / "stages" / folder.name
    assert refiner("run", "tiny", *SMALL, "stages=[data]", "--no-server",
                   f"workspace={tmp_path / 'new'}").code == 0  # fmt: skip
    shutil.copytree(folder, copied)
    (copied / "result.json").unlink()
    newest = sorted(copied.glob("checkpoints/step-*"))[-1]
    next(p for p in newest.iterdir() if p.stat().st_size > 1000).write_bytes(b"cut")
    assert refiner(*words, f"workspace={tmp_path / 'new'}").code == 0
    assert Stage(tmp_path / "new", "sft").hashes() == Stage(control, "sft").hashes()
