"""Real processes on this machine: the orchestrator is killed at any operation, and nothing is lost.

What a kill between a claim and its job, or between a job and the note of its id, leaves behind is
taken up by whoever comes next: one job at a time, each step once.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.host.processes import ProcessId
from infra.store.traces import read_metrics
from infra.store.workspace import Workspace
from tests.support.command import ROOT, environment
from tests.support.plans import small_plan

DYING = ROOT / "tests" / "support" / "dying_campaign.py"
STEPS = 9
LIMIT_S = 60.0


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace.open(tmp_path / "ws")
    work = {"steps": STEPS, "step_s": 0.1, "save_every": 3}
    (workspace.root / "behaviour.json").write_text(json.dumps({"data": work, "sft": work}))
    yield workspace
    for path in workspace.layout.stages.glob("*/attempts/*/*.json"):
        if path.name in ("started.json", "job.json"):
            process = json.loads(path.read_text()).get("process")
            if process is not None:
                ProcessId.parse(process).kill_group()


def run(workspace: Workspace, dies_at: int) -> int:
    """Run the plan with an orchestrator that dies at an operation (0: never); its exit code."""
    done = subprocess.run(
        [sys.executable, str(DYING), str(dies_at), str(workspace.root), "data", "sft"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


def spans(workspace: Workspace) -> dict[str, list[tuple[float, float]]]:
    """When each stage was worked on, by its worker's own words."""
    found: dict[str, list[tuple[float, float]]] = {}
    began: dict[tuple[str, str], float] = {}
    for line in (workspace.root / "journal.txt").read_text().splitlines():
        at, _pid, word, name, attempt, *_ = json.loads(line)
        if word == "begin":
            began[name, attempt] = at
        else:
            found.setdefault(name, []).append((began.pop((name, attempt)), at))
    assert not began, "a worker was lost"
    return found


def check(workspace: Workspace) -> None:
    """All is done, each step once, nothing side by side."""
    for stage in small_plan("data", "sft").stages:
        record = workspace.read_record(stage.id)
        jobs = [a.job_id for a in record.attempts if a.job_id is not None]
        assert len(jobs) == len(set(jobs))
        metrics = read_metrics(workspace.layout.attempt(stage.id, record.result.attempt).metrics)
        assert [m.step for m in metrics] == list(range(1, STEPS + 1))
    for name, times in spans(workspace).items():
        pairs = itertools.pairwise(sorted(times))
        assert all(end <= begin for (_, end), (begin, _) in pairs), f"{name} ran twice at a time"


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_operation_lose_and_double_nothing(workspace: Workspace, seed: int) -> None:
    rng = random.Random(seed)
    deaths = [rng.randint(1, 40) for _ in range(4)]
    codes = [run(workspace, number) for number in deaths]
    assert -9 in codes, "nobody was killed"
    assert run(workspace, 0) == 0, f"after deaths at {deaths}"
    check(workspace)


def test_a_claim_without_a_job_is_resumed(workspace: Workspace) -> None:
    """Die at the operation just before the worker is started."""
    stage = small_plan("data", "sft").by_name["data"]
    number = 6
    while not workspace.layout.attempt(stage.id, 1).intent.exists():
        assert run(workspace, number) == -9
        number += 1
    assert not workspace.layout.attempt(stage.id, 1).job.exists()
    assert run(workspace, 0) == 0
    check(workspace)
    record = workspace.read_record(stage.id)
    assert record.result.attempt == len(record.attempts) == 2
