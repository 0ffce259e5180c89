"""A worker whose stage stands still after some steps: ``stalling_worker.py WORKSPACE``."""

from __future__ import annotations

import sys
import time

from infra.attempt.attempt import AttemptRun
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.types import Progress
from tests.support.plans import OWNER, small_plan


def stuck_reader() -> None:
    """Never return."""
    time.sleep(10_000)


def main() -> None:
    """Claim an attempt, work on it, and stop working."""
    workspace = Workspace.open(sys.argv[1])
    plan = small_plan("data", "sft", hung_floor_s=1.0)
    stage = plan.by_name["sft"]
    workspace.claim_attempt(stage, plan.config, {}, StageClaim(OWNER, "local", 0))
    with AttemptRun(workspace, stage.id, 1) as attempt:
        for step in range(6):
            for phase in ("train", "validate"):
                attempt.io.progress(Progress(step, 10, phase))
                time.sleep(0.02)
        attempt.io.progress(Progress(6, 10, "train"))
        stuck_reader()


if __name__ == "__main__":
    main()
