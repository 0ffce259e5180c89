"""`refiner doctor`: findings about machine, packages, workspace, Slurm and services."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from flows.doctor import examine
from infra.doctor.check import CheckResult, DoctorCheck, SystemInfo, run_checks
from tests.support.command import ROOT, command, environment, finished, refiner
from tests.support.git_hub import EXPIRED, READ_ONLY, LoopbackHub
from tests.support.judge_server import JudgeServer, verdict
from tests.support.quota import fill, quota_folder, small_tmpfs
from tests.support.slurm_cluster import Cluster
from tests.support.wandb_server import KEY, WandbServer

VLLM = "grpo.generation_backend=vllm"


def named(findings: list[CheckResult], area: str, name: str) -> CheckResult:
    """The one finding of that name."""
    [found] = [f for f in findings if f.area == area and f.name == name]
    return found


def program(folder: Path, name: str, text: str) -> Path:
    """A command on a PATH of one's own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def first_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


# ---------------------------------------------------------------- the command


def test_without_a_recipe_nothing_is_broken_and_nothing_is_left(tmp_path: Path) -> None:
    done = refiner("doctor", "--offline", "--json", f"workspace={tmp_path / 'runs'}")
    assert done.code == 0, done.stdout
    found = done.json
    assert found["works"] is True
    assert {f["area"] for f in found["findings"]} >= {"python", "machine", "workspace", "vllm"}
    assert not [f for f in found["findings"] if f["state"] == "broken"]
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_that_is_not_there_is_refused_before_anything_is_recorded(tmp_path) -> None:
    asked = ("tiny", f"workspace={tmp_path / 'runs'}", VLLM, "grpo.rollout_server.python=/nope")
    ran = refiner("run", *asked, "--no-server")
    assert ran.code == 8
    assert "there is no program `/nope`" in ran.stderr
    assert "grpo.rollout_server.python" in ran.stderr
    assert not (tmp_path / "runs").exists()
    looked = refiner("doctor", *asked, "--offline", "--only", "vllm")
    assert looked.code == 8
    assert "BROKEN  grpo.rollout_server: there is no program `/nope`" in looked.stdout
    assert looked.stdout.splitlines()[-1].startswith("  python3 -m venv ")


# ---------------------------------------------------------------- the runner


def test_checks_that_hang_or_break_take_no_other_with_them() -> None:
    def hangs(look: SystemInfo) -> list[CheckResult]:
        time.sleep(30)
        return []

    def breaks(look: SystemInfo) -> list[CheckResult]:
        raise KeyError("a bug")

    stuck = [
        DoctorCheck(
            "gpu", f"stuck {n}", hangs, limit_s=0.3, needed=lambda _: True, hung="nvidia-smi"
        )
        for n in range(20)
    ]
    well = CheckResult("hub", "well", "ok", "12 ms")
    others = [DoctorCheck("hub", "b", breaks), DoctorCheck("hub", "w", lambda look: [well])]
    found = run_checks([*stuck, *others], SystemInfo())
    assert named(found, "gpu", "stuck 19") == CheckResult(
        "gpu", "stuck 19", "broken", "no answer in 0.3 s", "nvidia-smi"
    )
    assert "KeyError" in named(found, "hub", "b").what
    assert well in found


# ---------------------------------------------------------------- python, GPU, vLLM


def test_a_package_of_the_wrong_version_is_named_with_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "prefect-2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: prefect\nVersion: 2.1\n")
    env = environment()
    path = os.pathsep.join([str(tmp_path), str(ROOT), env["PYTHONPATH"]])
    doctor = command("doctor", "--only", "python", "--json")
    done = finished(doctor, env={**env, "PYTHONPATH": path})
    assert done.code == 8
    [found] = [f for f in done.json["findings"] if f["state"] == "broken"]
    assert found["what"].startswith("prefect is 2.1, and refiner requires prefect<3.9,>=3.8")
    assert found["mend"] == f"{sys.executable} -m pip install 'prefect<3.9,>=3.8'"


def test_gpus_are_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "'NVIDIA H200, 570.1, 143771'"
    program(tmp_path, "nvidia-smi", f"printf '%s\\n' {row} {row}")
    first_on_path(monkeypatch, tmp_path)
    monkeypatch.setattr("infra.doctor.machine.installed", lambda _: "2.13.0+cpu")
    found = examine(only=["gpu"])
    assert named(found, "gpu", "GPUs").what == "2 x NVIDIA H200, 140 GiB each, driver 570.1"
    torch = named(found, "gpu", "torch")
    assert (torch.state, torch.what) == ("warning", "torch 2.13.0+cpu is built without CUDA")
    wanted = examine("tiny", ["grpo.resources.gpus=4"], offline=True, only=["gpu"])
    assert named(wanted, "gpu", "GPUs").state == "broken"
    assert named(wanted, "gpu", "torch").state == "broken"


def test_the_environment_of_servers_is_checked_in_its_own_shell(tmp_path: Path) -> None:
    python = f"grpo.rollout_server.python={sys.executable}"
    lacking = named(examine("tiny", [VLLM, python], only=["vllm"]), "vllm", "grpo.rollout_server")
    assert lacking.state == "broken"
    assert "cannot use vllm: PackageNotFoundError" in lacking.what
    assert lacking.fix == f"{sys.executable} -m pip install --upgrade vllm"
    answer = json.dumps(
        {"python": "3.12", "engine": "0.33", "torch": "2.13", "cuda": None, "gpus": 0}
    )
    other = program(tmp_path / "env", "python", f"test \"$MODULE\" = loaded && echo '{answer}'")
    setting = [f"grpo.rollout_server.python={other}", VLLM]
    bare = named(examine("tiny", setting, only=["vllm"]), "vllm", "grpo.rollout_server")
    assert bare.state == "broken"
    loaded = [*setting, "grpo.rollout_server.setup=['export MODULE=loaded']"]
    ready = named(examine("tiny", loaded, only=["vllm"]), "vllm", "grpo.rollout_server")
    assert (ready.state, ready.what) == ("ok", "vllm 0.33, torch 2.13, CUDA none, sees 0 GPUs")


