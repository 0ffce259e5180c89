"""Flow runs whose stages are jobs of a real Slurm: launched, cancelled and retried from Prefect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from tests.support.command import SMALL, Stage, refiner
from tests.support.prefect_server import eventually
from tests.support.served import FINAL, Served, served_in, steps_of_grpo, weights
from tests.support.slurm_cluster import Cluster

pytestmark = [pytest.mark.prefect, pytest.mark.slurm]


@pytest.fixture
def served(slurm: Cluster, prefect_session: None, tmp_path: Path) -> Iterator[Served]:
    """`refiner serve` on a login node."""
    with served_in(tmp_path, "tiny") as served:
        yield served


@pytest.mark.timeout(1200)
def test_a_flow_run_on_slurm_cancelled_during_grpo_and_retried_ends_with_the_same_weights(
    served: Served, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(json.dumps({"name": "test", "cpu_stages": "slurm"}))
    long = "grpo.num_training_steps=20"  # the cancel has to come before its end
    common = [*SMALL, long, "stages=[data,sft,grpo]", "dispatch.poll_s=0.1"]
    straight = tmp_path / "straight"
    done = refiner("run", "tiny", f"workspace={straight}", "--no-server", *common)
    assert done.code == 0, done.stderr

    workspace, room = tmp_path / "runs", Workspace.read_only(tmp_path / "runs")
    on_slurm = ["dispatch.executor=slurm", f"dispatch.profile={profile}"]
    overrides = [*common, *on_slurm, "dispatch.scheduler_poll_s=0.5"]
    flow_run = served.launch(recipe="tiny", workspace=str(workspace), overrides=overrides)
    eventually(lambda: steps_of_grpo(workspace) >= 1, 300)
    served.set_state(flow_run, "CANCELLING", "Cancelling")
    assert served.ends(flow_run, 120)["type"] == "CANCELLED"
    run = served.call(flow_run)
    eventually(lambda: not orchestrator_of(room, run).works, 120)
    grpo = Stage(workspace, "grpo")
    assert grpo.folder
    assert list(grpo.folder.glob("checkpoints/step-*")), "the job has saved"
    assert not (grpo.folder / "result.json").exists()
    served.set_state(flow_run, "SCHEDULED", "AwaitingRetry")
    eventually(lambda: served.state(flow_run)["type"] not in FINAL, 60)
    end = served.ends(flow_run, 300)
    assert end["type"] == "COMPLETED", end
    assert served.call(flow_run) == run
    assert weights(workspace) == weights(straight)
    jobs = [json.loads(p.read_text()) for p in workspace.glob("stages/*/attempts/*/job.json")]
    assert {job["executor"] for job in jobs} == {"slurm"}
    assert len(jobs) >= 4, "data, SFT, and GRPO twice"
