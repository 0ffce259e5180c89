"""With accounting and enforced memory limits: what only sacct knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.slurm.scheduler import RealSlurm, Row
from infra.slurm.states import facts_of_accounts
from tests.support.require import require
from tests.support.slurm_campaign import SMALL, Campaign
from tests.support.slurm_cluster import Cluster, ClusterSpec, missing, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

MEMORY = Path("/sys/fs/cgroup/memory").is_dir() and os.access("/sys/fs/cgroup/memory", os.W_OK)
SPEC = ClusterSpec(nodes=1, accounting=True, memory=MEMORY)


@pytest.fixture(scope="module")
def accounts() -> Iterator[Cluster]:
    """A cluster of its own, in a network namespace because slurmdbd listens on every address."""
    require("slurm", not missing(SPEC), missing(SPEC))
    with running_cluster(SPEC) as cluster, cluster.joined():
        yield cluster


class Forgetful(RealSlurm):
    """A controller that has forgotten every job that is over."""

    def shown(self, ids: object, names: object = ()) -> list[Row]:
        return []


def test_nothing_of_the_cluster_can_be_reached_from_outside(accounts: Cluster) -> None:
    """Its ports are those of another network namespace, in which there is loopback alone."""
    here = Path("/proc/net/tcp").read_text()
    there = accounts.run("cat", "/proc/net/tcp")
    for port in (accounts.port, accounts.port + 1):
        assert f":{port:04X} " in there
    home = Path(f"/proc/{os.getppid()}/net/tcp").read_text()
    assert f":{accounts.port + 1:04X} " not in home
    assert here != home
    assert "eth" not in accounts.run("cat", "/proc/net/dev")


def test_a_forgotten_job_is_found_in_the_accounts(accounts: Cluster, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "w", commands=Forgetful())
    good, bad = campaign.claim(1), campaign.claim(2)
    campaign.behave({bad.stage_id: {"exit_code": 5}})
    campaign.submit(good, bad)
    assert campaign.wait_dead(good).state == "COMPLETED"
    sight = campaign.wait_dead(bad)
    assert (sight.end.failure, sight.facts["source"]) == ("disk_full", "sacct")
    campaign.workspace.layout.attempt(*good.ref).job.unlink()
    # Accounting lags: some seconds pass before a job can be found there by name.
    patient = campaign.another_dispatcher(commands=Forgetful(), patience=(3, 15.0))
    campaign.dispatcher = patient
    assert campaign.wait_dead(good).state == "COMPLETED"


def test_a_cancelled_job_names_who_did_it(accounts: Cluster, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "w", commands=Forgetful())
    campaign.behave({"work_s": 60, "save_s": 0})
    (request,) = campaign.submit(campaign.claim())
    campaign.wait_begun(request)
    accounts.run("scancel", campaign.job_id(request))
    end = campaign.wait_dead(request).end
    assert end.failure == "cancelled"
    assert "cancelled by root" in end.message


@pytest.mark.parametrize("forgetful", [False, True])
def test_too_much_memory_ends_the_step(accounts: Cluster, tmp_path: Path, forgetful: bool) -> None:
    require("slurm", MEMORY, "no memory cgroup (version 1) to write to")
    commands = Forgetful() if forgetful else RealSlurm()
    campaign = Campaign(tmp_path / "w", commands=commands)
    campaign.behave({"take_mb": 1500})
    (request,) = campaign.submit(campaign.claim(resources=replace(SMALL, memory_gb=1)))
    end = campaign.wait_dead(request).end
    assert (end.failure, end.decision) == ("out_of_memory", "resume")
    rows = RealSlurm().accounts([campaign.job_id(request)]) or []
    (job,) = facts_of_accounts(rows).values()
    assert job.out_of_memory
