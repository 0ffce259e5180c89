"""The dispatcher of Slurm against small programs in place of its commands, and golden scripts."""

import errno
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.slurm.profiles import Container, JobPlacement, Profile
from infra.slurm.scheduler import RealSlurm, SlurmUnavailable
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import ConfigurationError, LaunchError, UnsupportedError
from tests.support.fake_slurm import FakeSlurm
from tests.support.slurm_campaign import SMALL, Campaign

GOLDEN = Path(__file__).with_name("golden")
GPU = Resources(gpus=4, nodes=2, cpus=16, memory_gb=200, time_limit_min=600)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    found = FakeSlurm(tmp_path / "slurm")
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return found


@pytest.fixture
def campaign(fake: FakeSlurm, tmp_path: Path) -> Campaign:
    return Campaign(tmp_path / "w", poll_s=0.0)


# ---------------------------------------------------------------- batch scripts

PROFILES = {
    "plain": Profile(name="plain"),
    "gres": Profile(
        name="gres",
        partition="gpu",
        account="lab",
        qos="normal",
        constraint="hbm3",
        exclude=("n7",),
        gpu_option="gres",
        gpu_type="h100",
        modules=("cuda/12.8",),
        setup=("source /etc/profile.d/modules.sh",),
        sbatch={"mail-type": "FAIL", "exclusive": True, "mem": None, "reservation": "week"},
        signal_lead_s=300,
    ),
    "container": Profile(
        name="container",
        partition="low",
        python="python3",
        container=Container("/images/refiner.sif"),
        requeue=False,
    ),
}


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("count", [1, 4])
def test_batch_scripts_are_golden(fake: FakeSlurm, tmp_path: Path, name: str, count: int) -> None:
    """After a change that is meant: ``REFINER_WRITE_GOLDEN=1 pytest``, and look at the diff."""
    campaign = Campaign(tmp_path / "w", PROFILES[name])
    resources = SMALL if name == "plain" else GPU
    avoid = ("n9",) if name == "gres" else ()
    requests = [
        campaign.claim(seed, resources=resources, avoid=avoid, save_s=200.0)
        for seed in range(count)
    ]
    campaign.submit(*requests)
    text = (fake.folder / "101.sh").read_text()
    text = text.replace(str(campaign.workspace.root), "/w").replace(sys.executable, "python")
    text = re.sub(r"-[0-9a-f]{12}-0001-[0-9a-f]{12}", "-STAGE-0001-MARK", text)
    text = re.sub(r"(stages/data|refiner-array)-[0-9a-f]+", r"\1-MARK", text)
    golden = GOLDEN / f"sbatch-{name}{'-array' if count > 1 else ''}.sh"
    if os.environ.get("REFINER_WRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


# ---------------------------------------------------------------- submitting


def test_large_groups_are_split_into_arrays(fake: FakeSlurm, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "w", Profile(name="small", array_size=5, array_min=3))
    requests = campaign.submit(*(campaign.claim(seed) for seed in range(12)))
    ids = [campaign.job_id(r) for r in requests]
    assert ids[0::5] == ["101_0", "102_0", "103"]
    assert len(set(ids)) == 12
    assert len(fake.calls("sbatch")) == 4  # the last two are too few for an array


def test_an_array_warns_before_its_slowest_save(fake: FakeSlurm, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "w")
    hour = replace(SMALL, time_limit_min=60)
    campaign.submit(*(campaign.claim(s, resources=hour, save_s=100.0 * s) for s in range(4)))
    assert "--signal=TERM@630" in (fake.folder / "101.sh").read_text()


def test_outer_settings_are_dropped(fake: FakeSlurm, campaign: Campaign, monkeypatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SRUN_CPUS_PER_TASK", "SBATCH_JOB_NAME"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "lab")
    campaign.submit(campaign.claim())
    (call,) = fake.calls("sbatch")
    kept = {n for n in call["environment"] if n.startswith(("SLURM_", "SRUN_", "SBATCH_"))}
    assert kept == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert os.environ["SLURM_JOB_ID"] == "1"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Batch job submission failed: Invalid account or account/partition", ConfigurationError),
        ("Batch job submission failed: Invalid qos specification", ConfigurationError),
        ("Requested node configuration is not available", ConfigurationError),
        ("sbatch: unrecognized option '--gpus-per-nodes=1'", ConfigurationError),
        ("Unable to contact slurm controller (connect failure)", SlurmUnavailable),
        ('Munge encode failed: Failed to access "/run/munge.socket"', SlurmUnavailable),
        ("Job violates accounting/QOS policy (job submit limit, …)", LaunchError),
        ("Slurm temporarily unable to accept job, sleeping and retrying", LaunchError),
    ],
)
def test_errors_of_sbatch(fake: FakeSlurm, campaign: Campaign, said, kind) -> None:
    fake.fail("sbatch", f"sbatch: error: {said}")
    one, two = campaign.claim(1), campaign.claim(2, resources=GPU)
    errors = campaign.dispatcher.submit([one, two])
    assert set(errors) == {one.ref, two.ref}
    assert {type(e) for e in errors.values()} == {kind}
    assert said.split()[0].lower() in str(errors[one.ref]).lower()


