"""Offline W&B runs reach a W&B server: real ones, made and sent by wandb itself."""

import json
import socket
from pathlib import Path

import pytest
import wandb

from flows.cli.main import main
from infra.tracking import TrackedRun, Tracker, tracked_address, without_paths
from refiner_core.contract.config import TrackingConfig
from tests.support.recorded_run import RecordedRun
from tests.support.wandb_server import KEY, WandbServer


def _log(run: RecordedRun, attempt: int, steps: range) -> None:
    """What an attempt at GRPO logs offline."""
    stage = run.stage("grpo")
    tracked = TrackedRun(
        run_id=stage.id,
        name="grpo",
        group="a-sweep",
        job_type="grpo",
        folder=run.workspace.layout.attempt(stage.id, attempt).tracker,
        config=without_paths({"grpo.beta": 0.001, "command.workdir": "/home/somebody"}),
    )
    tracker = Tracker(TrackingConfig(wandb="offline", notes="on the new judge"), tracked)
    for step in steps:
        tracker.log(step, {"scores": step / 10})
    tracker.finish()
    wandb.teardown()  # its process has written everything, as when a worker has ended


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    recorded = RecordedRun(tmp_path / "runs")
    recorded.claim("grpo")
    _log(recorded, 1, range(1, 4))
    return recorded


def test_all_attempts_of_a_stage_are_one_run(run: RecordedRun, monkeypatch, capsys) -> None:
    """A resumed training is one curve, and a second call doubles no rows."""
    stage, where = run.stage("grpo").id, f"workspace={run.workspace.root}"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert main(["track", "sync", where]) == 0
        assert "Sent 1 of 1" in capsys.readouterr().out
        run.claim("grpo")
        _log(run, 2, range(4, 6))
        assert main(["track", "sync", where, "--json"]) == 0
        sent = json.loads(capsys.readouterr().out)
        assert (sent["offline"], sent["new"], sent["sent"]) == (2, 1, 1)
        assert main(["track", "sync", where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["sent"] == 0
        taken = server.runs[stage]
        assert list(server.runs) == [stage]
        assert [row["_step"] for row in taken.history] == [1, 2, 3, 4, 5]
        assert (taken.group, taken.job_type) == ("a-sweep", "grpo")
        assert taken.notes == "on the new judge"
        assert taken.config["grpo.beta"]["value"] == 0.001
        assert "somebody" not in json.dumps(dict(taken.config))
        # Cards and reports link to it from now on.
        address = tracked_address(run.workspace.layout.attempt(stage, 1).tracker)
        assert address == f"{server.url}/me/refiner/runs/{stage}"


def test_a_missing_network_is_reported_in_seconds(run: RecordedRun, monkeypatch, capsys) -> None:
    """wandb itself retries for hours in silence."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://user:secret@127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    where = f"workspace={run.workspace.root}"
    assert main(["track", "sync", where]) == 7
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert "secret" not in said
    assert main(["track", "sync", where, "--dry-run"]) == 0
    assert "have new data" in capsys.readouterr().out
