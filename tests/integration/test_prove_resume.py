"""`refiner prove-resume` from outside: what it calls bitwise, and what it does not let pass."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from infra.store.provenance import read_proof
from infra.store.workspace import Workspace
from tests.support.command import ROOT, SMALL, Finished, called, refiner, start, wait_until

#: A kill in the middle, after some saves.
ONCE = ("--interruptions", "1", "--seed", "1")
BROKEN = ROOT / "tests" / "support" / "broken_resume"


def prove(workspace: Path, small: tuple[str, ...], *words: str) -> Finished:
    return refiner("prove-resume", "tiny", f"workspace={workspace}", *small, *words, "--json")


def proofs(done: Finished) -> dict[str, Any]:
    return {p["stage"]: p for p in done.json["proofs"]}


def test_killed_grpo_is_bitwise(small: tuple[str, ...], tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    words = ("stages=[data,grpo,evaluate,publish]", "--steps", "6")
    done = prove(workspace, small, *words, *ONCE)
    assert done.code == 0, done.stderr
    proof = proofs(done)["grpo"]
    assert proof["verdict"] == "bitwise"
    assert {c["quantity"] for c in proof["comparisons"] if c["compared"]} == {
        *("loss trace", "rollouts", "weights", "data cursor", "optimiser", "random states")
    }
    assert [i["how"] for i in proof["interruptions"]] == ["kill"], "`make prove` stops it, too"
    assert proof["interruptions"][0]["resumed_from_step"] >= 1
    assert "kill -9 in step" in done.stderr
    assert "Next: `refiner run tiny" in done.stderr
    # It is found by the fingerprint of the whole recipe, and nothing else is left behind.
    plan = called("plan", "tiny", f"workspace={workspace}", *small, words[0], "--json").json
    (stage,) = [s for s in plan["stages"] if s["stage"] == "grpo"]
    assert (stage["action"], stage["fingerprint"]) == ("run", proof["fingerprint"])
    recorded = read_proof(Workspace.read_only(workspace), stage["id"])
    assert recorded.verdict == "bitwise"
    assert list((workspace / "proofs" / "scratch").iterdir()) == []


def test_resume_without_optimiser_diverges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join(filter(None, [str(BROKEN), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", path)
    workspace = tmp_path / "runs"
    words = ("stages=[data,sft]", "sft.eval_freq=1", "--steps", "8")
    done = prove(workspace, SMALL, *words, *ONCE)
    assert done.code == 1, done.stderr
    proof = proofs(done)["sft"]
    assert proof["verdict"] == "diverged"
    hit = proof["interruptions"][-1]
    by_name = {c["quantity"]: c for c in proof["comparisons"]}
    assert by_name["loss trace"]["first_step"] > hit["resumed_from_step"]
    assert by_name["weights"]["differing"]
    assert by_name["random states"]["differing"] == 0, "that part was put back"
    (kept,) = (workspace / "proofs" / "scratch").iterdir()
    assert f"Both runs are kept in {kept}" in done.stderr


def test_ctrl_c_records_no_proof(tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    words = (f"workspace={workspace}", *SMALL, "stages=[data,sft]")
    process = start("prove-resume", "tiny", *words)
    started = "proofs/scratch/*/straight/stages/data-*/attempts/0001/started.json"
    wait_until(lambda: list(workspace.glob(started)), "the first worker")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 6, told
    assert "nothing was recorded" in told
    left = [json.loads(p.read_text()) for p in workspace.glob("proofs/*/proof.json")]
    assert left == []
    assert list((workspace / "proofs" / "scratch").iterdir()) == []
