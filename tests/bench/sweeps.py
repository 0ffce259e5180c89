"""`python -m tests.bench sweeps`: how long it takes to plan thousands of trials.

Prints one JSON line per measurement: ``name``, ``ours`` (seconds of wall clock), ``cpu`` (seconds
of CPU), ``goal`` (seconds), ``peak_mib`` (what the process grew by at most), ``trials``. The last
line compares time and memory for ten times the trials: 10 is linear. Each is a process of its own,
after its imports and one small sweep (start-up is not counted), the best of three. Exits with 1
where a goal is missed.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.__main__ import in_a_process, peak_mib

#: Trials -> seconds that planning them may take.
GOALS = {1_000: 1.0, 10_000: 5.0}
#: What ten times the trials may take of time and memory.
LINEAR = 13.0
SEEDS, WEIGHTS = 5, (0.0, 0.1, 0.2, 0.5)


def main(arguments: list[str]) -> int:
    """Measure each; exits with 1 where one takes longer than its goal."""
    if arguments[:1] == ["one"]:
        print(json.dumps(measure(int(arguments[1]))), flush=True)
        return 0
    found = []
    for trials, goal in GOALS.items():
        lines = [in_a_process("sweeps", "one", str(trials)) for _ in range(3)]
        found.append(min(lines, key=lambda x: x["ours"]) | {"goal": goal})
        print(json.dumps(found[-1]), flush=True)
    small, large = found
    growth = {
        "name": "planning ten times the trials",
        "times_the_time": round(large["cpu"] / small["cpu"], 1),
        "times_the_memory": round(large["peak_mib"] / max(1.0, small["peak_mib"]), 1),
        "goal": LINEAR,
    }
    print(json.dumps(growth), flush=True)
    kept = all(line["ours"] <= line["goal"] for line in found)
    linear = max(growth["times_the_time"], growth["times_the_memory"]) <= LINEAR
    return 0 if kept and linear else 1


def measure(trials: int) -> dict[str, Any]:
    """One measurement, in this process."""
    from flows.sweeping.planning import make_sweep_plan

    with tempfile.TemporaryDirectory() as folder:
        place = f"workspace={folder}/none"
        make_sweep_plan(sweep_file(Path(folder), SEEDS * len(WEIGHTS)), [place])
        path = sweep_file(Path(folder), trials)
        before, wall, cpu = peak_mib(), time.perf_counter(), time.process_time()
        plan = make_sweep_plan(path, [place])
        taken, used = time.perf_counter() - wall, time.process_time() - cpu
        assert len(plan.trials) == trials
        return {
            "name": f"planning {trials:,} trials",
            "ours": round(taken, 2),
            "cpu": round(used, 2),
            "peak_mib": round(peak_mib() - before, 1),
            "trials": trials,
            "stages": len(plan.stages()),
        }


def sweep_file(folder: Path, trials: int) -> str:
    """A grid of so many trials over the tiny recipe."""
    levels = trials // (SEEDS * len(WEIGHTS))
    rates = [round(1e-5 * (i + 1), 8) for i in range(levels)]
    path = folder / f"grid-{trials}.yaml"
    factors = {"grpo.learning_rate": rates, "reward.paper_citation_weight": list(WEIGHTS)}
    question = {"metric": "oracle", "decoding": "sampled"}
    value = {"recipe": "tiny", "factors": factors, "seeds": SEEDS, "question": question}
    path.write_text(json.dumps(value))
    return str(path)
