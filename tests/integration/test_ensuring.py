"""Stages as tasks of one's own Prefect flow, against a real server: shown, shared, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from tests.support.command import SMALL, Stage, environment, own_trainer, refiner
from tests.support.prefect_server import PrefectApi, eventually
from tests.support.served import Served

pytestmark = pytest.mark.prefect
FLOW = """
import sys
from prefect import flow
from flows import begin_run, ensure

@flow
def own(workspace, overrides):
    run = begin_run("own-trainer", overrides, workspace)
    assert begin_run("own-trainer", overrides, workspace) == run, "a retry goes on with it"
    print(run.id, flush=True)
    ensure(run, "command")
    ensure(run, "publish")

if __name__ == "__main__":
    own(sys.argv[1], sys.argv[2:])
"""
SMALLER = (
    *(*SMALL, "sft.max_train_steps=2", "grpo.num_training_steps=2"),
    *("evaluate.decoding=[greedy]", "evaluate.max_prompts=2"),
)
LONG = own_trainer("--until", "/nowhere")


@contextmanager
def started(prefect: PrefectApi, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A flow of one's own, in a process of its own."""
    with subprocess.Popen(
        [sys.executable, *words],
        env={**environment(), **prefect.info.client_env()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def newest(prefect: PrefectApi, flow: str) -> dict[str, Any]:
    """The newest flow run of a flow."""
    body = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_DESC"}
    return dict(prefect.post("/flow_runs/filter", body)[0])


def states(prefect: PrefectApi, flow_run: dict[str, Any]) -> dict[str, str]:
    return {name: t["state_name"] for name, t in prefect.task_runs(flow_run["id"]).items()}


def saves(workspace: Path) -> bool:
    return bool(list(workspace.glob("stages/command-*/work/ckpt_*")))


def works(workspace: Path) -> bool:
    room = Workspace.read_only(workspace)
    return any(orchestrator_of(room, run.run).works for run in room.runs())


def example(prefect: PrefectApi, workspace: Path, bound: str) -> dict[str, Any]:
    """The flow run of the example, which ends well."""
    words = ("-m", "flows.examples.sft_then_grpo", str(workspace), bound, *SMALLER)
    with started(prefect, *words) as process:
        said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "'loss': " in said
    return newest(prefect, "sft-then-grpo")


def test_the_example_decides_on_grpo_after_sft(prefect: PrefectApi, tmp_path: Path) -> None:
    enough = example(prefect, tmp_path, "0")
    assert states(prefect, enough) == {"sft": "Completed"}
    assert not Stage(tmp_path, "grpo").folder
    shown = prefect.artifacts(enough["id"])
    assert any(key and "sft" in key for key in shown), shown.keys()

    further = example(prefect, tmp_path, "1000")
    assert further["state_name"] == "Completed"
    names = ("sft", "grpo", "evaluate-sft", "evaluate-grpo")
    assert states(prefect, further) == dict.fromkeys(names, "Completed")
    for name in ("data", "sft", "grpo"):
        assert len(Stage(tmp_path, name).attempts) == 1, name
    room = Workspace.read_only(tmp_path)
    parts = {tuple(r.stages) for r in room.runs() if r.provenance.get("part_of")}
    assert parts == {("data", "sft"), ("grpo",), ("evaluate-sft",), ("evaluate-grpo",)}
    assert len({run.code for run in room.runs()}) == 1
    assert not works(tmp_path)


def test_a_suspended_flow_ends_at_the_next_stage(prefect: PrefectApi, tmp_path: Path) -> None:
    """Prefect suspends only what is deployed, and can so be carried out again."""
    script, runs = tmp_path / "own.py", tmp_path / "runs"
    script.write_text(FLOW.replace("own(sys.argv[1], sys.argv[2:])", 'own.serve(name="served")'))
    named = {"deployments": {"name": {"any_": ["served"]}}}
    with started(prefect, str(script)) as process:
        eventually(lambda: prefect.post("/deployments/filter", named), 300)
        served = Served(prefect, tmp_path)
        overrides = [
            *own_trainer("--until", may_end := tmp_path / "may-end"),
            "publish.malformed=true",
        ]
        flow_run = served.launch("own", "served", workspace=str(runs), overrides=overrides)
        eventually(lambda: saves(runs), 300)
        served.suspend(flow_run)
        may_end.touch()
        eventually(lambda: Stage(runs, "command").attempts and not works(runs), 300)
        eventually(lambda: states(prefect, {"id": flow_run}) == {"command": "Completed"})
        assert not Stage(runs, "publish").folder
        assert served.state(flow_run)["name"] == "Suspended"
        prefect.post(f"/flow_runs/{flow_run}/resume")
        assert served.ends(flow_run)["type"] == "COMPLETED"
        process.send_signal(signal.SIGINT)
        process.wait(400)
    assert len(Stage(runs, "command").attempts) == 1
    room = Workspace.read_only(runs)
    whole = [r.run for r in room.runs() if not r.provenance.get("part_of")]
    assert len(whole) == 1, "the record of before"


def test_failed_cancelled_and_lost_stages_end_tasks(prefect: PrefectApi, tmp_path: Path) -> None:
    failing, cancelled, killed = (tmp_path / name for name in ("failing", "cancelled", "killed"))
    broken = (*own_trainer("--die_at 3"), "dispatch.retries.bug=0")
    with started(prefect, "-c", FLOW, str(failing), *broken) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "command: " in errors
    flow_run = newest(prefect, "own")
    assert states(prefect, flow_run) == {"command": "Failed"}
    assert flow_run["state_type"] == "FAILED"

    with started(prefect, "-c", FLOW, str(cancelled), *LONG) as process:
        eventually(lambda: saves(cancelled), 300)
        state = {"type": "CANCELLING", "name": "Cancelling"}
        flow_run = newest(prefect, "own")
        prefect.post(f"/flow_runs/{flow_run['id']}/set_state", {"state": state})
        process.communicate(timeout=300)
    assert not works(cancelled)
    assert not list(cancelled.glob("stages/command-*/result.json"))
    assert states(prefect, flow_run) == {"command": "Cancelled"}

    with started(prefect, "-c", FLOW, str(killed), *LONG) as process:
        eventually(lambda: saves(killed), 300)
        room = Workspace.read_only(killed)
        part = next(r for r in room.runs() if r.provenance.get("part_of"))
        os.kill(orchestrator_of(room, part.run).pid, signal.SIGKILL)
        process.communicate(timeout=300)
        refiner("cancel", part.run, f"workspace={killed}")  # its job has lived on
    assert process.returncode == 1
    assert states(prefect, newest(prefect, "own")) == {"command": "Crashed"}


def test_importing_the_package_imports_no_prefect() -> None:
    text = "import sys, flows; assert not {'prefect', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", text], env=environment(), check=True)
