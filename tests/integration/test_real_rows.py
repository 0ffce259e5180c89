"""The data stage on real research questions: what does not fit is dropped, counted, reported."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import Stage, refiner
from tests.support.real_rows import RL_ROWS, SFT_ROWS


def test_real_rows_that_do_not_fit_are_dropped_and_counted(tmp_path: Path) -> None:
    workspace = tmp_path / "runs"
    done = refiner(
        *("run", "tiny", f"workspace={workspace}", "--no-server", "stages=[data]"),
        *(f"data.sft_path={SFT_ROWS}", f"data.rl_path={RL_ROWS}"),
        *("data.max_prompt_token_length=8192", "sft.pack_length=10240"),
        *("grpo.pack_length=8224", "grpo.max_token_length=8224", "grpo.response_length=32"),
    )
    assert done.code == 0, done.stderr
    report = json.loads((Stage(workspace, "data").attempts[-1] / "output/report.json").read_text())
    for which, read in (("rl", 6), ("sft", 4)):
        counts = report[which]
        assert counts["read"] == read
        assert counts["kept"] + sum(counts["dropped"].values()) == read
    assert report["rl"]["kept"] == 4
    assert set(report["rl"]["dropped"]) == {"prompt_too_long"}
    assert "4 of 6 prompts kept" in done.stdout
    assert "prompt_too_long" in done.stdout
