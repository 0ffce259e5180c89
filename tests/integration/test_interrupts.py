"""A run that is killed and stopped again and again ends with the bytes of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.command import Finished, Stage, kill_orchestrator, refiner, start, wait_until


def test_a_killed_run_ends_bitwise_equal(tmp_path: Path, small: tuple[str, ...]) -> None:
    training = (
        *(o for o in small if not o.startswith(("grpo.num_training", "sft.max_train"))),
        *("sft.max_train_steps=8", "grpo.num_training_steps=12", "stages=[data,sft,grpo]"),
    )
    undisturbed, workspace = tmp_path / "undisturbed", tmp_path / "runs"

    def run(root: Path) -> Finished:
        done = refiner("run", "tiny", f"workspace={root}", *training, "--no-server", "--json")
        assert done.code == 0, done.stderr
        return done

    run(undisturbed)
    arguments = ("run", "tiny", f"workspace={workspace}", *training, "--no-server")
    sft, grpo = Stage(workspace, "sft"), Stage(workspace, "grpo")

    # kill -9 of orchestrator and worker in the middle of SFT
    process = start(*arguments)
    wait_until(lambda: len(sft.steps()) >= 3, "SFT's third step")
    kill_orchestrator(process)
    sft.kill()

    # kill -9 of the worker alone while a checkpoint is being written: this call goes on by itself
    process = start(*arguments)
    wait_until(lambda: len(grpo.steps()) >= 2 and grpo.is_saving, "a save of GRPO")
    grpo.kill()
    wait_until(lambda: len(grpo.attempts) == 2 and len(grpo.steps()) >= 4, "the second attempt")

    # kill -9 of both in the middle of generation
    wait_until(lambda: grpo.phase == "generate", "generation")
    kill_orchestrator(process)
    grpo.kill()

    # Ctrl-C: saved, exit code 6, and the way on is named
    process = start(*arguments)
    wait_until(lambda: len(grpo.attempts) == 3 and len(grpo.steps()) >= 7, "the third attempt")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 6, told
    assert "refiner run tiny" in told

    done = run(workspace)
    assert {s["state"] for s in done.json["stages"]} <= {"done", "skipped"}
    for stage in ("sft", "grpo"):
        ours, theirs = Stage(workspace, stage), Stage(undisturbed, stage)
        assert len(ours.attempts) > 1
        assert ours.trace() == theirs.trace(), "loss trace, with no doubled or missing step"
        assert ours.hashes() == theirs.hashes(), "weights"
    rollouts = sorted(p.name for p in grpo.attempts[-1].glob("rollouts/*"))
    assert rollouts == [f"step-{n:08d}.parquet" for n in range(1, 13)]
