"""A worker for tests of services: servers are real, and the stages that ask them need no model.

    asking_worker.py --workspace W STAGE ATTEMPT

A stage that asks a judge asks as many questions, one by one, as ``behaviour.json`` in the workspace
says, and then goes on for as long as there is a file ``hold``; other stages only succeed. Its
result holds the scores.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from flows import worker
from flows.stages import work as stages
from flows.stages.judging import judge_for
from flows.stages.work import StageWork
from refiner_core.contract.errors import Interrupted
from refiner_core.contract.services import CONSUMERS
from refiner_core.contract.types import JudgeRequest, Progress


def ask(work: StageWork) -> dict[str, Any]:
    """Ask the real judge, as a training stage would."""
    root, scores = work.workspace.root, []
    count = json.loads((root / "behaviour.json").read_text())["questions"]
    with judge_for(work) as (judge, io):
        for number in range(count):
            question = JudgeRequest("rubric", f"question {number}", "an answer", "is an answer")
            scores += [j.score for j in judge.judge([question])]
            io.progress(Progress(number + 1, count, "asking"))
        while (root / "hold").exists():
            io.progress(Progress(count, count, "holding"))
            if io.should_stop():
                raise Interrupted("stopped while it held the judge")
            time.sleep(0.02)
    return {"scores": scores}


def main() -> int:
    """Run one attempt."""
    run_stage = stages.run_stage

    def run(work: StageWork) -> dict[str, Any]:
        if work.spec.kind == "serve":
            return run_stage(work)
        return ask(work) if work.spec.kind in CONSUMERS else {}

    stages.run_stage = run
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
