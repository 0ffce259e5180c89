"""`python -m tests.bench startup [ROUNDS]`: what a Prefect server costs at the start of a run.

Prints one JSON line per measurement: ``name``, ``ours`` (seconds, a median), ``rival`` (of the same
command with ``--no-server``, in turns), ``ratio``, ``goal``, ``rounds``. Commands are processes of
their own on an empty workspace; a first call is not counted. Exits with 1 where a goal is missed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from infra.prefect_server import stop_server
from tests.support.command import SMALL, command, environment, finished, wait_until

ROUNDS = 5
#: A ratio to the rival, and seconds.
WORK_BEGINS, NOTHING_TO_DO = 1.1, 1.5


def main(arguments: list[str]) -> int:
    """Measure each; exits with 1 where a goal is missed."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    with tempfile.TemporaryDirectory(prefix="refiner-bench-") as name:
        os.environ["REFINER_STATE_DIR"] = f"{name}/state"
        os.environ.pop("PREFECT_API_URL", None)
        try:
            found = measured(Path(name) / "runs", rounds)
        finally:
            stop_server()
    for what, (ours, rival) in found.items():
        line = {"name": what, "ours": round(ours, 3), "rival": round(rival, 3), "rounds": rounds}
        goal = {"first work": WORK_BEGINS, "nothing to do": NOTHING_TO_DO}[what]
        print(json.dumps({**line, "ratio": round(ours / rival, 3), "goal": goal}), flush=True)
    (begins, rival), (nothing, _) = found.values()
    return 0 if begins / rival <= WORK_BEGINS and nothing <= NOTHING_TO_DO else 1


def measured(workspace: Path, rounds: int) -> dict[str, list[float]]:
    """Medians with a server and without: until the first attempt begins, and of a second call."""
    _run(workspace, server=True)
    times = [[_run(workspace, server=server) for server in (True, False)] for _ in range(rounds)]
    return {
        what: [statistics.median(pair[side][number] for pair in times) for side in (0, 1)]
        for number, what in enumerate(("first work", "nothing to do"))
    }


def _run(workspace: Path, *, server: bool) -> tuple[float, float]:
    """Seconds until the first attempt begins, and of a second call that has nothing to do."""
    words = ["run", "tiny", f"workspace={workspace}", "stages=[data]", *SMALL, "--quiet"]
    words += [] if server else ["--no-server"]
    began = time.perf_counter()
    with subprocess.Popen(command(*words), env=environment(), stdout=subprocess.DEVNULL) as process:
        jobs = "stages/data-*/attempts/0001/job.json"
        wait_until(lambda: list(workspace.glob(jobs)), "the first attempt", 300)
        begins = time.perf_counter() - began
    assert process.returncode == 0, f"refiner {' '.join(words)} ended with {process.returncode}"
    began = time.perf_counter()
    assert finished(command(*words), env=environment()).code == 0
    nothing = time.perf_counter() - began
    assert len(list(workspace.glob("stages/data-*/attempts/*"))) == 1, "it ran once"
    shutil.rmtree(workspace)
    return begins, nothing


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
