"""`python -m tests.bench report`: how long a report of a large sweep takes, from records to files.

A workspace with 1,000 trials (200 arms x 5 seeds) of 500 prompts is written first: greedy and two
samples, the random copier, training metrics, judgements by rubric. Then, in a process of its own,
imports included: records and samples are gathered, arms compared, all files written.

Prints one JSON line: ``name``, ``seconds`` by phase, ``ours`` (all together), ``cpu``, ``goal``,
``peak_mib``, ``trials``, ``prompts``. Exits with 1 where the goal is missed.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.__main__ import in_a_process
from tests.support.recorded_sweep import RecordedSweep

GOAL_S = 20.0
ARMS, SEEDS, PROMPTS = 200, 5, 500


def main(arguments: list[str]) -> int:
    """Write the workspace, make the report."""
    if arguments[:1] == ["one"]:
        print(json.dumps(measure(Path(arguments[1]), arguments[2])), flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="refiner-bench-") as folder:
        made = RecordedSweep(
            Path(folder) / "runs",
            [f"arm{i:03d}" for i in range(ARMS)],
            range(1, SEEDS + 1),
            PROMPTS,
            effects={"arm001": 0.05},
        )
        made.write()
        found: dict[str, Any] = in_a_process("report", "one", str(made.root), made.name)
    line = {"name": "report of a sweep", **found, "goal": GOAL_S, "trials": ARMS * SEEDS}
    print(json.dumps({**line, "prompts": PROMPTS}), flush=True)
    return 0 if found["ours"] <= GOAL_S else 1


def measure(root: Path, sweep: str) -> dict[str, Any]:
    """Seconds of each phase, in this process."""
    begun = time.perf_counter()
    marks = {}

    def mark(name: str) -> None:
        marks[name] = time.perf_counter() - begun - sum(marks.values())

    from flows.reporting.gather import gather
    from flows.reporting.writing import files_of, write_files
    from infra.store.workspace import Workspace
    from refiner_core.report.sweep.comparing import make_report

    mark("imports")
    evidence = gather(Workspace.read_only(root), sweep)
    mark("gather")
    report = make_report(evidence)
    mark("compare")
    write_files(root / "report", files_of(report))
    mark("write")
    used = resource.getrusage(resource.RUSAGE_SELF)
    (arm,) = [n for c in report.comparisons if c.primary for n in c.numbers if n.arm == "arm001"]
    assert arm.verdict == "better", arm
    return {
        "ours": round(sum(marks.values()), 2),
        "seconds": {name: round(value, 2) for name, value in marks.items()},
        "cpu": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": used.ru_maxrss // 1024,
    }