# ---------------------------------------------------------------- workspace


@pytest.mark.quota
def test_free_space_is_that_of_the_quota(tmp_path: Path) -> None:
    with quota_folder(tmp_path / "q", 64) as disk:
        found = examine("tiny", [f"workspace={disk.folder / 'runs'}"], only=["workspace"])
        space = named(found, "workspace", "space")
        assert "btrfs qgroup" in space.what
        assert space.fix == f"refiner disk --reclaim workspace={disk.folder / 'runs'}"
        assert named(found, "workspace", "file system").ok
        forecast = named(found, "workspace", "forecast")
        assert forecast.state == "warning"
        assert not (disk.folder / "runs").exists()


@pytest.mark.quota
def test_a_full_file_system_is_a_finding(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "full", mib=16) as folder:
        fill(folder / "filler")
        found = examine("tiny", [f"workspace={folder / 'runs'}"], only=["workspace"])
    assert named(found, "workspace", "space").state == "broken"
    full = named(found, "workspace", "file system")
    assert full.state == "broken"
    assert "accepts no files: No space left on device (ENOSPC)" in full.what
    assert full.fix.startswith("refiner disk --reclaim")
    assert sum("ENOSPC" in f.what for f in found) == 1, "one cause, one line"


# ---------------------------------------------------------------- Slurm


@pytest.mark.slurm
def test_a_cluster_and_its_partitions_are_examined(slurm: Cluster, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    profile.write_text("cpu_stages: slurm\npartition: high\n")
    asked = ["dispatch.executor=slurm", f"dispatch.profile={profile}", f"workspace={tmp_path}/runs"]
    found = examine("tiny", asked, offline=True, only=["slurm"])
    assert named(found, "slurm", "controller").what.startswith("cluster lab answers")
    assert named(found, "slurm", "accounting").state == "missing"
    [job] = [f for f in found if f.name.startswith("job of data")]
    assert job.ok
    assert "in partition high" in job.what
    assert not [f for f in found if f.state == "broken"]
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"]

    large = examine("tiny", [*asked, "sft.resources.cpus=64"], offline=True, only=["slurm"])
    job = named(large, "slurm", "job of sft")
    assert job.state == "broken"
    assert job.fix.startswith("sinfo ")
    profile.write_text("cpu_stages: slurm\npartition: gpu\n")
    wrong = examine("tiny", asked, offline=True, only=["slurm"])
    assert any("partition" in f.what for f in wrong if f.state == "broken")


# ---------------------------------------------------------------- Hub, W&B, judge, Prefect


def hub_findings(
    monkeypatch: pytest.MonkeyPatch, hub: LoopbackHub, token: str
) -> list[CheckResult]:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", token)
    asked = ["publish.target=hub", "publish.repo_id=me/model"]
    found = examine("tiny", asked, only=["hub"])
    assert token not in json.dumps([f.what + f.fix + f.why for f in found])
    return found


def test_the_rights_of_a_token_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        good = hub_findings(monkeypatch, hub, hub.token)
        assert named(good, "hub", "token").what == "HF_TOKEN: me"
        assert named(good, "hub", "publishing to me/model").ok
        reads = hub_findings(monkeypatch, hub, READ_ONLY)
        assert named(reads, "hub", "token").ok
        refused = named(reads, "hub", "publishing to me/model")
        assert (refused.state, refused.fix) == ("broken", "hf auth login")
        gone = hub_findings(monkeypatch, hub, EXPIRED)
        assert named(gone, "hub", "token").state == "broken"


def test_switches_that_forbid_the_network_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = ["publish.target=hub", "publish.repo_id=me/model"]
    found = named(examine("tiny", asked, only=["hub"]), "hub", "offline switches")
    assert (found.state, found.fix) == ("broken", "unset HF_HUB_OFFLINE")
    assert named(examine(None, [], only=["hub"]), "hub", "offline switches").state == "warning"


def test_the_key_and_server_of_wandb_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        asked = ["tracking.wandb=online"]
        good = named(examine("tiny", asked, only=["wandb"]), "wandb", "key")
        assert good.what.startswith(f"there is one for {server.url}, which answers")
        assert KEY not in repr(good)
    gone = named(examine("tiny", asked, only=["wandb"]), "wandb", "server")
    assert gone.state == "broken"
    assert gone.fix.endswith("tracking.wandb=offline")


def test_a_judge_answers_a_real_question() -> None:
    with JudgeServer(lambda body, _: verdict(body)) as server:
        asked = ["judge.kind=openai", "judge.model=m", f"judge.base_url={server.base_url}"]
        good = named(examine("tiny", asked, only=["judge"]), "judge", "judge")
        assert good.state == "ok", good
        assert "answered in" in good.what
    gone = named(examine("tiny", asked, only=["judge"]), "judge", "judge")
    assert gone.state == "broken"
    assert gone.fix.startswith("curl --max-time 10 http://127.0.0.1:")
    secret = [*asked[:2], "judge.base_url=http://me:secret@127.0.0.1:9/v1"]
    assert "secret" not in repr(examine("tiny", secret, only=["judge"]))


def test_an_unreachable_prefect_server_of_the_user_is_a_warning(monkeypatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:9/api")
    found = named(examine("tiny", only=["prefect"]), "prefect", "server")
    assert (found.state, found.fix) == ("warning", "unset PREFECT_API_URL")
    assert "secret" not in found.what
