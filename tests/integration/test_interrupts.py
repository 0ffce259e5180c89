"""A run that is killed, moved, stopped and given other execution settings ends with the bytes of an
undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk
from tests.support.command import (
    LONGER,
    Finished,
    Stage,
    kill_orchestrator,
    refiner,
    start,
    wait_until,
)

#: Every execution field that the local executor can take another value of.
OTHERS = (
    *("sft.save_freq=1", "sft.eval_freq=1", "grpo.save_freq=1", "grpo.keep=1"),
    *("model.gradient_checkpointing=true", "log_level=debug", "judge.concurrency=3"),
    *("tracking.wandb=offline", "tracking.project=another", "grpo.resources.memory_gb=8"),
    *("dispatch.max_parallel=1", "dispatch.poll_s=0.1"),
)


def test_a_killed_run_ends_bitwise_equal(
    small_run: tuple[Path, Finished], tmp_path: Path, small: tuple[str, ...]
) -> None:
    marks = {path: info.mark for path, info in walk(RecipeConfig)}
    assert all(marks[setting.split("=")[0]] == "execution" for setting in OTHERS)
    words = (*small, *LONGER, *OTHERS, "stages=[data,sft,grpo]", "--no-server")
    undisturbed, before, workspace = small_run[0], tmp_path / "before", tmp_path / "runs"

    # kill -9 of orchestrator and worker in the middle of SFT; then the folder is moved
    process = start("run", "tiny", f"workspace={before}", *words)
    sft = Stage(before, "sft")
    wait_until(lambda: len(sft.steps()) >= 3, "SFT's third step")
    kill_orchestrator(process)
    sft.kill()
    before.rename(workspace)

    # kill -9 of the worker alone while a checkpoint is being written: this call goes on by itself
    process = start("resume", f"workspace={workspace}", "--no-server")
    sft, grpo = Stage(workspace, "sft"), Stage(workspace, "grpo")
    wait_until(lambda: len(grpo.steps()) >= 2 and grpo.is_saving, "a save of GRPO")
    grpo.kill()

    # Ctrl-C: saved, exit code 6, and the way on is named
    wait_until(lambda: len(grpo.attempts) == 2 and len(grpo.steps()) >= 4, "the second attempt")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 6, told
    assert "refiner resume" in told

    done = refiner("run", "tiny", f"workspace={workspace}", *words, "--json")
    assert done.code == 0, done.stderr
    assert {s["state"] for s in done.json["stages"]} <= {"done", "skipped"}
    for stage in ("data", "sft", "grpo"):
        ours, theirs = Stage(workspace, stage), Stage(undisturbed, stage)
        assert ours.hashes() == theirs.hashes(), "rows and weights"
        if stage != "data":
            assert len(ours.attempts) > 1
    assert grpo.trace() == Stage(undisturbed, "grpo").trace(), "no doubled or missing step"
    assert sft.steps() == list(range(1, 9))
    rollouts = sorted(p.name for p in grpo.attempts[-1].glob("rollouts/*"))
    assert rollouts == [f"step-{n:08d}.parquet" for n in range(1, 13)]