def test_a_job_is_looked_for_after_a_timeout_of_sbatch(fake: FakeSlurm, campaign: Campaign) -> None:
    found, lost = campaign.claim(1), campaign.claim(2)
    fake.fail("sbatch", "Socket timed out on send/recv operation")
    assert campaign.dispatcher.submit([found]) == {}
    assert campaign.dispatcher.submit([lost]) == {}
    fake.set_jobs({"7": {"state": "RUNNING", "name": found.comment}})
    assert campaign.status(found).state == "RUNNING"
    assert campaign.job_id(found) == "7"
    end = campaign.wait_dead(lost, 10).end
    assert (end.failure, end.decision) == ("system_outage", "resume")


def test_a_refused_request_leaves_the_others(fake: FakeSlurm, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path / "w", Profile(name="short", max_time_min=30))
    good, long = campaign.claim(1), campaign.claim(2, resources=GPU)
    online = campaign.claim(3, needs_network=True)
    errors = campaign.dispatcher.submit([good, long, online])
    assert {r: type(e) for r, e in errors.items()} == {
        long.ref: ConfigurationError,
        online.ref: UnsupportedError,
    }
    assert campaign.job_id(good) == "101"


def test_workers_get_settings_of_the_profile(fake: FakeSlurm, tmp_path: Path) -> None:
    profile = Profile(name="x", env={"NCCL_DEBUG": "INFO"}, cpu=JobPlacement(partition="cpu"))
    campaign = Campaign(tmp_path / "w", profile)
    command = campaign.dispatcher.command(campaign.claim())
    assert command[0] == "env"
    assert {"NCCL_DEBUG=INFO", "HF_HUB_OFFLINE=1", "PYTHONSAFEPATH=1"} <= set(command)
    campaign = Campaign(tmp_path / "w", replace(profile, network=True))
    assert "HF_HUB_OFFLINE=1" not in campaign.dispatcher.command(campaign.claim(2))


# ---------------------------------------------------------------- looking and acting


def test_a_restarted_attempt_is_classified_by_its_log(fake: FakeSlurm, campaign: Campaign) -> None:
    (first,) = campaign.submit(campaign.claim())
    again = campaign.claim()
    assert (again.stage_id, again.attempt) == (first.stage_id, 2)
    job = campaign.workspace.layout.attempt(*first.ref)
    campaign.workspace.layout.attempt(*again.ref).job.write_text(job.job.read_text())
    (job.submitit / "101_0_log.err").write_text("error: Detected 1 oom_kill event in StepId=101.0")
    fake.set_jobs({"101": {"state": "FAILED", "exit_code": "1:0", "live": False}})
    assert campaign.status(again).end.failure == "out_of_memory"


def test_a_read_only_look_records_nothing(fake: FakeSlurm, campaign: Campaign) -> None:
    request = campaign.claim()
    fake.set_jobs({"7": {"state": "RUNNING", "name": request.comment}})
    campaign.dispatcher = campaign.another_dispatcher(adopt=False)
    assert campaign.status(request).state == "RUNNING"
    assert not campaign.workspace.layout.attempt(*request.ref).job.exists()


def test_odd_names_of_other_jobs_are_harmless(fake: FakeSlurm, campaign: Campaign) -> None:
    (request,) = campaign.submit(campaign.claim())
    mine = fake.jobs
    odd = {"state": "RUNNING", "name": "JobState=FAILED ExitCode=1:0 a|b"}
    fake.set_jobs({**mine, "200": odd, "201": {"state": "RUNNING", "name": "two\nlines"}})
    assert campaign.status(request).state == "PENDING"
    fake.set_jobs({"101": {**mine["101"], "state": "TIMEOUT", "live": False}, "200": odd})
    assert campaign.wait_dead(request).end.failure == "time_limit"


