"""`python -m tests.bench startup [ROUNDS]`: what a Prefect server costs, and when it shows.

Prints one JSON line per measurement: ``name``, ``ours`` (seconds, or a share of a core; a median),
``rival`` (of the same command with ``--no-server``, in turns), ``ratio``, ``goal``, ``rounds``.
Commands are processes of their own on an empty workspace; a first call of each kind is not
counted. Exits with 1 where a goal is missed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.prefect_server import server_status, stop_server
from infra.store.workspace import Workspace
from tests.support.command import SMALL, command, environment
from tests.support.prefect_server import PrefectApi

ROUNDS, COLD_ROUNDS = 5, 2
#: A ratio, and seconds.
WORK_BEGINS, SHOWN_COLD, SHOWN_WARM, NOTHING_TO_DO = 1.1, 25.0, 5.0, 1.5
_LONGEST_S = 300.0
_POLL_S = 0.005


def main(arguments: list[str]) -> int:
    """Measure each; exits with 1 where a goal is missed."""
    rounds = int(arguments[0]) if arguments else ROUNDS
    with tempfile.TemporaryDirectory(prefix="refiner-bench-") as name:
        folder = Path(name)
        os.environ["REFINER_STATE_DIR"] = str(folder / "state")
        os.environ.pop("PREFECT_API_URL", None)
        try:
            lines = commands(folder, rounds)
        finally:
            stop_server()
    return 0 if all(line.get("ratio", line["ours"]) <= line["goal"] for line in lines) else 1


def commands(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A run of one stage with a server and without, and once more with nothing to do."""
    cold = [_run(folder / f"cold{i}", server=True, cold=True)["shown"] for i in range(COLD_ROUNDS)]
    _run(folder / "uncounted", server=False)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for i in range(rounds):
        for server in (True, False):
            found[server].append(_run(folder / f"{server}{i}", server=server))

    def both(what: str) -> tuple[float, float]:
        ours, rival = ([one[what] for one in found[server]] for server in (True, False))
        return statistics.median(ours), statistics.median(rival)

    shown = statistics.median(one["shown"] for one in found[True])
    return [
        _line("first work", *both("begins"), WORK_BEGINS, rounds, of_the_ratio=True),
        _line("shown by a new server", statistics.median(cold), None, SHOWN_COLD, len(cold)),
        _line("shown by a server that runs", shown, None, SHOWN_WARM, rounds),
        _line("nothing to do", *both("nothing"), NOTHING_TO_DO, rounds),
    ]


def _run(workspace: Path, *, server: bool, cold: bool = False) -> dict[str, float]:
    """Seconds until the first attempt begins, until the server shows the flow run, and of a second
    call that has nothing to do."""
    if cold:
        stop_server()
    words = ["run", "tiny", f"workspace={workspace}", "stages=[data]", *SMALL, "--quiet"]
    words += [] if server else ["--no-server"]
    told: dict[str, float] = {}
    began = time.perf_counter()
    with subprocess.Popen(command(*words), env=environment(), stdout=subprocess.DEVNULL) as process:
        told["begins"] = _until(lambda: _has_begun(workspace), began)
        if server:
            told["shown"] = _until(lambda: _is_shown(workspace), began)
    assert process.returncode == 0, f"refiner {' '.join(words)} ended with {process.returncode}"
    began = time.perf_counter()
    subprocess.run(command(*words), env=environment(), stdout=subprocess.DEVNULL, check=True)
    told["nothing"] = time.perf_counter() - began
    assert len(list(workspace.glob("stages/data-*/attempts/*"))) == 1, "it ran once"
    shutil.rmtree(workspace)
    return told


def _has_begun(workspace: Path) -> bool:
    return bool(list(workspace.glob("stages/data-*/attempts/0001/job.json")))


def _is_shown(workspace: Path) -> bool:
    info = server_status().info
    runs = Workspace.read_only(workspace).run_ids()
    if info is None or not runs:
        return False
    try:
        return PrefectApi(info).flow_run(f"run:{runs[0]}") is not None
    except OSError:  # it does not answer yet
        return False


def _until(look: Callable[[], bool], began: float) -> float:
    while not look():
        if time.perf_counter() - began > _LONGEST_S:
            raise TimeoutError(f"not within {_LONGEST_S:.0f} s")
        time.sleep(_POLL_S)
    return time.perf_counter() - began


def _line(
    name: str,
    ours: float,
    rival: float | None,
    goal: float,
    rounds: int,
    *,
    of_the_ratio: bool = False,
) -> dict[str, Any]:
    line: dict[str, Any] = {"name": name, "ours": round(ours, 4), "goal": goal, "rounds": rounds}
    if rival is not None:
        line |= {"rival": round(rival, 3), "times": round(ours / rival, 3)}
    if of_the_ratio and rival is not None:
        line["ratio"] = line["times"]
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
