"""Nights that a Prefect server begins: by a schedule, or when a run has completed. A real server
and a real `refiner serve`."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, environment, refiner
from tests.support.prefect_server import eventually
from tests.support.served import Served, served_in

pytestmark = pytest.mark.prefect
FILE = """
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


@functools.cache
def soon() -> datetime:
    """When what is served from the first call on is up."""
    return datetime.now(UTC) + timedelta(minutes=3)


def write(folder: Path, name: str, schedule: str) -> Path:
    """A nightly file."""
    from flows.checking.sources import model_digest

    file = folder / f"{name}.yaml"
    file.write_text(FILE.format(schedule=schedule, digest=model_digest("builtin:tiny", "")))
    return file


@pytest.fixture(scope="module")
def served(prefect_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`refiner serve` with a night that begins soon, and one that nobody but an automation
    begins."""
    folder = tmp_path_factory.mktemp("nights")
    files = [write(folder, "soon", f"{soon():%M %H} * * *"), write(folder, "after", "0 3 1 1 *")]
    with served_in(folder, *map(str, files), PREFECT_RUNNER_POLL_FREQUENCY="1") as served:
        yield served


def runs_of(served: Served, name: str, *states: str) -> list[dict[str, Any]]:
    """Flow runs of `nightly/NAME` in one of the states."""
    found = served.prefect.get(f"/deployments/name/nightly/{name}")
    of_it = {"deployments": {"id": {"any_": [found["id"]]}}}
    wanted = {"flow_runs": {"state": {"type": {"any_": list(states)}}}}
    return list(served.prefect.post("/flow_runs/filter", {**of_it, **wanted}))


def test_the_servers_schedule_begins_a_night(served: Served) -> None:
    over = ("COMPLETED", "FAILED", "CRASHED")
    (first, *_) = eventually(lambda: runs_of(served, "soon", *over), 240)
    assert first["state"]["type"] == "COMPLETED", first["state"]
    assert first["auto_scheduled"], "the server's clock has begun it"
    status = refiner("nightly", "status", str(served.folder / "soon.yaml"), "--json").json
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
                {
                    "type": "run-deployment",
                    "source": "selected",
                    "deployment_id": target["id"],
                }
            ],
        },
    )
    run = served.launch(
        recipe="tiny", workspace=str(served.folder / "elsewhere"), overrides=DATA_ALONE
    )
    assert served.ends(run)["type"] == "COMPLETED"
    (begun,) = eventually(lambda: runs_of(served, "after", "RUNNING", "COMPLETED", "FAILED"), 120)
    end = served.ends(begun["id"])
    assert end["type"] == "COMPLETED", end
    assert refiner("nightly", "status", str(served.folder / "after.yaml"), "--json").json["nights"]


def test_a_missing_pool_is_refused_with_those_that_exist(served: Served, tmp_path: Path) -> None:
    file = write(tmp_path, "poolless", "0 3 1 1 *")
    served.prefect.post("/work_pools/", {"name": "larks", "type": "process"})
    refused = refiner("deploy", str(file), "--pool", "missing")
    assert refused.code == 2
    assert "The server has no work pool 'missing'. Expected one of: " in refused.stderr
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
