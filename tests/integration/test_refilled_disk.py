"""A neighbour on the same quota that takes every freed byte, at the same save again and again.

A worker that waits for space reports it without a write. One that dies meanwhile counts as stopped
by the full disk, not as killed: it continues when there is space, however often that happens.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flows.running.status import RunWatcher
from infra.disk.manager import DiskManager
from infra.host.processes import ProcessId
from infra.store.workspace import Workspace
from refiner_core.contract.config import DiskConfig, RetryConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import Attempt, to_json
from tests.support.command import ROOT, environment, wait_until
from tests.support.plans import fake_router, orchestrator_on, run_record, small_plan
from tests.support.quota import QuotaFolder, quota_folder

pytestmark = pytest.mark.quota
MIB = 1 << 20
#: A worker waits long enough to be killed meanwhile.
DISK = DiskConfig(watch_s=0.4, hold_s=60.0)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[QuotaFolder]:
    with quota_folder(tmp_path / "q", 48) as disk:
        yield disk


@pytest.fixture
def workspace(quota: QuotaFolder) -> Workspace:
    return Workspace.open(quota.folder / "ws")


@contextlib.contextmanager
def neighbour(workspace: Workspace) -> Iterator[None]:
    """From the middle of the next save on, it takes every freed byte, until the block ends."""
    messages = ["-m", "tests.support.filler", str(workspace.root.parent), "--refill"]
    process = subprocess.Popen(
        [sys.executable, *messages, "--hold-s", "60", "60", "--watch", str(workspace.root)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(400)


class Going:
    """A campaign on one stage whose saves take a while."""

    def __init__(self, workspace: Workspace, steps: int = 2) -> None:
        self.workspace = workspace
        retries = RetryConfig(killed=1)
        self.plan: Plan = small_plan("data", disk=DISK, backoff_s=0.1, retries=retries)
        behaviour = {"data": {"steps": steps, "bytes": 6 * MIB, "save_s": 0.3}}
        (workspace.root / "behaviour.json").write_text(json.dumps(behaviour))
        self.run = replace(run_record(workspace, self.plan), config=to_json(self.plan.config))

        self.campaign = orchestrator_on(
            self.plan,
            workspace,
            fake_router(workspace),
            run=self.run,
            disk_manager=DiskManager(workspace, DISK),
        )
        self.campaign.start()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        record = self.workspace.read_record(self.plan.by_name["data"].id)
        return () if record is None else record.attempts

    @property
    def view(self) -> tuple[str, str]:
        found = self.campaign.views()["data"]
        return found.state, found.message

    @property
    def status(self) -> tuple[str, str]:
        found = RunWatcher(self.workspace, self.run).observe().stages[0]
        return found.state, found.reason

    def until_it_waits(self, number: int) -> None:
        wait_until(lambda: len(self.attempts) == number, f"attempt {number}")
        wait_until(lambda: self.attempts[-1].has_room is False, "a worker that waits for room")

    def kill_worker(self) -> None:
        stage_id, number = self.plan.by_name["data"].id, self.attempts[-1].number
        started = self.workspace.read_control(
            self.workspace.layout.attempt(stage_id, number).started
        )
        ProcessId.parse(started["process"]).kill_group()


def test_a_worker_that_dies_on_a_full_disk_costs_no_retry(workspace: Workspace) -> None:
    going = Going(workspace)
    for number in (1, 2):
        with neighbour(workspace):
            going.until_it_waits(number)
            wait_until(lambda: going.view[0] == "paused", "a paused stage")
            assert "the disk is full" in going.view[1]
            assert going.status == going.view
            going.kill_worker()
            wait_until(lambda: "without a message" in going.status[1], "a look at the dead worker")
            assert going.status[0] == "paused", going.status
            wait_until(lambda: "disk is full" not in going.view[1], "a new look")
    views = going.campaign.join()
    assert views["data"].state == "done", views["data"].message
    ends = [a.outcome.failure for a in going.attempts if a.outcome]
    assert ends == ["disk_full", "disk_full", "none"]


def test_a_read_only_file_system_is_waited_for(workspace: Workspace, quota: QuotaFolder) -> None:
    going = Going(workspace, steps=12)  # it is made read-only while there is one to save
    log = workspace.layout.attempt(going.plan.by_name["data"].id, 1).log
    wait_until(lambda: going.attempts and going.attempts[0].started_at, "a worker")
    wait_until(log.exists, "its log")
    quota.set_read_only(True)
    wait_until(lambda: "errno 30" in log.read_text().lower(), "a save that meets EROFS")
    quota.set_read_only(False)
    views = going.campaign.join()
    assert views["data"].state == "done", views["data"].message
    assert len(going.attempts) == 1, "it has waited"
