"""Flow runs and nights from deployments, as the Prefect UI and schedules start them: a real server
and a real `refiner serve`, over the REST API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.prefect_server import ensure_server
from infra.store.orchestrators import OrchestratorProcess, orchestrator_of
from infra.store.workspace import Workspace
from tests.support.command import ROOT, Stage, called, environment, own_trainer, refiner
from tests.support.prefect_server import PrefectApi, eventually, private_server
from tests.support.served import FINAL, Served, served_in

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def served(prefect_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`refiner serve` with the tiny recipe, a night in two minutes, and one for an automation."""
    folder, soon = tmp_path_factory.mktemp("served"), datetime.now(UTC) + timedelta(minutes=2)
    nights = [write(folder, "soon", f"{soon:%M %H} * * *"), write(folder, "after", "0 3 1 1 *")]
    files = ("tiny", *map(str, nights))
    with served_in(folder, *files, PREFECT_RUNNER_POLL_FREQUENCY="1") as served:
        yield served


class Training:
    """A flow run with a training that waits, after its first save."""

    def __init__(self, served: Served, workspace: Path) -> None:
        self.served, self.workspace, self.may_end = served, workspace, workspace / "may-end"
        overrides = [*own_trainer("--until", self.may_end), "publish.malformed=true"]
        parameters = {"recipe": "own-trainer", "workspace": str(workspace), "overrides": overrides}
        self.flow_run = served.launch(**parameters)
        eventually(lambda: list(workspace.glob("stages/command-*/work/ckpt_*")))
        self.run = served.call(self.flow_run)
        self.room = Workspace.read_only(workspace)

    @property
    def orchestrator(self) -> OrchestratorProcess:
        return orchestrator_of(self.room, self.run)

    def flow_process(self) -> psutil.Process:
        """The process that Prefect's runner has started for the flow run."""
        for process in psutil.process_iter(["environ"]):
            env = process.info["environ"] or {}
            if env.get("PREFECT__FLOW_RUN_ID") == self.flow_run:
                return process
        raise AssertionError("no process of the flow run")

    def retry(self) -> None:
        self.served.set_state(self.flow_run, "SCHEDULED", "AwaitingRetry")


def test_a_cancelled_flow_run_saves_and_resumes_by_retry(served: Served, tmp_path: Path) -> None:
    training = Training(served, tmp_path)
    served.set_state(training.flow_run, "CANCELLING", "Cancelling")
    assert served.ends(training.flow_run)["type"] == "CANCELLED"
    eventually(lambda: not training.orchestrator.works)
    shown = served.prefect.artifacts(training.flow_run)[f"{training.run}-cancelled"]
    assert "all" in shown["data"].lower()
    training.may_end.touch()
    training.retry()
    eventually(lambda: served.state(training.flow_run)["type"] not in FINAL)
    assert served.ends(training.flow_run)["type"] == "COMPLETED"
    assert served.call(training.flow_run) == training.run
    attempt = Stage(tmp_path, "command").attempts[-1]
    assert json.loads((attempt / "started.json").read_text())["resumed"]["step"] >= 4


def test_a_killed_flow_process_or_orchestrator_is_crashed_until_a_retry(
    served: Served, tmp_path: Path
) -> None:
    training = Training(served, tmp_path)
    before = training.orchestrator
    training.flow_process().kill()
    assert served.ends(training.flow_run)["type"] == "CRASHED"
    assert training.orchestrator == before
    assert before.standing == "running", "the work goes on without it"
    training.retry()
    training.retry()  # a second click
    eventually(lambda: served.state(training.flow_run)["type"] == "RUNNING")
    again = refiner("resume", training.run, f"workspace={tmp_path}", "--no-server")
    assert again.code == 2
    assert training.orchestrator == before, "followed again, and not started again"

    os.kill(before.pid, signal.SIGKILL)
    end = served.ends(training.flow_run, 120)
    assert end["type"] == "CRASHED"
    assert "was killed" in end["message"]
    training.retry()
    eventually(lambda: training.orchestrator.standing == "running")
    done = refiner("cancel", training.run, f"workspace={tmp_path}")
    assert done.code == 0, done.stderr
    end = served.ends(training.flow_run, 120)
    assert end["type"] == "CANCELLED", "cancelled in a shell, and seen here"
    assert f"refiner resume {training.run}" in end["message"]


