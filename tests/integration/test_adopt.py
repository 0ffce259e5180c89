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
from tests.support.command import LONGER, ROOT, Finished, Stage, refiner

TRAINER = ROOT / "tests" / "support" / "external_trainer.py"
TINY = ROOT / "refiner_core" / "models" / "tiny"
EVALUATED = (
    "publish.malformed=true",  # a model that was hardly trained says nothing yet
    "data.rl_path=builtin:synthetic",
    "data.synthetic_rl_rows=40",
    "data.max_prompt_token_length=256",
    "grpo.response_length=32",
    "evaluate.max_prompts=2",
    "evaluate.decoding=[greedy]",
    "evaluate.bootstrap_samples=100",
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


def test_a_copied_stage_with_a_cut_off_save_continues_to_the_same_weights(
    small_run: tuple[Path, Finished], small: tuple[str, ...], tmp_path: Path
) -> None:
    """A moved workspace does, too: test_interrupts."""
    source, copied = small_run[0], tmp_path / "runs"
    for kind in ("data", "sft"):
        folder = Stage(source, kind).folder
        shutil.copytree(folder, copied / "stages" / folder.name)
    stage = Stage(copied, "sft")
    (stage.folder / "result.json").unlink()
    newest = sorted(stage.folder.glob("checkpoints/step-*"))[-1]
    next(p for p in newest.iterdir() if p.stat().st_size > 1000).write_bytes(b"cut")
    words = ("run", "tiny", *small, *LONGER, "stages=[data,sft]", "--no-server")
    done = refiner(*words, f"workspace={copied}")
    assert done.code == 0, done.stderr
    assert json.loads((stage.attempts[-1] / "started.json").read_text())["resumed"]["step"] == 4
    assert stage.hashes() == Stage(source, "sft").hashes()
