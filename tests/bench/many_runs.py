"""`python -m tests.bench many_runs [RUNS]`: a workspace of ten thousand runs, listed and filtered.

Prints one JSON line per measurement: ``name``, ``ours`` (seconds), ``goal``, ``runs``, ``peak_mb``.
Each is a `refiner` process of its own. Exits with 1 where a goal is missed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infra.store.workspace import Workspace
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.records import to_json
from tests.support.command import command, environment
from tests.support.plans import OWNER

RUNS = 10_000
COLD_S, WARM_S, FILTER_S, PEAK_MB = 30.0, 1.0, 0.3, 500.0


def main(arguments: list[str]) -> int:
    """Make the workspace, and measure; exits with 1 where a goal is missed."""
    count = int(arguments[0]) if arguments else RUNS
    with tempfile.TemporaryDirectory(prefix="refiner-bench-") as name:
        folder = Path(name)
        os.environ["REFINER_STATE_DIR"] = str(folder / "state")
        write_runs(folder / "runs", count)
        cold = _listed(folder / "runs")
        warm = min(_listed(folder / "runs") for _ in range(5))
        wanted = ["--where", "grpo.beta < 0.005 and reward > 0.5 and state == 'done'"]
        chosen = min(_listed(folder / "runs", *wanted) for _ in range(5))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    lines: list[dict[str, Any]] = [
        {"name": "runs, cold", "ours": cold, "goal": COLD_S},
        {"name": "runs, warm", "ours": warm, "goal": WARM_S},
        {"name": "a filter, on top", "ours": max(0.0, chosen - warm), "goal": FILTER_S},
        {"name": "peak memory, MB", "ours": peak, "goal": PEAK_MB},
    ]
    for line in lines:
        print(json.dumps({**line, "ours": round(line["ours"], 3), "runs": count}))
    return 0 if all(line["ours"] <= line["goal"] for line in lines) else 1


def _listed(workspace: Path, *options: str) -> float:
    began = time.monotonic()
    subprocess.run(
        command("runs", f"workspace={workspace}", *options),
        env=environment(),
        check=True,
        capture_output=True,
    )
    return time.monotonic() - began


def write_runs(root: Path, count: int) -> None:
    """Records of runs with a training and an evaluation each, over one data stage."""
    workspace, dice = Workspace.open(root), random.Random(0)
    config = to_json(load_recipe("tiny", [f"workspace={root}"]))
    _stage(workspace, "data-0000", "data", {})
    for number in range(count):
        beta = round(dice.uniform(0.0, 0.01), 6)
        config["grpo"]["beta"] = beta
        grpo, evaluation = f"grpo-{number:012x}", f"evaluate-{number:012x}"
        _stage(workspace, grpo, "grpo", {"counts": {}})
        numbers = [_number(name, dice.random()) for name in ("reward", "oracle", "citation_f1")]
        _stage(workspace, evaluation, "evaluate", {"evaluations": numbers})
        at = f"2026-{1 + number % 12:02d}-{1 + number % 28:02d}T00:00:00.000+00:00"
        run = f"2026{1 + number % 12:02d}{1 + number % 28:02d}-000000-tiny-{number:06x}"
        value = {
            **{"version": 1, "run": run, "recipe": "tiny", "overrides": [f"grpo.beta={beta}"]},
            **{"command": ["refiner", "run", "tiny"], "config": config, "code": ""},
            "stages": {"data": "data-0000", "grpo": grpo, "evaluate-grpo": evaluation},
            "started_at": at,
        }
        _write(workspace.layout.run(run).record, value)


def _number(metric: str, value: float) -> dict[str, Any]:
    return {
        **{"stage": "grpo", "metric": metric, "decoding": "greedy", "protocol": "p", "n": 100},
        **{"value": value, "low": value - 0.05, "high": value + 0.05},
    }


def _stage(workspace: Workspace, stage_id: str, kind: str, report: dict[str, Any]) -> None:
    paths = workspace.layout.stage(stage_id)
    spec = {"version": 1, "name": kind, "kind": kind, "fingerprint": stage_id.rpartition("-")[2]}
    spec |= {"identity": {}, "input_fingerprints": {}, "sources": {}, "model": ""}
    _write(paths.spec, {**spec, "stage_version": 1})
    at = "2026-12-31T00:00:00.000+00:00"
    claim = {
        "number": 1,
        "claim": "c",
        "comment": "",
        "claimed_at": at,
        "executor": "local",
        "owner": OWNER,
    }
    _write(paths.attempt(1).control / "intent.json", {**claim, "config": {}, "inputs": {}})
    outcome = {"failure": "none", "decision": "finish", "exit_code": 0, "message": ""}
    ended = {"ended_at": at, "seconds": 60.0, "outcome": outcome}
    _write(paths.attempt(1).control / "outcome.json", ended)
    result = {
        **{"version": 1, "attempt": 1, "output_dir": "attempts/0001/output", "files": []},
        **{"report": report, "seconds": 60.0, "finished_at": "2026-01-01T00:00:00.000+00:00"},
        "provenance": {},
    }
    _write(paths.result, result)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
