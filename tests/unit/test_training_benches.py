"""Benchmarks of training compare equal work: as many tokens on both sides, as the script says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.bench import gpu
from tests.bench.training_work import SHAPES, Work, fixed_rollouts, make_inputs, run_ours
from tests.bench.trl_side import run_trl

pytestmark = pytest.mark.slow

WORK = Work("small", "least", (9, 5), ((3, 6, 1, 2), (4, 4, 2, 5)))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_both_sides_sample_and_train_on_the_scripted_lengths(tmp_path: Path, monkeypatch) -> None:
    least = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32,
             "intermediate_size": 32}  # fmt: skip
    monkeypatch.setitem(SHAPES, "least", least)
    rows = make_inputs(WORK, tmp_path)
    given = fixed_rollouts(WORK, rows)
    sides = [
        run_ours(WORK, tmp_path, tmp_path / "ours", 2),
        run_ours(WORK, tmp_path, tmp_path / "ours-given", 2, generator=given),
        run_trl(WORK, rows, tmp_path, tmp_path / "trl", 2, micro_batch=4),
        run_trl(WORK, rows, tmp_path, tmp_path / "trl-given", 2, micro_batch=8, fixed=given),
    ]
    for side in sides:
        assert side.response_tokens == [27, 27]
        assert len(side.cpu_s) == len(side.wall_s) == len(side.parts) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_gpu_bench_says_that_it_was_not_run(capsys) -> None:
    assert gpu.main([]) == 0
    assert "not run" in json.loads(capsys.readouterr().out)["skipped"]