def test_a_copied_workspace_kills_no_job(fake: FakeSlurm, campaign: Campaign, tmp_path) -> None:
    """The job writes into the original: the copy says so, and begins anew."""
    (request,) = campaign.submit(campaign.claim())
    fake.set_jobs({"101": {**fake.jobs["101"], "state": "RUNNING"}})
    root = campaign.workspace.root
    shutil.copytree(root, tmp_path / "copy")
    copy = Campaign(tmp_path / "copy", poll_s=0.0)
    status = copy.status(request)
    assert status.liveness == "dead"
    assert str(root) in status.end.message
    assert status.end.decision == "resume"
    copy.dispatcher.kill(copy.open(request))
    assert not copy.dispatcher.stop(copy.open(request))
    assert fake.calls("scancel") == []
    assert campaign.status(request).liveness == "live"


@pytest.mark.parametrize("seen", ["by a link", "moved"])
def test_a_moved_workspace_is_no_copy(fake: FakeSlurm, campaign: Campaign, tmp_path, seen) -> None:
    (request,) = campaign.submit(campaign.claim())
    root = campaign.workspace.root
    if seen == "moved":
        root.rename(tmp_path / "there")
    else:
        (tmp_path / "there").symlink_to(root)
    assert Campaign(tmp_path / "there", poll_s=0.0).status(request).liveness == "live"


def test_failing_commands_are_an_outage(fake: FakeSlurm, campaign: Campaign, monkeypatch) -> None:
    """A file system that hiccups, and a login node on which no more processes may be started."""
    (request,) = campaign.submit(campaign.claim())
    (fake.bin / "squeue").rename(fake.bin / "away")
    monkeypatch.setenv("PATH", str(fake.bin))
    assert campaign.status(request).liveness in ("live", "unknown")
    (fake.bin / "away").rename(fake.bin / "squeue")
    for command in ("squeue", "scontrol", "scancel", "sacct"):
        fake.fail(command, "slurm_load_jobs error: Unable to contact slurm controller")
    assert campaign.status(request).liveness in ("live", "unknown")
    campaign.dispatcher.kill(campaign.open(request))
    campaign.dispatcher.release(campaign.open(request))
    assert not campaign.dispatcher.stop(campaign.open(request))

    def no_more(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", no_more)
    assert not campaign.dispatcher.stop(campaign.open(request))
    assert campaign.status(request).liveness in ("live", "unknown")
    assert not campaign.dispatcher.kill(campaign.open(request))


@pytest.mark.parametrize("known", ["live", "remembered", "recorded"])
def test_a_job_of_another_user_is_not_ours(fake: FakeSlurm, campaign: Campaign, known: str) -> None:
    """Names of jobs are for all to see, and to take."""
    request = campaign.claim()
    theirs = {"state": "COMPLETED", "name": request.comment, "user": "4711"}
    flags = {"live": False, "remembered": False, "recorded": False, known: True}
    forged = f"{request.comment} UserId=me({os.getuid()}) JobState=COMPLETED"
    fake.set_jobs({"66": {**theirs, **flags}, "67": {**theirs, **flags, "name": forged}})
    for _ in range(3):
        assert campaign.status(request).state != "COMPLETED"
    assert not campaign.workspace.layout.attempt(*request.ref).job.exists()


def test_queries_are_split_into_commands_of_a_safe_length(fake: FakeSlurm) -> None:
    fake.set_jobs({"7": {"state": "COMPLETED", "name": "n0"}})
    ids, names = [str(n) for n in range(501)], [f"n{n}" for n in range(501)]
    accounts = RealSlurm().accounts(ids, names)
    assert accounts[0]["name"] == "n0"
    asked: dict[str, list[list[str]]] = {"--jobs": [], "--name": []}
    for call in fake.calls("sacct"):
        for argument in call["arguments"]:
            option, _, text = argument.partition("=")
            asked.get(option, []).append(text.split(","))
    assert asked == {"--jobs": [ids[:500], ids[500:]], "--name": [names[:500], names[500:]]}


def test_a_command_that_hangs_is_given_up(fake: FakeSlurm) -> None:
    (fake.bin / "squeue").write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(SlurmUnavailable):
        RealSlurm(timeout_s=0.2).queue({"0"})


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"no `sbatch`.*executor=local"):
        RealSlurm()


def test_a_released_job_is_not_held_meanwhile(fake: FakeSlurm, campaign: Campaign) -> None:
    """Or every round until then would count as another failed start."""
    (request,) = campaign.submit(campaign.claim())
    held = {**fake.jobs["101"], "reason": "launch failed requeued held"}
    fake.set_jobs({"101": held})
    slow = campaign.another_dispatcher(poll_s=60.0)
    open_ = campaign.open(request)
    assert slow.observe([open_])[request.ref].held
    slow.release(open_)
    assert not slow.observe([open_])[request.ref].held
