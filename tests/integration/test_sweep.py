"""Sweeps by command: launched, interrupted, amended, cancelled, and watched from another shell.

Most trials train with another trainer's script (tests/support/external_trainer.py), which takes a
second; one sweep trains for real.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.host.processes import ProcessId
from infra.store.layout import sweep_call
from infra.store.sweep_records import read_sweep
from infra.store.workspace import Workspace
from tests.support.command import (
    SMALL,
    Stage,
    called,
    kill_orchestrator,
    refiner,
    start,
    wait_until,
)
from tests.support.prefect_server import PrefectApi, eventually
from tests.support.slurm_cluster import Cluster

TRAINER = Path(__file__).parents[1] / "support" / "external_trainer.py"
RUN = f"{sys.executable} {TRAINER} --out {{output}} --seed {{seed}} {{resume}} --steps 8"


class Sweep:
    """A sweep file over a script, and the workspace that it is launched in."""

    def __init__(self, folder: Path, *, more: str = "", **command: Any) -> None:
        self.file, self.root = folder / "ablation.yaml", folder / "runs"
        settings = {
            "run": RUN + more,
            "resume_arguments": "--resume_from {checkpoint}",
            "checkpoints": "ckpt_*",
            "complete": "file:trainer.json",
            "progress_pattern": r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)",
            **command,
        }
        (folder / "script.yaml").write_text(
            json.dumps(
                {
                    "stages": ["command"],
                    "command": settings,
                    "tracking": {"wandb": "disabled"},
                    "dispatch": {"nice": 0, "poll_s": 0.1, "grace_s": 20, "retries": {"bug": 0}},
                }
            )
        )
        self.write(seeds=[1, 2])

    def write(self, arms: Sequence[str] = ("plain", "other"), **changes: Any) -> None:
        """The file as it is from now on; an arm is a version of the script's text."""
        text = {
            "recipe": "script.yaml",
            "arms": {
                arm: [f'command.version="{arm}"', *changes.get("also", {}).get(arm, ())]
                for arm in arms
            },
            **{k: v for k, v in changes.items() if k != "also"},
        }
        self.file.write_text(json.dumps(text))

    @property
    def call(self) -> tuple[str, ...]:
        return ("sweep", str(self.file), f"workspace={self.root}", "--yes", "--no-server")

    @property
    def records(self) -> Workspace:
        return Workspace.read_only(self.root)

    def status(self) -> dict[str, Any]:
        return called("status", "ablation", f"workspace={self.root}", "--json").json

    def states(self) -> dict[str, str]:
        return {t["trial"]: t["state"] for t in self.status()["trials"]}

    def attempts(self) -> dict[str, int]:
        """Stage -> how many attempts it has."""
        return {
            path.name: len(list(path.glob("attempts/0*")))
            for path in sorted(self.root.glob("stages/*"))
        }

    def began(self, count: int = 1) -> bool:
        """Whether so many trials train."""
        steps = [
            list(p.glob("attempts/*/metrics.jsonl")) for p in self.root.glob("stages/command-*")
        ]
        return sum(bool(found) and found[0].stat().st_size > 0 for found in steps) >= count

    def kill_jobs(self) -> None:
        for path in self.root.glob("stages/*/attempts/*/*.json"):
            if path.name in ("started.json", "job.json"):
                process = json.loads(path.read_text()).get("process")
                if process is not None:
                    ProcessId.parse(process).kill_group()


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    sweep = Sweep(tmp_path)
    yield sweep
    sweep.kill_jobs()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Sweep]:
    """Trials that take longer than any test waits."""
    sweep = Sweep(tmp_path, more="0000 --step_s 0.05")
    yield sweep
    sweep.kill_jobs()


def test_a_sweep_trains_compares_and_knows_what_is_done(tmp_path: Path) -> None:
    """The first trial goes ahead, and saves after two steps though the recipe saves at the end."""
    root, file = tmp_path / "runs", tmp_path / "beta.yaml"
    settings = [s for s in SMALL if not s.startswith(("grpo.save", "grpo.num_training"))]
    text = {
        "recipe": "tiny",
        "overrides": [*settings, "stages=[data,grpo]", "grpo.num_training_steps=3"],
        "factors": {"grpo.beta": [0.001, 0.01]},
        "seeds": [1],
    }
    file.write_text(json.dumps(text))
    call = ("sweep", str(file), f"workspace={root}", "--no-server")
    refused = refiner(*call)
    assert refused.code == 2
    assert "--yes" in refused.stderr
    assert not root.exists(), "nothing was launched, nothing was written"

    done = refiner(*call, "--yes", "--json")
    assert done.code == 0, done.stderr
    assert done.json["counts"] == {"done": 2}
    assert "has measured the cost of training: " in done.stderr
    assert "a save" in done.stderr
    assert len(Stage(root, "data").attempts) == 1, "shared"
    first = json.loads(next(iter(sorted(root.glob("runs/*/run.json")))).read_text())
    assert first["config"]["grpo"]["first_save"] == 2
    assert first["provenance"]["sweep"] == {"name": "beta", "arm": "beta=0.001", "seed": 1}

    again = refiner(*call, "--json")
    assert again.code == 0, "nothing is left to do, so nobody is asked"
    assert again.json["counts"] == {"done": 2}
    assert len(list(root.glob("runs/*"))) == 2
    shown = called("status", f"workspace={root}")
    assert "sweep beta of tiny" in shown.stdout, "the newest thing here is a sweep"


