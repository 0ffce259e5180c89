"""One GPU for training and evaluation: the same command, another device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.command import SMALL, refiner


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_the_small_recipe_runs_on_one_gpu_in_bfloat16(tmp_path: Path) -> None:
    done = refiner(
        *("run", "tiny", f"workspace={tmp_path}/runs", *SMALL, "--no-server", "--json"),
        *(f"{stage}.resources.gpus=1" for stage in ("sft", "grpo", "evaluate")),
        "model.dtype=bfloat16",
    )
    assert done.code == 0, done.stderr
    assert {s["state"] for s in done.json["stages"]} == {"done"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_with_the_field(tmp_path: Path) -> None:
    done = refiner(
        *("run", "tiny", f"workspace={tmp_path}/runs", *SMALL, "--no-server"),
        *("sft.resources.gpus=1", "stages=[data,sft]"),
    )
    assert done.code == 8, done.stderr
    assert "resources.gpus" in done.stderr
