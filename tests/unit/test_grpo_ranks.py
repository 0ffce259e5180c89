"""GRPO in two processes that train together is the run of one, and no error of one of them leaves
the other waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from refiner_core.training.ranks import Ranks
from tests.support.grpo_ranks import Case, launch, train
from tests.support.stage_io import FolderStageIO
from tests.support.tiny_training import save_data, save_tiny_model

pytestmark = pytest.mark.slow

#: Several mini-batches and epochs: old log-probabilities are needed on other ranks than have them.
SEVERAL = {"num_mini_batches": 2, "num_epochs": 2, "clip_higher": 0.01, "num_training_steps": 3}
CASES: list[Case] = [
    {"name": "several", "grpo": SEVERAL},
    {"name": "older", "grpo": {"async_steps": 1}, "stop_at": 2, "again": True},
    {
        "name": "active",
        "grpo": {"active_sampling": True, "async_steps": 1, "loss_aggregation": "sequence"},
    },
    {"name": "watched", "grpo": {"async_steps": 1}, "every": 2, "stop_at": 2, "again": True},
    {"name": "packs", "grpo": {"loss_aggregation": "pack", "num_training_steps": 2}},
    {"name": "outage", "grpo": {"save_freq": 100}, "fault": "judge", "again": True},
    {
        "name": "zero3",
        "grpo": SEVERAL | {"deepspeed_stage": 3, "async_steps": 1},
        "stop_at": 1,
        "again": True,
    },
    {"name": "older-data", "grpo": {"async_steps": 1}, "fault": "rewards"},
    {"name": "sampler", "grpo": {"async_steps": 1}, "fault": "sampler"},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What two ranks have made of all cases."""
    root = tmp_path_factory.mktemp("ranks")
    save_data(root / "data")
    save_tiny_model(root / "model")
    launch(root, CASES, ranks=2, timeout_s=300)
    return root


def met(root: Path, name: str) -> list[dict[str, Any]]:
    """By rank."""
    return [json.loads((root / name / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "name", ["several", "older", "active", "watched", "packs", "outage", "zero3"]
)
def test_two_ranks_train_as_one_does(root, tmp_path, name):
    case = next(case for case in CASES if case["name"] == name)
    for folder in ("data", "model"):
        (tmp_path / folder).symlink_to(root / folder)
    plain = {key: value for key, value in case["grpo"].items() if key != "deepspeed_stage"}
    alone = train(tmp_path, {"name": name, "grpo": plain, "every": case.get("every")}, Ranks())
    first, second = (one["report"] for one in met(root, name))
    assert first["counts"] == second["counts"] == alone["counts"]
    assert first.get("monitor") == second.get("monitor") == alone.get("monitor")
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    together, single = FolderStageIO(root / name), FolderStageIO(tmp_path / name)
    for theirs, mine in zip(
        together.comparable_metrics(), single.comparable_metrics(), strict=True
    ):
        del theirs["packed_ratio"], mine["packed_ratio"]  # two ranks need two packs at least
        assert theirs == pytest.approx(mine, rel=2e-4, abs=2e-5)
    for step, rows in single.rollouts().items():
        sampled = [row["response_ids"] for row in together.rollouts()[step]]
        assert sampled == [row["response_ids"] for row in rows]
    weights = [load_file(p / name / "out/model/model.safetensors") for p in (root, tmp_path)]
    for key, value in weights[0].items():
        assert (value - weights[1][key]).abs().max() < 5e-3, key


def test_a_lost_judge_ends_all_ranks_and_keeps_steps(root):
    errors = [one["error"] for one in met(root, "outage")]
    assert all(error.startswith("JudgeOutage: nobody is there") for error in errors)
    assert FolderStageIO(root / "outage").checkpoint_steps()[0] == 1


def test_a_stop_ends_all_ranks(root):
    errors = [one["error"] for one in met(root, "older")]
    assert all(error.startswith("Interrupted: grpo stopped on request") for error in errors)
    assert 2 in FolderStageIO(root / "older").checkpoint_steps()


def test_an_error_of_the_first_rank_ends_all(root):
    errors = [one["error"] for one in met(root, "older-data")]
    assert all(error.startswith("DataError: a row's rubrics do not fit") for error in errors)


def test_an_error_of_the_last_rank_ends_all(root):
    errors = [one["error"] for one in met(root, "sampler")]
    assert all(error.startswith("RuntimeError: this rank's node is ill") for error in errors)