def test_a_failed_arm_stops_no_other_and_an_amended_sweep_runs_only_new_stages(
    sweep: Sweep,
) -> None:
    bad = {"bad": [f"command.run={json.dumps(RUN + ' --die_at 3')}"]}
    sweep.write(["plain", "bad"], also=bad, seeds=[1])
    done = refiner(*sweep.call, "--json")
    assert done.code == 1, done.stderr
    states = {t["trial"]: t["state"] for t in done.json["trials"]}
    assert states == {"plain/seed1": "done", "bad/seed1": "failed"}
    trial = called("status", "ablation:plain/seed1", f"workspace={sweep.root}", "--json").json
    assert trial["finished"]
    said = called("status", "ablation", f"workspace={sweep.root}").stdout
    assert "failed: bad/seed1: command: " in said
    assert "refiner resume ablation" in said
    before = sweep.attempts()

    sweep.write(["plain", "other"], seeds=[1, 2])
    amended = refiner(*sweep.call, "--json")
    assert amended.code == 0, amended.stderr
    assert amended.json["number"] == 2
    assert amended.json["counts"] == {"done": 4}
    after = sweep.attempts()
    assert {stage: after[stage] for stage in before} == before, "what was there was left alone"
    assert len(after) == len(before) + 3
    assert read_sweep(sweep.records, "ablation", 1).seeds == (1,), "and what it was is kept"


def test_a_killed_orchestrator_is_followed_by_another_that_doubles_nothing(slow: Sweep) -> None:
    slow.write(seeds=[1], limits={"concurrency": 2})
    process = start(*slow.call)
    wait_until(lambda: slow.began(2), "two trials that train")
    runs = sorted(p.name for p in slow.root.glob("runs/*"))
    second = refiner(*slow.call)
    assert second.code == 2
    assert "Sweep ablation is worked on already" in second.stderr
    kill_orchestrator(process)
    assert slow.status()["orchestrator"]["works"] is False
    following = start("resume", "ablation", f"workspace={slow.root}", "--no-server")
    wait_until(lambda: slow.status()["orchestrator"]["works"], "the next one")
    following.send_signal(signal.SIGINT)
    _, told = following.communicate(timeout=400)
    assert following.returncode == 6, told
    assert sorted(p.name for p in slow.root.glob("runs/*")) == runs
    assert set(slow.attempts().values()) == {1}, "the jobs went on, and were found again"
    assert set(slow.states().values()) == {"interrupted"}


def test_a_sweep_in_the_background_is_ended_from_another_shell(slow: Sweep) -> None:
    slow.write(seeds=[1])
    begun = refiner(*slow.call, "--detach", "--json")
    assert begun.code == 0, begun.stderr
    try:
        wait_until(lambda: slow.began(1), "a trial that trains")
        ended = refiner("cancel", "ablation", f"workspace={slow.root}", "--json")
        assert ended.code == 0, ended.stderr
        assert ended.json["by"] == "orchestrator"
    finally:
        if ProcessId.of(os.getpid()).here and begun.json["pid"]:
            _end(begun.json["pid"])
    assert "interrupted" in slow.states().values()
    who = slow.records.read_orchestrator(sweep_call("ablation"))
    assert who["exit_code"] == 6


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.prefect
def test_prefect_shows_one_flow_run_with_every_stage_once(
    prefect: PrefectApi, tmp_path: Path
) -> None:
    sweep = Sweep(tmp_path)
    sweep.write(seeds=[1])
    done = refiner(*sweep.call[:-1])
    assert done.code == 0, done.stderr
    flow = eventually(lambda: prefect.flow_run("sweep:ablation"))
    ends = eventually(
        lambda: (f := prefect.get(f"/flow_runs/{flow['id']}"))["state_type"] == "COMPLETED" and f,
        120,
    )
    assert ends["deployment_id"] == prefect.get("/deployments/name/sweep/refiner")["id"]
    names = {name.partition(" ")[0] for name in prefect.task_runs(flow["id"])}
    assert names == {"plain/seed1/command", "other/seed1/command"}


@pytest.mark.slurm
def test_on_a_cluster_all_trials_are_jobs_of_one_orchestrator(
    slurm: Cluster, sweep: Sweep, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text(json.dumps({"name": "test", "cpu_stages": "slurm"}))
    sweep.write(seeds=[1, 2])
    done = refiner(
        *sweep.call,
        *("--json", "dispatch.executor=slurm", f"dispatch.profile={profile}"),
        *("dispatch.scheduler_poll_s=0.5", "command.resources.time_limit_min=10"),
    )
    assert done.code == 0, done.stderr
    assert done.json["counts"] == {"done": 4}
    jobs = [json.loads(p.read_text()) for p in sweep.root.glob("stages/*/attempts/*/job.json")]
    assert {job["executor"] for job in jobs} == {"slurm"}
