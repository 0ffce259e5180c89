"""Benchmarks of training compare equal work: as many tokens on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.training_work import SHAPES, Work, fixed_rollouts, make_inputs, run_ours
from tests.bench.trl_side import run_trl

pytestmark = pytest.mark.slow

WORK = Work("small", "least", (9, 5), ((3, 6, 1, 2), (4, 4, 2, 5)))


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
