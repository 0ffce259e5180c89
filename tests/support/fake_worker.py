"""A worker that does as it is told, for tests of campaigns: sleeps, saves, fails, and says when.

``behaviour.json`` in the workspace maps stage names to {steps, step_s, save_every, fail, fails}.
Every beginning and end is a line in ``journal.txt``, so that tests see what ran, and when.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from infra.attempt import AttemptRun
from infra.workspace import Workspace
from refiner_core.contract.errors import (
    ConfigurationError,
    DataError,
    Interrupted,
    JudgeOutage,
    NoSpaceError,
    RefinerError,
)
from refiner_core.contract.types import Progress

ERRORS: dict[str, Exception] = {
    "bug": RuntimeError("told to fail"),
    "bad_configuration": ConfigurationError("told to fail"),
    "bad_data": DataError("told to fail"),
    "disk_full": NoSpaceError("told to find no room"),
    "judge_outage": JudgeOutage("told to lose the judge"),
}


def journal(root: Path, *words: object) -> None:
    """One line, in one write."""
    line = json.dumps([time.monotonic(), os.getpid(), *map(str, words)]) + "\n"
    descriptor = os.open(root / "journal.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def work(attempt: AttemptRun, told: dict[str, object]) -> dict[str, object]:
    """Steps with metrics and checkpoints, going on from the newest checkpoint."""
    latest = attempt.io.latest_checkpoint()
    first = 1 if latest is None else latest.step + 1
    steps = int(str(told.get("steps", 2)))
    for step in range(first, steps + 1):
        time.sleep(float(str(told.get("step_s", 0.02))))
        attempt.io.progress(Progress(step, steps, "steps"))
        attempt.io.log_metrics(step, {"step_squared": step**2})
        attempt.io.save_rollouts(step, [{"text": f"step {step}"}])
        save = step % int(str(told.get("save_every", 1))) == 0
        if save or attempt.io.should_stop():
            with attempt.io.new_checkpoint(step) as folder:
                (folder / "state.bin").write_bytes(b"x" * int(str(told.get("bytes", 10))))
        if attempt.io.should_stop():
            raise Interrupted("stopped on request")
        if told.get("fail") and step == 1 + attempt.number:
            number_of_failures = int(str(told.get("fails", 99)))
            if attempt.number <= number_of_failures:
                raise ERRORS[str(told["fail"])]
    size = int(str(told.get("output_bytes", 100)))
    (attempt.output_dir / "out.bin").write_bytes(b"y" * size)
    return {"steps": steps, "first": first, "inputs": sorted(attempt.inputs)}


def main() -> int:
    """Run one attempt; the exit code is that of the error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("stage")
    parser.add_argument("attempt", type=int)
    told = parser.parse_args()
    workspace = Workspace.read_only(told.workspace)
    behaviour = workspace.read_control(told.workspace / "behaviour.json") or {}
    with AttemptRun(workspace, told.stage, told.attempt) as attempt:
        name = attempt.spec.name
        journal(told.workspace, "begin", name, attempt.number)
        try:
            attempt.finish(work(attempt, behaviour.get(name, {})))
        except (RefinerError, OSError, RuntimeError) as error:
            outcome = attempt.fail(error)
            journal(told.workspace, "fail", name, attempt.number, outcome.failure)
            return outcome.exit_code
        journal(told.workspace, "end", name, attempt.number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
