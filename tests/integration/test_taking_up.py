"""Runs and sweeps that are begun or taken up on a disk that is full to the last byte: they wait."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.api import begin_run, begin_sweep, make_sweep_plan, resume_sweep, work_on, work_on_sweep
from flows.running.foreground import LaunchOptions
from flows.sweeping.launching import workspace_of
from infra.host.processes import ProcessId
from infra.orchestrator import waiting as room_keeping
from infra.store.layout import sweep_call
from infra.store.orchestrators import orchestrator_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import NoSpaceError
from tests.support.quota import fill, small_tmpfs

pytestmark = pytest.mark.quota
TRAINER = Path(__file__).parents[1] / "support" / "external_trainer.py"


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk, beside a recipe of one stage that takes a second, and a sweep over it."""
    settings = {
        "run": f"{sys.executable} {TRAINER} --out {{output}} --seed {{seed}} {{resume}} --steps 2",
        "resume_arguments": "--resume_from {checkpoint}",
        "checkpoints": "ckpt_*",
        "complete": "file:trainer.json",
    }
    recipe = {"stages": ["command"], "command": settings, "tracking": {"wandb": "disabled"}}
    (tmp_path / "script.yaml").write_text(json.dumps({**recipe, "dispatch": {"poll_s": 0.1}}))
    sweep = {"recipe": "script.yaml", "seeds": [1], "factors": {"command.version": ["a", "b"]}}
    (tmp_path / "small.yaml").write_text(json.dumps(sweep))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(room_keeping, "_RECHECK_S", 0.2)
    with small_tmpfs(tmp_path / "disk", mib=64) as folder:
        yield folder


@contextlib.contextmanager
def full_until_said(disk: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """The disk is full until the run reports that it waits; yields what was printed by then."""
    said: list[str] = []
    over = threading.Event()

    def clear() -> None:
        while not over.wait(0.1):
            said.append(capsys.readouterr().err)
            if "aiting for disk space" in said[-1]:
                break
        (disk / "filler").unlink()

    fill(disk / "filler")
    thread = threading.Thread(target=clear)
    thread.start()
    try:
        yield said
    finally:
        over.set()
        thread.join()


def test_a_run_waits_for_space_at_its_start(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"workspace={disk / 'runs'}"
    plan, workspace, run = begin_run("script.yaml", [where])
    launch = LaunchOptions(use_server=False, quiet=True, resumed=True)
    with full_until_said(disk, capsys):
        outcome = work_on(plan, workspace, run, launch)
    assert outcome.exit_code == 0, outcome
    assert orchestrator_of(workspace, run.run).turn == 1

    plan, workspace, run = begin_run("script.yaml", [where, "seed=2", "disk.wait_min=0"])
    fill(disk / "filler")
    with pytest.raises(NoSpaceError):
        work_on(plan, workspace, run, launch)
    assert orchestrator_of(workspace, run.run).turn == 0


def test_a_sweep_waits_for_space_at_its_start(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_sweep_plan("small.yaml", [f"workspace={disk / 'runs'}"])
    workspace = workspace_of(plan, to_write=True)
    with full_until_said(disk, capsys) as said:
        record = begin_sweep(plan, [f"workspace={disk / 'runs'}"])
    assert "aiting for disk space" in "".join(said)
    launch = LaunchOptions(use_server=False, quiet=True)
    with full_until_said(disk, capsys) as said:
        outcome = work_on_sweep(plan, workspace, record, launch)
    assert outcome.exit_code == 0, outcome

    # Cancelled since, and resumed by its name alone.
    workspace.request_cancel(sweep_call(record.name), str(ProcessId.of()))
    with full_until_said(disk, capsys) as said:
        assert resume_sweep(record.name, disk / "runs", launch=launch).exit_code == 0
    assert Workspace.read_only(disk / "runs").cancel_asked(sweep_call(record.name)) is None