def test_a_suspended_flow_run_begins_no_stage_until_resumed(served: Served, tmp_path: Path) -> None:
    training = Training(served, tmp_path)
    flow_run = training.flow_run
    served.suspend(flow_run)
    (events,) = tmp_path.glob("runs/*/events.jsonl")
    eventually(lambda: '"event": "cancel"' in events.read_text())
    training.may_end.touch()
    eventually(lambda: not training.orchestrator.works)
    assert Stage(tmp_path, "command").result(), "what ran has ended by itself"
    assert not Stage(tmp_path, "publish").attempts
    eventually(lambda: served.state(flow_run)["name"] == "Suspended")
    served.prefect.post(f"/flow_runs/{flow_run}/resume")
    eventually(lambda: list(tmp_path.glob("stages/publish-*/result.json")))
    eventually(lambda: not training.orchestrator.works)
    assert served.ends(flow_run)["type"] == "COMPLETED"
    assert len(Stage(tmp_path, "command").attempts) == 1


def test_wrong_parameters_fail_before_any_job_with_the_fix(served: Served, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for parameters, said in (
        ({"recipe": "tinny"}, "Did you mean 'tiny'"),
        ({"recipe": "tiny", "overrides": ["grpo.betta=1"]}, "grpo.beta"),
    ):
        end = served.ends(served.launch(workspace=str(runs), **parameters), 120)
        assert end["type"] == "FAILED"
        assert said in end["message"]
    assert not (runs / "stages").exists()
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.launch(recipe="tiny", seed="three")
    assert refused.value.code in (409, 422)


def test_a_sweep_shows_every_stage_once_and_its_last_report(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    overrides = [*own_trainer(), "stages=[command]"]
    sweep = {"recipe": "own-trainer", "overrides": overrides, "seeds": [1]}
    file.write_text(json.dumps({**sweep, "factors": {"command.version": ["a", "b"]}}))
    flow_run = served.launch("sweep", sweep=str(file), workspace=str(tmp_path / "runs"))
    end = served.ends(flow_run)
    assert end["type"] == "COMPLETED", end["message"]
    names = [name.partition(" ")[0] for name in served.prefect.task_runs(flow_run)]
    assert len(names) == len(set(names)) == 2
    assert "finished" in served.prefect.artifacts(flow_run)["two-report"]["data"]


def test_a_worker_of_a_pool_runs_deployments(served: Served, tmp_path: Path) -> None:
    """On a server of its own: `refiner serve` carries out what is launched on the other."""
    with private_server(tmp_path / "state"):
        prefect = PrefectApi(ensure_server(400))
        prefect.post("/work_pools/", {"name": "here", "type": "process"})
        made = refiner("deploy", "tiny", "--pool", "here", "--json", cwd=tmp_path)
        assert made.code == 0, made.stderr
        names = [one["name"] for one in made.json["deployments"]]
        assert names == ["pipeline/refiner", "sweep/refiner"]
        small = ["stages=[data]", "data.synthetic_sft_rows=160"]
        flow_run = Served(prefect, tmp_path).launch(recipe="tiny", overrides=small)
        worker = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "here"]
        done = subprocess.run(
            [*worker, "--run-once", "--type", "process"],
            cwd=tmp_path,
            env={**environment(), **ensure_server(5).client_env(), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        end = Served(prefect, tmp_path).ends(flow_run, 120)
        assert end["type"] == "COMPLETED", f"{end['message']} {done.stderr[-3000:]}"
        assert list((tmp_path / "runs").glob("stages/data-*/result.json"))


# ---------------------------------------------------------------- nights

NIGHTLY = """
schedule: "{schedule}"
timezone: UTC
recipe: tiny
overrides:
  - workspace=runs
  - data.synthetic_rl_rows=12
  - evaluate.max_prompts=2
  - evaluate.decoding=[greedy]
  - evaluate.bootstrap_samples=50
  - evaluate.fresh_reference=false
  - grpo.response_length=4
  - tracking.wandb=disabled
  - dispatch.poll_s=0.1
checkpoints:
  - {{name: base, folder: "builtin:tiny"}}
canary: {{folder: "builtin:tiny", digest: {digest}}}
"""
DATA_ALONE = ["stages=[data]", "data.synthetic_sft_rows=160", "tracking.wandb=disabled"]


def write(folder: Path, name: str, schedule: str) -> Path:
    """A nightly file."""
    from flows.checking.sources import model_digest

    file = folder / f"{name}.yaml"
    file.write_text(NIGHTLY.format(schedule=schedule, digest=model_digest("builtin:tiny", "")))
    return file


def runs_of(served: Served, name: str, *states: str) -> list[dict[str, Any]]:
    """Flow runs of `nightly/NAME` in one of the states."""
    found = served.prefect.get(f"/deployments/name/nightly/{name}")
    of_it = {"deployments": {"id": {"any_": [found["id"]]}}}
    wanted = {"flow_runs": {"state": {"type": {"any_": list(states)}}}}
    return list(served.prefect.post("/flow_runs/filter", {**of_it, **wanted}))


def test_the_servers_schedule_begins_a_night(served: Served) -> None:
    over = ("COMPLETED", "FAILED", "CRASHED")
    (first, *_) = eventually(lambda: runs_of(served, "soon", *over))
    assert first["state"]["type"] == "COMPLETED", first["state"]
    assert first["auto_scheduled"], "the server's clock has begun it"
    status = called("nightly", "status", str(served.folder / "soon.yaml"), "--json").json
    assert "done" in status["nights"].values()


def test_an_automation_begins_a_night_after_a_run(served: Served) -> None:
    """As a user makes it in the UI."""
    target = served.prefect.get("/deployments/name/nightly/after")
    served.prefect.post(
        "/automations/",
        {
            "name": "evaluate-what-is-done",
            "trigger": {
                "type": "event",
                "posture": "Reactive",
                "expect": ["refiner.run.completed"],
                "match": {"prefect.resource.id": "refiner.run.*"},
                "threshold": 1,
                "within": 0,
            },
            "actions": [
                {"type": "run-deployment", "source": "selected", "deployment_id": target["id"]}
            ],
        },
    )
    run = served.launch(
        recipe="tiny", workspace=str(served.folder / "elsewhere"), overrides=DATA_ALONE
    )
    assert served.ends(run)["type"] == "COMPLETED"
    (begun,) = eventually(lambda: runs_of(served, "after", "RUNNING", "COMPLETED", "FAILED"))
    end = served.ends(begun["id"])
    assert end["type"] == "COMPLETED", end
    assert called("nightly", "status", str(served.folder / "after.yaml"), "--json").json["nights"]


def test_a_missing_pool_is_refused_with_those_that_exist(served: Served, tmp_path: Path) -> None:
    file = write(tmp_path, "poolless", "0 3 1 1 *")
    served.prefect.post("/work_pools/", {"name": "larks", "type": "process"})
    refused = refiner("deploy", str(file), "--pool", "missing")
    assert refused.code == 2
    assert "larks" in refused.stderr
    assert "prefect work-pool create missing --type process" in refused.stderr
    names = {one["name"] for one in served.prefect.post("/deployments/filter")}
    assert "poolless" not in names, "nothing half-begun"


def test_an_alert_is_an_event_that_automations_can_expect(served: Served) -> None:
    """As the flow emits it; the night of a real change stands in test_nights."""
    alert = {"kind": "change", "cause": "model", "checkpoint": "base", "metric": "reward"}
    code = f"from flows.nightly.flow import emit_alert; emit_alert('real', {alert})"
    env = {**environment(), **served.prefect.info.client_env(), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    eventually(lambda: "refiner.nightly.alert" in served.prefect.events("refiner.nightly.real"))


def test_the_end_of_serve_pauses_schedules(prefect_session: None, tmp_path: Path) -> None:
    with served_in(tmp_path, str(write(tmp_path, "paused", "0 3 1 1 *"))) as served:
        before = served.prefect.get("/deployments/name/nightly/paused")
    after = served.prefect.get("/deployments/name/nightly/paused")
    assert (before["paused"], after["paused"]) == (False, True)
