"""Dispatch on a real Slurm, without and with accounting: jobs, their ends, preemption, outages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.jobs.failures import nodes_to_avoid
from infra.slurm.profiles import Profile
from infra.slurm.scheduler import RealSlurm, Row, SlurmUnavailable
from infra.slurm.states import facts_of_accounts
from infra.store import atomic
from refiner_core.contract.errors import ConfigurationError
from tests.support.require import require
from tests.support.slurm_campaign import SMALL, Campaign
from tests.support.slurm_cluster import Cluster, ClusterSpec, missing, running_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PROFILE = Profile(name="test", cpu_stages="slurm")
WHOLE_NODE = replace(SMALL, cpus=8)


@pytest.fixture
def campaign(slurm: Cluster, tmp_path: Path) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path / "w")
    yield campaign
    campaign.end()


def on(folder: Path, **fields: object) -> Campaign:
    return Campaign(folder / "w2", replace(PROFILE, **fields))


@pytest.fixture(scope="module")
def limited(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[Campaign, object]:
    """A job with a time limit of two minutes, which is long for a test: it is begun first, and
    looked at last. Slurm may send its signal half a minute and a check early: within one minute
    that could come before the process has begun."""
    campaign = on(tmp_path_factory.mktemp("limited"), nodelist="n2", signal_lead_s=30)
    campaign.behave({"work_s": 150, "save_s": 2})
    request = campaign.claim(resources=replace(SMALL, time_limit_min=2), save_s=5.0)
    campaign.submit(request)
    campaign.wait_begun(request)
    return campaign, request


def test_a_job_runs_and_its_end_is_classified(limited: object, campaign: Campaign) -> None:
    good, bad = campaign.claim(1), campaign.claim(2)
    campaign.behave({bad.stage_id: {"exit_code": 2}})
    campaign.submit(good, bad)
    assert campaign.observe(good, bad)[good.ref].liveness == "live"
    told = campaign.wait_dead(good)
    assert (told.state, told.node[0]) == ("COMPLETED", "n")
    assert told.facts["exit_code"] == "0:0"
    end = campaign.wait_dead(bad).end
    assert (end.failure, end.decision) == ("bad_configuration", "stop")
    assert any(line.startswith("end") for line in campaign.said(good))


def test_a_request_to_stop_lets_the_worker_save(campaign: Campaign) -> None:
    campaign.behave({"work_s": 60, "save_s": 1.5})
    (request,) = campaign.submit(campaign.claim())
    campaign.wait_begun(request)
    campaign.wait(request, lambda s: s.running)
    assert campaign.dispatcher.stop(campaign.open(request))
    status = campaign.wait_dead(request)
    assert campaign.said(request)[-2:] == ["asked", "saved"]
    assert status.end.failure == "interrupted"


def test_a_queued_job_is_withdrawn_by_a_kill(campaign: Campaign, slurm: Cluster) -> None:
    campaign.behave({"work_s": 60, "save_s": 0})
    (request,) = campaign.submit(campaign.claim(resources=replace(SMALL, nodes=3, cpus=8)))
    other = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--hold", "--wrap=true")
    waiting = campaign.wait(request, lambda s: s.liveness == "live")
    if waiting.state == "PENDING":
        assert not waiting.running
    campaign.dispatcher.kill(campaign.open(request))
    end = campaign.wait_dead(request).end
    assert (end.failure, end.decision) == ("killed", "resume")
    slurm.run("scancel", other.strip())


def test_a_job_preempted_with_grace_saves(slurm: Cluster, tmp_path: Path) -> None:
    low = on(tmp_path, partition="low", nodelist="n1")
    low.behave({"work_s": 60, "save_s": 1})
    (request,) = low.submit(low.claim(resources=WHOLE_NODE))
    low.wait_begun(request)
    slurm.run("sbatch", *_ON_N1, "--partition=high", "--wrap=sleep 1")
    end = low.wait_dead(request).end
    assert low.said(request)[-2:] == ["asked", "saved"]
    assert (end.failure, end.decision) == ("preempted", "resume")


def test_a_job_preempted_without_grace_keeps_its_id(slurm: Cluster, tmp_path: Path) -> None:
    rough = on(tmp_path, partition="rough", nodelist="n1")
    rough.behave({"work_s": 60})
    (request,) = rough.submit(rough.claim(resources=WHOLE_NODE))
    rough.wait_begun(request)
    job_id = rough.job_id(request)
    rough.behave({"work_s": 0})
    slurm.run("sbatch", *_ON_N1, "--partition=high", "--wrap=sleep 0.5")
    waiting = rough.wait(request, lambda s: s.state == "PENDING")
    assert (waiting.liveness, waiting.running) == ("live", False)
    assert rough.wait_dead(request).state == "COMPLETED"
    restarts = [
        json.loads(line.partition(" ")[2])["SLURM_RESTART_COUNT"]
        for line in rough.said(request)
        if line.startswith("begin")
    ]
    assert restarts == [None, "1"]
    assert rough.job_id(request) == job_id


def test_a_lost_node_requeues_a_job_or_is_a_node_failure(slurm: Cluster, tmp_path: Path) -> None:
    campaign = on(tmp_path, nodelist="n3")
    final = Campaign(tmp_path / "w3", replace(PROFILE, nodelist="n3", requeue=False))
    for each in (campaign, final):
        each.behave({"work_s": 60})
    (request,) = campaign.submit(campaign.claim())
    (lost,) = final.submit(final.claim())
    campaign.wait_begun(request)
    final.wait_begun(lost)
    campaign.behave({"work_s": 0})
    try:
        slurm.kill_node("n3")
        back = campaign.wait(request, lambda s: s.state == "PENDING")
        assert (back.liveness, back.running) == ("live", False)
        status = final.wait_dead(lost)
    finally:
        slurm.start_node("n3")
    assert (status.end.failure, status.node) == ("node_failure", "n3")
    assert campaign.wait_dead(request).state == "COMPLETED"


def test_of_a_job_on_two_nodes_the_one_that_failed_is_avoided(
    slurm: Cluster, tmp_path: Path
) -> None:
    campaign = on(tmp_path, nodelist="n2,n3", requeue=False)
    campaign.behave({"work_s": 60})
    (lost,) = campaign.submit(campaign.claim(resources=replace(SMALL, nodes=2)))
    campaign.wait_begun(lost)
    try:
        slurm.kill_node("n3")
        status = campaign.wait_dead(lost)
    finally:
        slurm.start_node("n3")
    assert (status.end.failure, status.node, status.end.node) == ("node_failure", "n[2-3]", "n3")
    campaign.workspace.close_attempt(*lost.ref, status.end)
    attempt = campaign.workspace.read_attempt(*lost.ref)
    assert attempt is not None
    assert attempt.outcome is not None
    assert nodes_to_avoid([attempt, replace(attempt, outcome=None)]) == ("n3",)
    unknown = replace(attempt, outcome=replace(attempt.outcome, node=""), node="n2")
    assert nodes_to_avoid([attempt, unknown]) == ("n3", "n2")


def test_failed_nodes_are_avoided_unless_none_is_left(campaign: Campaign) -> None:
    elsewhere = campaign.claim(1, avoid=("n1", "n2"))
    nowhere = campaign.claim(2, avoid=("n1", "n2", "n3"))
    campaign.submit(elsewhere, nowhere)
    assert campaign.wait_dead(elsewhere).node == "n3"
    assert campaign.wait_dead(nowhere).state == "COMPLETED"


def test_a_failed_start_holds_the_job_until_its_release(slurm: Cluster, tmp_path: Path) -> None:
    campaign = on(tmp_path, nodelist="n2")
    spool = slurm.folder / "spool" / "n2"
    following = int(slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=true")) + 1
    blocked = spool / f"job{following:05d}"
    blocked.write_text("in the way of the job's folder")
    (request,) = campaign.submit(campaign.claim())
    held = campaign.wait(request, lambda s: s.held)
    assert (held.liveness, held.running) == ("live", False)
    blocked.unlink()
    slurm.run("scontrol", "update", "nodename=n2", "state=resume", check=False)
    campaign.dispatcher.release(campaign.open(request))
    assert campaign.wait_dead(request).state == "COMPLETED"


@pytest.mark.parametrize("size", [1, 5])
def test_a_crash_after_sbatch_loses_and_doubles_nothing(
    campaign: Campaign, slurm: Cluster, size: int
) -> None:
    campaign.behave({"work_s": 1})
    requests = campaign.submit(*(campaign.claim(seed) for seed in range(size)))
    ids = [campaign.job_id(r) for r in requests]
    for request, job_id in zip(requests, ids, strict=True):
        paths = campaign.workspace.layout.attempt(*request.ref)
        batch = campaign.workspace.part(paths, "batch")
        atomic.write_json(paths.job, {"batch": batch})
        pickle = campaign.workspace.root / batch["folder"] / f"{job_id}_submitted.pkl"
        pickle.rename(pickle.with_name(f"unplaced-{job_id}.pkl"))
    campaign.dispatcher = campaign.another_dispatcher()
    assert {s.liveness for s in campaign.observe(*requests).values()} == {"live"}
    assert [campaign.job_id(r) for r in requests] == ids
    for request in requests:
        assert campaign.wait_dead(request).state == "COMPLETED"
        assert sum(line.startswith("begin") for line in campaign.said(request)) == 1


def test_an_absent_controller_kills_no_job(campaign: Campaign, slurm: Cluster) -> None:
    campaign.behave({"work_s": 60})
    (request,) = campaign.submit(campaign.claim())
    campaign.wait_begun(request)
    campaign.wait(request, lambda s: s.running)
    slurm.stop_controller()
    try:
        assert campaign.wait(request, lambda s: s.liveness == "unknown").end is None
        errors = campaign.dispatcher.submit([campaign.claim(2)])
        assert [type(e) for e in errors.values()] == [SlurmUnavailable]
    finally:
        slurm.start_controller()
    assert campaign.wait(request, lambda s: s.running).liveness == "live"


def test_a_wrong_partition_is_a_configuration_error(slurm: Cluster, tmp_path: Path) -> None:
    campaign = on(tmp_path, partition="nowhere")
    (error,) = campaign.dispatcher.submit([campaign.claim()]).values()
    assert isinstance(error, ConfigurationError)
    assert "invalid partition" in str(error)


def test_the_users_folders_shadow_nothing(
    slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("infra", "flows", "submitit", "cloudpickle"):
        (tmp_path / "cwd" / name).mkdir(parents=True)
        (tmp_path / "cwd" / name / "__init__.py").write_text(f"raise SystemExit('my {name}')")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("PYTHONPATH", os.pathsep + str(tmp_path / "cwd" / "lib"))
    code = Path(__file__).resolve().parents[2]
    campaign = Campaign(tmp_path / "w")
    (request,) = campaign.submit(campaign.claim(code=code))
    assert campaign.wait_dead(request).state == "COMPLETED"
    assert f"infra {code}/infra/__init__.py" in campaign.said(request)


@pytest.mark.parametrize("option", ["gpus-per-node", "gres"])
def test_gpus_are_requested_by_either_option(slurm: Cluster, tmp_path: Path, option: str) -> None:
    campaign = on(tmp_path, gpu_option=option)
    (request,) = campaign.submit(campaign.claim(resources=replace(SMALL, gpus=2)))
    assert campaign.wait_dead(request).state == "COMPLETED"
    assert '"CUDA_VISIBLE_DEVICES": "0,1"' in campaign.said(request)[0]


def test_a_job_saves_before_its_time_limit(limited: tuple[Campaign, object]) -> None:
    campaign, request = limited
    status = campaign.wait_dead(request)
    said = campaign.said(request)
    assert said[-2:] == ["asked", "saved"]
    begun, saved = (campaign.when(request, w) for w in ("begin", "saved"))
    assert saved - begun < 120
    assert status.state == "FAILED"  # it ended by itself, ahead of Slurm


_ON_N1 = ("--nodelist=n1", "--exclusive", "--output=/dev/null")


# ---------------------------------------------------------------- with accounting


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


def test_the_cluster_is_not_reachable_from_outside(accounts: Cluster) -> None:
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
    status = campaign.wait_dead(bad)
    assert (status.end.failure, status.facts["source"]) == ("disk_full", "sacct")
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
