"""The same recipe on real research questions: what does not fit is dropped, counted and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import Stage, refiner
from tests.support.real_rows import RL_ROWS, SFT_ROWS


@pytest.mark.slow
def test_real_rows_run_to_the_end_and_say_what_was_dropped(tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    done = refiner(
        *("run", "tiny", f"workspace={workspace}", "--no-server"),
        f"data.sft_path={SFT_ROWS}",
        f"data.rl_path={RL_ROWS}",
        *("data.max_prompt_token_length=8192", "sft.pack_length=10240", "sft.max_train_steps=1"),
        *("grpo.pack_length=8224", "grpo.max_token_length=8224", "grpo.response_length=32"),
        *("grpo.num_training_steps=1", "grpo.num_unique_prompts_rollout=2"),
        *("grpo.num_samples_per_prompt_rollout=2", "evaluate.models=[grpo]"),
        *("evaluate.max_prompts=2", "evaluate.num_samples=2", "tracking.wandb=disabled"),
        "publish.malformed=true",
    )
    assert done.code == 0, done.stderr
    report = json.loads((Stage(workspace, "data").attempts[-1] / "output/report.json").read_text())
    for which, read in (("rl", 6), ("sft", 4)):
        counts = report[which]
        assert counts["read"] == read
        assert counts["kept"] + sum(counts["dropped"].values()) == read
    assert report["rl"]["kept"] == 4
    assert set(report["rl"]["dropped"]) == {"prompt_too_long"}
    assert f"{report['rl']['kept']} of 6 prompts kept" in done.stdout
    assert "prompt_too_long" in done.stdout
