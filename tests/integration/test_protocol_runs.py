"""Runs under a protocol file with its own set and judge: a killed worker, a renamed file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from infra.store.workspace import Workspace
from refiner_core.evaluation.results import load_results
from tests.support import served_judge
from tests.support.command import SMALL, Stage, refiner, start, wait_until

PROTOCOL = """\
name: {name}
evaluate: {{decoding: [greedy], max_prompts: 6, batch_size: 1, bootstrap_samples: 100}}
reward: {{rubric_source: static, static_rubrics: reader-v1}}
judge:
  kind: openai
  model: m
  structured_output: none
  serve: {{engine: command, idle_timeout_s: 2.0}}
  serve_command: >-
    {python} {served} --host {{host}} --port {{port}} --model {{model}} --log {log}
data: {{rl_path: "builtin:synthetic", synthetic_rl_rows: 12, synthetic_seed: 77}}
"""


def call(folder: Path, name: str) -> list[str]:
    """The command of the protocol's evaluation and its inputs."""
    log = folder / "judged.log"
    (folder / f"{name}.yaml").write_text(
        PROTOCOL.format(name=name, python=sys.executable, served=served_judge.__file__, log=log)
    )
    stages = f"only=[data@{name},evaluate-base@{name}]"  # and the judge's server, by itself
    words = ["stages=[data,evaluate]", "evaluate.models=[base]", stages]
    return [
        *("run", "tiny", f"workspace={folder}/ws", *SMALL, *words),
        *(f"evaluate.protocols=[{name}.yaml]", "--no-server", "--json"),
    ]


def test_a_killed_evaluation_continues_to_the_numbers_of_an_undisturbed_one(tmp_path: Path) -> None:
    words = call(tmp_path, "mine")
    running = start(*words, cwd=tmp_path)
    stage = Stage(tmp_path / "ws", "evaluate")

    def steps() -> list[Path]:
        return sorted(stage.folder.glob("checkpoints/step-*")) if stage.folder else []

    wait_until(steps, "the first saved batch")
    (tmp_path / "mine.yaml").unlink()  # its content is recorded
    stage.kill()
    out, _ = running.communicate(timeout=400)
    assert running.returncode == 0
    numbers = json.loads(out)["evaluations"]
    assert {(n["stage"], n["under"], n["n"]) for n in numbers} == {
        ("base", "mine", 6),
        ("random_copier", "mine", 6),
    }
    assert numbers[0]["protocol_name"].startswith("mine/greedy/")
    assert len(stage.attempts) == 2
    assert stage.folder is not None
    record = Workspace.read_only(tmp_path / "ws").read_record(stage.folder.name)
    assert record is not None
    assert (record.attempts[1].resumed_from_step or 0) > 0
    killed, results = stage.hashes(), load_results(next(stage.folder.glob("attempts/*/output")))

    shutil.rmtree(stage.folder)
    again = refiner(*call(tmp_path, "renamed"), cwd=tmp_path)
    assert again.code == 0, again.stderr
    states = {s["name"]: s["state"] for s in again.json["stages"]}
    assert states.pop("judge@renamed") in ("done", "skipped")
    assert states == {"data@renamed": "skipped", "evaluate-base@renamed": "done"}
    whole = stage.hashes()
    samples = {name for name in whole if name.endswith(".parquet")}
    assert len(samples) == 2
    assert {n: whole[n] for n in samples} == {n: killed[n] for n in samples}
    assert stage.folder is not None
    named = load_results(next(stage.folder.glob("attempts/*/output")))
    assert named["protocols"].keys() == results["protocols"].keys(), "names do not count"
    assert named["reference_fresh"] is True
    assert named["judge_usage"]["stored"] == 0, "the model says nothing to be judged"
    assert named["judge_usage"]["calls"] > 0, "but the reference is judged anew"
    assert {e["under"] for e in named["evaluations"]} == {"renamed"}


def test_protocols_are_listed_shown_and_checked_by_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def protocols(*words: str) -> Any:
        assert main(["protocols", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    call(tmp_path, "mine")
    call(tmp_path, "other")
    monkeypatch.chdir(tmp_path)
    listed = protocols("list")["protocols"]
    shown = protocols("show", "held-out-reader-v1")
    assert shown["fingerprint"] in {p["fingerprint"] for p in listed}
    checked = [protocols("check", f"{name}.yaml") for name in ("mine", "other")]
    assert len({c["fingerprint"] for c in checked}) == 1
    (tmp_path / "mine.yaml").write_text("name: mine\ngrpo: {beta: 1}\n")
    assert main(["protocols", "check", "mine.yaml"]) == 2
    assert "grpo.beta" in capsys.readouterr().err
