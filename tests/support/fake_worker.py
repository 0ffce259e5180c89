"""A worker that follows a script, for tests of campaigns: it sleeps, saves, fails, and logs.

``behaviour.json`` in the workspace maps stage names to what they do:

    steps, step_s, save_every, bytes, output_bytes
                    how much work, how long, how large
    save_s          seconds that a save takes at least
    fail            what goes wrong (a key of ERRORS, or `hang`), for the first `fails` attempts
    fail_at_step    in which step, every time (none: after step 1 + attempt number, so that each
                    attempt gets further)
    ignore_term     it takes no notice of requests to stop
    say             something to print at the start

Every beginning and end is a line in ``journal.txt``, so that tests see what ran, and when.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.attempt.attempt import AttemptRun
from infra.jobs.signals import AttemptClosed, attempt_to_run, job_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import (
    ConfigurationError,
    DataError,
    Interrupted,
    JudgeOutage,
    NoSpaceError,
    NotFiniteError,
    RefinerError,
)
from refiner_core.contract.types import Progress

ERRORS: dict[str, Exception] = {
    "bug": RuntimeError("told to fail"),
    "bad_configuration": ConfigurationError("told to fail"),
    "bad_data": DataError("told to fail"),
    "disk_full": NoSpaceError("told to find no room"),
    "judge_outage": JudgeOutage("told to lose the judge"),
    "gpu_error": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "oom": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host_oom": MemoryError("told to run out of memory"),
    "nan": NotFiniteError("told to find NaN"),
}


def journal(root: Path, *words: object) -> None:
    """One line, in one write. On a full disk it is lost: it is not what is tested."""
    line = json.dumps([time.monotonic(), os.getpid(), *map(str, words)]) + "\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(root / "journal.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def work(attempt: AttemptRun, told: Mapping[str, Any]) -> dict[str, object]:
    """Steps with metrics and checkpoints, going on from the newest checkpoint."""
    latest = attempt.io.latest_checkpoint()
    first = 1 if latest is None else latest.step + 1
    steps = int(told.get("steps", 2))
    for step in range(first, steps + 1):
        time.sleep(float(told.get("step_s", 0.02)))
        if step == told.get("fail_at_step"):
            fail(attempt, told)
        attempt.io.log_metrics(step, {"step_squared": step**2})
        attempt.io.save_rollouts(step, [{"text": f"step {step}"}])
        attempt.io.progress(Progress(step, steps, "steps"))
        save = step % int(told.get("save_every", 1)) == 0
        if save or stop_asked(attempt, told):
            save_checkpoint(attempt, step, told)
        if stop_asked(attempt, told):
            raise Interrupted("stopped on request")
        if "fail_at_step" not in told and step == 1 + attempt.number:
            fail(attempt, told)
    size = int(told.get("output_bytes", 100))
    (attempt.output_dir / "out.bin").write_bytes(b"y" * size)
    return {"steps": steps, "first": first, "inputs": sorted(attempt.inputs)}


def save_checkpoint(attempt: AttemptRun, step: int, told: Mapping[str, Any]) -> None:
    """Save, and wait for room where there is none, as training does."""
    for tries_left in reversed(range(3)):
        try:
            with attempt.io.new_checkpoint(step) as folder:
                (folder / "state.bin").write_bytes(b"x" * int(told.get("bytes", 10)))
                time.sleep(float(told.get("save_s", 0.0)))
            return
        except NoSpaceError as error:
            if not tries_left or not attempt.io.room_again(error):
                raise


def stop_asked(attempt: AttemptRun, told: Mapping[str, Any]) -> bool:
    """Whether to save and end now."""
    return attempt.io.should_stop() and not told.get("ignore_term")


def fail(attempt: AttemptRun, told: Mapping[str, Any]) -> None:
    """Fail as scripted."""
    if "fail" not in told or attempt.number > int(told.get("fails", 99)):
        return
    if told["fail"] == "hang":
        while not stop_asked(attempt, told):
            time.sleep(0.05)
        raise Interrupted("stopped on request")
    if told["fail"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ERRORS[str(told["fail"])]


def main() -> int:
    """Run one attempt; the exit code is that of the error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("stage")
    parser.add_argument("attempt", type=int)
    told = parser.parse_args()
    workspace = Workspace.read_only(told.workspace)
    job = job_of(workspace, told.stage, told.attempt)
    try:
        number = attempt_to_run(workspace, told.stage, told.attempt, job)
        attempt = AttemptRun(workspace, told.stage, number, job)
        behaviour = workspace.read_control(told.workspace / "behaviour.json") or {}
        with attempt:
            return live(attempt, behaviour.get(attempt.spec.name, {}))
    except AttemptClosed as closed:
        print(closed, file=sys.stderr)
        return 0


def live(attempt: AttemptRun, told: Mapping[str, Any]) -> int:
    """The attempt's whole life, with its place in the journal."""
    root, name = attempt.workspace.root, attempt.spec.name
    journal(root, "begin", name, attempt.number)
    if said := told.get("say"):
        print(said, flush=True)
    try:
        attempt.finish(work(attempt, told))
    except (RefinerError, OSError, RuntimeError, MemoryError) as error:
        outcome = attempt.fail(error)
        journal(root, "fail", name, attempt.number, outcome.failure)
        return outcome.exit_code
    journal(root, "end", name, attempt.number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
