"""What is launched for a training stage: how many, with which settings, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flows.ranks.training import engine_name, in_worker, resumed_on
from flows.stages.work import StageWork
from infra.jobs.protocol import JobRequest
from infra.ranks.launch import node_number
from infra.ranks.protocol import node_settings, rank_settings
from infra.slurm.profiles import Profile
from infra.slurm.submission import Submission, Submitter
from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.placement import Placement, placement_of
from tests.support.plans import small_plan


def recipe(**sft: object) -> RecipeConfig:
    config = RecipeConfig()
    return replace(config, sft=replace(config.sft, **sft))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sft", "here", "engine"),
    [
        ({}, True, "torch"),
        ({"deepspeed_stage": 0}, True, "torch"),
        ({"nproc_per_node": 2}, False, "torch"),
        ({"deepspeed_stage": 2}, False, "DeepSpeed ZeRO-2"),
        ({"resources": Resources(gpus=1)}, True, "torch"),
        ({"resources": Resources(gpus=2)}, False, "torch"),
        ({"resources": Resources(nodes=2)}, False, "torch"),
    ],
)
def test_one_process_without_deepspeed_is_the_worker(
    sft: dict[str, object], here: bool, engine: str
) -> None:
    config = recipe(**sft)
    assert in_worker(config, "sft") is here
    assert engine_name(config, "sft") == engine


def test_ranks_of_one_node_meet_on_loopback_and_a_users_network_is_kept() -> None:
    one = rank_settings(Placement(1, 2), {})
    assert (one["GLOO_SOCKET_IFNAME"], one["DS_ACCELERATOR"]) == ("lo", "cpu")
    assert rank_settings(Placement(1, 2, (0, 1)), {})["NCCL_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_settings(Placement(1, 2), {"GLOO_SOCKET_IFNAME": "ib0"})
    several = rank_settings(Placement(2, 2, (0, 1)), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & several.keys()
    assert "DS_ACCELERATOR" not in several
    assert several["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_another_node_makes_its_own_settings_of_the_same_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = recipe(resources=Resources(gpus=2, nodes=2))
    placement = placement_of(config, "sft")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    told = {"placement": {**vars(placement)}}
    settings = node_settings({"REFINER_RANKS_ORDER": json.dumps(told)})
    assert settings["CUDA_VISIBLE_DEVICES"] == "6,7"


@pytest.mark.parametrize(
    ("kind", "nodes", "tasks"),
    [
        ("sft", 1, ["--overlap", "--nodes=1", "--ntasks=1"]),
        ("grpo", 2, ["--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]),
        ("command", 2, ["--overlap", "--nodes=1", "--ntasks=1"]),
    ],
)
def test_only_training_stages_have_somebody_on_every_node(
    kind: str, nodes: int, tasks: list[str], tmp_path: Path
) -> None:
    request = JobRequest("x-1", 1, "mark", Resources(nodes=nodes, cpus=3), kind=kind)
    work = Submission("mark", tmp_path, (request,), (["true"],))
    arguments = Submitter(Profile(name="p"), "python").parameters(work)["srun_args"]
    assert arguments[: len(tasks)] == tasks
    assert arguments[-1] == "--cpus-per-task=3"
    assert ("--kill-on-bad-exit=1" in arguments) is (len(tasks) > 3)


def test_a_node_knows_its_number_from_slurm_alone() -> None:
    assert node_number({}) == 0
    assert node_number({"SLURM_NODEID": "3"}) == 0
    assert node_number({"SLURM_JOB_ID": "7", "SLURM_NODEID": "3"}) == 3


def test_a_report_says_what_earlier_parts_were_trained_on(tmp_path: Path) -> None:
    """Attempt 1 trained in two processes to step 4, attempt 2 died at once, attempt 3 goes on."""
    workspace = Workspace.open(tmp_path / "ws")
    plan = small_plan("data")
    stage = workspace.layout.stage(plan.by_name["data"].id)
    two, one = ({"ranks": n, "nodes": 1, "engine": "torch"} for n in (2, 1))
    for number, used in ((1, two), (2, one), (3, one)):
        paths = stage.attempt(number)
        paths.control.mkdir(parents=True)
        atomic.write_json(paths.control / "ranks.json", used)
    atomic.write_json(stage.attempt(3).started, {"resumed": {"step": 4, "from_attempt": 1}})
    work = StageWork(
        spec=None,  # type: ignore[arg-type]
        config=plan.config,
        inputs={},
        input_stages={},
        output_dir=tmp_path,
        io=None,  # type: ignore[arg-type]
        stage_id=plan.by_name["data"].id,
        workspace=workspace,
        attempt=3,
    )
    assert resumed_on(work, one) == [{**two, "attempt": 1, "up_to_step": 4}]
    assert resumed_on(work, two) == [], "all of it ran on the same"
