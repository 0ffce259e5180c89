"""Profiles of Slurm clusters: shipped ones load, wrong ones are refused with the fix."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.slurm.profiles import JobPlacement, Profile, list_profiles, load_profile
from refiner_core.contract.config import Resources
from refiner_core.contract.errors import ConfigurationError, UnsupportedError
from tests.support.plans import small_plan


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_shipped_profile_loads_and_says_what_it_is_for() -> None:
    found = list_profiles()
    assert {"default", "gres", "container", "preemptible"} <= set(found)
    assert all(len(d) > 40 for d in found.values())


def test_a_file_is_a_profile_too(tmp_path: Path) -> None:
    text = "partition: gpu\naccount: 12345\nexclude: [n7, n8]\nmodules: [cuda/12.8]\n"
    text += "sbatch: {mail-type: FAIL, exclusive: true, mem: null}\ncpu: {partition: cpu}\n"
    profile = load_profile(write(tmp_path, text))
    assert (profile.name, profile.account, profile.exclude) == ("mine", "12345", ("n7", "n8"))
    assert profile.sbatch == {"mail-type": "FAIL", "exclusive": True, "mem": None}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("partitions: gpu", "Did you mean 'partition'"),
        ("gpu_option: gpu-per-node", "gpus-per-node"),
        ("max_time_min: long", "a valid integer"),
        ("sbatch: {job-name: x}", "job-name"),
        ("sbatch: {signal: USR1@60}", "signal_lead_s"),
        ("env: {HF_TOKEN: hf_x}", "secret"),
        ("setup: ['export WANDB_API_KEY=abc']", "secret"),
        ("- a list", "mapping"),
    ],
)
def test_wrong_profiles_are_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_profile(write(tmp_path, text))
    assert says in str(caught.value)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'default'"):
        load_profile("defualt")


def test_cpu_stages_go_where_the_profile_says() -> None:
    stage = small_plan("data").by_name["data"]
    gpu = replace(stage, resources=Resources(gpus=1))
    online = replace(stage, needs_network=True)
    here, there = Profile(), Profile(cpu_stages="slurm")
    assert (here.executor_for(stage), here.executor_for(gpu)) == ("local", "slurm")
    assert (there.executor_for(stage), there.executor_for(online)) == ("slurm", "local")
    assert replace(there, network=True).executor_for(online) == "slurm"


def test_cpu_jobs_have_their_own_partition() -> None:
    cpu = JobPlacement(partition="cpu", max_time_min=60, sbatch={"mem": None})
    profile = Profile(
        partition="gpu", account="a", max_time_min=600, sbatch={"mail-type": "FAIL"}, cpu=cpu
    )
    place = profile.place_for(Resources())
    assert (place.partition, place.account, place.max_time_min) == ("cpu", "a", 60)
    assert place.sbatch == {"mail-type": "FAIL", "mem": None}
    assert profile.place_for(Resources(gpus=1)).partition == "gpu"


def test_impossible_jobs_are_refused_before_submission() -> None:
    profile = Profile(name="x", max_time_min=60, max_gpus=4)
    profile.check(Resources(time_limit_min=60, gpus=4), "sft")
    with pytest.raises(ConfigurationError, match="time_limit_min=60"):
        profile.check(Resources(time_limit_min=61), "sft")
    with pytest.raises(ConfigurationError, match="gpus=4"):
        profile.check(Resources(gpus=8), "sft")
    with pytest.raises(UnsupportedError, match="internet"):
        profile.check(Resources(), "publish", needs_network=True)


@pytest.mark.parametrize(
    ("limit_min", "save_s", "lead_s"),
    [(60, 0, 120), (60, 10, 120), (600, 300, 630), (20, 3000, 600), (1, 0, 30)],
)
def test_the_warning_leaves_time_for_a_save(limit_min: int, save_s: float, lead_s: int) -> None:
    assert Profile().lead_s(Resources(time_limit_min=limit_min), save_s) == lead_s
