"""Jobs of this machine: their GPUs, and the class of their end."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.jobs.dispatch import LocalDispatcher
from infra.jobs.dispatcher import JobRequest, JobStatus, OpenAttempt, WorkerCommand
from infra.store.workspace import Workspace
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import LaunchError
from tests.support.gpus import invented
from tests.support.plans import claim, small_plan

TELL = """
import os, sys
print("sees " + os.environ["CUDA_VISIBLE_DEVICES"] + ".", flush=True)
sys.exit({code})
"""


def end_of(tmp_path: Path, gpus: int = 0, code: int = 0) -> tuple[str, JobStatus]:
    """What a worker that never takes its attempt prints, and how its job looks when it has ended;
    or with what it was refused."""
    workspace = Workspace.open(tmp_path / "ws")
    stage = claim(workspace, small_plan("data"), "data")
    script = tmp_path / "tell.py"
    script.write_text(TELL.format(code=code))
    local = LocalDispatcher(workspace, WorkerCommand(workspace.root, (str(script),)))
    request = JobRequest(stage.id, 1, "refiner-test", replace(Resources(), gpus=gpus))
    failed = local.submit([request])
    if failed:
        raise failed[request.ref]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        attempt = workspace.read_attempt(stage.id, 1)
        assert attempt is not None
        seen = local.look([OpenAttempt(request.ref, replace(attempt, owner="x:1:1.00"))])
        if seen[request.ref].liveness == "dead":
            return workspace.layout.attempt(stage.id, 1).printed.read_text(), seen[request.ref]
        time.sleep(0.02)
    raise AssertionError("it never ended")


@pytest.mark.parametrize(("gpus", "seen"), [(0, ""), (1, "0"), (2, "0,1")])
def test_a_job_sees_the_gpus_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, seen: str
) -> None:
    """Two that train at a time would else share one without knowing, or take all of them."""
    names = invented(monkeypatch, 3)
    expected = ",".join(names[int(number)] for number in seen.split(",") if number)
    assert f"sees {expected}." in end_of(tmp_path, gpus)[0]


def test_a_job_without_free_gpus_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invented(monkeypatch, 1)
    with pytest.raises(LaunchError, match="2 GPUs are needed"):
        end_of(tmp_path, 2)


@pytest.mark.parametrize(("code", "failure"), [(5, "disk_full"), (1, "bug")])
def test_the_exit_code_gives_the_failure_class(tmp_path: Path, code: int, failure: str) -> None:
    assert end_of(tmp_path, code=code)[1].end.failure == failure
