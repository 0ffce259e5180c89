"""`python -m tests.bench rounds`: what a sweep of 1,000 trials at work costs its orchestrator.

Prints one JSON line: ``name``, ``ours`` (seconds of CPU of one round over all trials, the median),
``every_s`` (seconds until the next round is due), ``share`` (of a core), ``goal`` (of ``share``),
``peak_mib`` (what the process grew by), ``trials``. All trials are live, each with a job of its own
that does nothing; records and heartbeats are real. Exits with 1 where the goal is missed.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infra.store.workspace import Workspace
from sweeps.values import Limits
from tests.support.sweeping import Jobs, bench, small_sweep

TRIALS, ROUNDS, GOAL = 1_000, 9, 0.05


def main(arguments: list[str]) -> int:
    """Measure rounds; 1 where they take too much."""
    with tempfile.TemporaryDirectory() as folder:
        plan = small_sweep(
            *("data", "grpo"),
            betas=[n / 1000 for n in range(1, TRIALS + 1)],
            seeds=(1,),
            limits=Limits(concurrency=TRIALS),
        )
        workspace = Workspace.open(Path(folder) / "w")
        jobs = Jobs(workspace, plan, {"grpo": ("wait",) * 10_000}, executor="slurm")
        before = _peak_mib()
        told = bench(workspace, plan, jobs=jobs, past_canary=True)
        told.admission.canary = None
        told.orchestrator.begin()
        while len(jobs.begun) < TRIALS + 1:
            told.orchestrator.step()
        costs = [_cost(told.orchestrator.step) for _ in range(ROUNDS)]
        ours, every_s = statistics.median(costs), told.orchestrator.wake_after()
    line = {
        "name": "a round over 1,000 live trials",
        "ours": round(ours, 3),
        "every_s": round(every_s, 1),
        "share": round(ours / max(every_s, ours), 3),
        "goal": GOAL,
        "peak_mib": round(_peak_mib() - before),
        "trials": TRIALS,
    }
    print(json.dumps(line), flush=True)
    return 0 if line["share"] <= GOAL else 1


def _cost(step: Callable[[], object]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
