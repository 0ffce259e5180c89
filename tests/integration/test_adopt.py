"""`refiner adopt`: a dead run of any trainer is published and evaluated; one of ours continues."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tests.support.command import ROOT, SMALL, Stage, kill_orchestrator, refiner, start, wait_until

TRAINER = ROOT / "tests" / "support" / "external_trainer.py"
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


def test_adopting_twice(dead_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def adopt(*words: str) -> Any:
        assert main(["adopt", str(dead_run), *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    here, there = f"workspace={tmp_path / 'ws'}", f"workspace={tmp_path / 'other'}"
    dry = adopt(here, "--dry-run")
    assert [(c["step"], c["complete"]) for c in dry["checkpoints"]] == [
        *((4, True), (8, True), (12, False))
    ]
    assert "truncated" in dry["checkpoints"][-1]["note"]
    assert dry["step"] == 8
    assert "lacks config.json" in dry["notes"][0]
    assert "--companions" in dry["next"]
    assert not (tmp_path / "ws").exists()
    one, two = (adopt(here, "--copy", "--step", "4") for _ in range(2))
    assert (one["adopted"]["new"], two["adopted"]["new"]) == (True, False)
    assert one["adopted"]["id"] == two["adopted"]["id"]
    assert one["step"] == 4
    weights = Path(one["adopted"]["model"]) / "model.safetensors"
    assert not weights.samefile(dead_run / "ckpt_4" / "model.safetensors")
    linked = Path(adopt(there, "--in-place")["adopted"]["model"]) / "model.safetensors"
    assert linked.resolve() == (dead_run / "ckpt_8" / "model.safetensors").resolve()


def test_a_dead_run_is_adopted_and_published(dead_run: Path, tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- refiner's own


def test_a_moved_workspace_and_a_copied_stage_continue_to_the_same_weights(tmp_path: Path) -> None:
    words = ("run", "tiny", *SMALL, "stages=[data,sft]", "sft.max_train_steps=24", "--no-server")
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

    copied = tmp_path / "third" / "stages" / there.folder.name
    shutil.copytree(there.folder, copied)
    shutil.copytree(
        Stage(control, "data").folder, copied.parent / Stage(control, "data").folder.name
    )
    (copied / "result.json").unlink()
    newest = sorted(copied.glob("checkpoints/step-*"))[-1]
    next(p for p in newest.iterdir() if p.stat().st_size > 1000).write_bytes(b"cut")
    third = refiner(*words, f"workspace={tmp_path / 'third'}")
    assert third.code == 0, third.stderr
    assert Stage(tmp_path / "third", "sft").hashes() == there.hashes()
