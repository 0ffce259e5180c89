"""A run in the background: detached, inspected, cancelled, killed and resumed from other shells."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import Stage, called, own_trainer, refiner, wait_until
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


def status(workspace: Path, *words: str) -> dict[str, Any]:
    done = called("status", *words, f"workspace={workspace}", "--json")
    assert done.code == 0, done.stderr
    value: dict[str, Any] = done.json
    return value


def standing(workspace: Path) -> str:
    return str(status(workspace)["orchestrator"]["standing"])


def test_a_detached_run_is_cancelled_killed_and_resumed_to_its_end(tmp_path: Path) -> None:
    where, stage = f"workspace={tmp_path / 'runs'}", Stage(tmp_path / "runs", "command")
    may_end = tmp_path / "may-end"
    left = refiner(
        *("run", "own-trainer", *own_trainer("--until", may_end), "stages=[command]"),
        *("workspace=runs", "--no-server", "--detach", "--json"),
        cwd=tmp_path,
    )
    assert left.code == 0, left.stderr
    run, pid = left.json["run"], left.json["pid"]
    assert os.getsid(pid) == pid, "a session of its own: a terminal that closes does not reach it"
    assert Path(f"/proc/{pid}/fd/0").resolve() == Path("/dev/null")
    busy = called("resume", run, where)
    assert busy.code == 2
    assert f"process {pid}" in busy.stderr

    # ended from another shell: the orchestrator does it, and says why
    wait_until(lambda: len(stage.steps()) >= 2, "the second step")
    ended = refiner("cancel", where, "--json")
    assert (ended.code, ended.json["by"], ended.json["ended"]) == (0, "orchestrator", True)
    wait_until(lambda: stage.worker and not stage.worker.alive, "the end of the worker")
    assert standing(tmp_path / "runs") == "ended"
    assert called("cancel", where, "--json").json["by"] == "nobody"

    # gone on with, and the orchestrator killed: its job lives on, until it is ended from here
    assert refiner("resume", where, "--no-server", "--detach").code == 0
    wait_until(lambda: len(stage.attempts) == 2 and stage.worker, "the second attempt")
    process = psutil.Process(status(tmp_path / "runs")["orchestrator"]["pid"])
    process.kill()
    wait_until(lambda: standing(tmp_path / "runs") == "gone", "the end of the orchestrator")
    assert stage.worker.alive
    ended = refiner("cancel", run, "command", where, "--json")
    assert (ended.code, ended.json["by"], ended.json["ended"]) == (0, "here", True)
    wait_until(lambda: stage.worker and not stage.worker.alive, "the end of the worker")

    may_end.touch()
    done = refiner("resume", run, where, "--no-server", "--json", cwd=Path("/"))
    assert done.code == 0, done.stderr
    assert done.json["run"] == run
    shown = status(tmp_path / "runs", run)
    assert shown["finished"]
    assert [i["failure"] for i in shown["incidents"]] == ["cancelled", "cancelled"]
    assert all(i["resolved"] for i in shown["incidents"])
    assert len(stage.attempts) == 3
    nothing = called("resume", where)
    assert nothing.code == 2


def test_a_resume_uses_the_recorded_recipe_and_refuses_other_rows(tmp_path: Path) -> None:
    where, rows = f"workspace={tmp_path / 'runs'}", tmp_path / "rows.jsonl"
    line = (
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}]}'
    )
    rows.write_text(f"{line}\n" * 40)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("include: [tiny]\nstages: [data]\ndata: {sft_path: rows.jsonl}\n")
    begun = refiner("run", "mine.yaml", where, "--no-server", "--json", cwd=tmp_path)
    run = begun.json.get("run") or status(tmp_path / "runs")["run"]
    recipe.write_text(f"{recipe.read_text()}seed: 7\n")
    again = refiner("resume", run, where, "--no-server", cwd=Path("/"))
    assert again.code == begun.code
    assert "mine.yaml" in again.stderr
    rows.write_text(f"{line}\n" * 41)
    for options in ((), ("--detach",)):
        refused = called("resume", run, where, "--no-server", *options)
        assert refused.code == 2, refused.stderr
        assert "data" in refused.stderr
    assert standing(tmp_path / "runs") in ("ended", "gone")


@pytest.mark.slurm
def test_a_run_as_a_job_is_restarted_by_slurm(slurm: Cluster, tmp_path: Path) -> None:
    workspace, may_end = tmp_path / "runs", tmp_path / "may-end"
    left = refiner(
        *("run", "own-trainer", *own_trainer("--until", may_end), "stages=[command]"),
        *(f"workspace={workspace}", "--no-server", "--detach=job", "--json"),
    )
    assert left.code == 0, left.stderr
    job, stage = left.json["job"], Stage(workspace, "command")
    wait_until(lambda: len(stage.steps()) >= 1, "the first step")
    who = status(workspace)["orchestrator"]
    assert who["job"] == job
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait_until(lambda: status(workspace)["orchestrator"]["turn"] == 2, "the second turn")
    may_end.touch()
    wait_until(lambda: status(workspace)["finished"], "the end of the run")
    assert status(workspace)["orchestrator"]["job"] == job
