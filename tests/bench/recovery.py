"""How long it takes from a failure to the first new step, beside a cold start of the same stage.

    python -m tests.bench.recovery

A small GRPO run on this machine. Cold start: from the submission of the first attempt to its first
logged step. Recovery: from `kill -9` of the worker to the first step that the next attempt logs by
itself. Goal: recovery is at most 1.2 cold starts and one poll. Also shown: the work that was lost,
which must be no more than what was done since the last checkpoint. Medians over several kills.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from infra.store.traces import read_metrics
from tests.support.command import SMALL, Stage, refiner, start, wait_until

SAVE_FREQ = 4
POLL_S = 0.5
TIMES = 3


def main() -> int:
    """Measure, print, and say whether the goal was met."""
    with tempfile.TemporaryDirectory(prefix="refiner-recovery-") as name:
        runs = [_one(Path(name) / str(n)) for n in range(TIMES)]
    cold = statistics.median(r[0] for r in runs)
    back = statistics.median(r[1] for r in runs)
    lost = [r[2] for r in runs]
    limit = 1.2 * cold + POLL_S
    print(f"cold start, submission to first step: {cold:.2f} s (median of {TIMES})")
    print(f"kill -9 to the first new step:        {back:.2f} s; goal {limit:.2f} s")
    print(f"steps lost: {lost}, saved every {SAVE_FREQ}")
    met = back <= limit and max(lost) <= SAVE_FREQ
    print("met" if met else "MISSED")
    return 0 if met else 1


def _one(folder: Path) -> tuple[float, float, int]:
    """Seconds of a cold start, seconds of a recovery, steps lost."""
    workspace = folder / "runs"
    arguments = (
        *(f"workspace={workspace}", *(o for o in SMALL if not o.startswith("grpo."))),
        *("grpo.num_unique_prompts_rollout=2", "grpo.num_samples_per_prompt_rollout=4"),
        *("grpo.num_training_steps=400", f"grpo.save_freq={SAVE_FREQ}"),
        *("stages=[data,grpo]", f"dispatch.poll_s={POLL_S}"),
    )
    process = start("run", "tiny", *arguments, "--no-server")
    grpo = Stage(workspace, "grpo")
    wait_until(lambda: _submitted(workspace), "the submission")
    began = time.monotonic()
    wait_until(lambda: grpo.steps(), "the first step")
    cold = time.monotonic() - began
    wait_until(lambda: len(grpo.steps()) > 2 * SAVE_FREQ, "a few steps")
    first = grpo.attempts[0]
    grpo.kill()
    killed = time.monotonic()
    reached = max(line.step for line in read_metrics(first / "metrics.jsonl"))
    wait_until(lambda: _new_step(grpo, first), "a new step")
    back = time.monotonic() - killed
    resumed = _resumed(grpo.attempts[-1])
    refiner("cancel", f"workspace={workspace}")
    process.wait(60)
    return cold, back, reached - resumed


def _submitted(workspace: Path) -> bool:
    return any(workspace.glob("stages/grpo-*/attempts/0001/job.json"))


def _new_step(grpo: Stage, first: Path) -> bool:
    """Whether the second attempt has logged a step of its own, not one that it took over."""
    second = grpo.attempts[-1]
    resumed = 0 if second == first else _resumed(second)
    return 0 < resumed < max(grpo.steps(), default=0)


def _resumed(attempt: Path) -> int:
    """The step of the checkpoint that an attempt went on from; 0 while it has said nothing."""
    started = attempt / "started.json"
    told = json.loads(started.read_text()) if started.exists() else {}
    return int((told.get("resumed") or {}).get("step", 0))


if __name__ == "__main__":
    sys.exit(main())
