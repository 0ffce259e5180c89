"""`python -m tests.bench sweep_again`: a sweep of 1,000 trials that is done, launched once more.

Prints one JSON line per call: ``name``, ``ours`` (seconds of wall clock of the whole command, with
its start), ``start`` (of the command on an empty workspace, which lists what is shipped), ``goal``
(seconds beside the start), ``trials``. The first call finds stages without runs and records a run
for each trial; the later ones, of which the best counts, are what the goal is for. Exits with 1
where it is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infra.store.workspace import Workspace
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageResult, to_json
from tests.support.command import refiner

GOAL_S = 3.0
ROUNDS = 3
SWEEP = {
    "recipe": "tiny",
    "factors": {
        "grpo.beta": [n / 1000 for n in range(1, 11)],
        "grpo.learning_rate": [n / 10000 for n in range(1, 11)],
    },
    "seeds": 10,
}


def main(arguments: list[str]) -> int:
    """Measure the first call, and those after it."""
    with tempfile.TemporaryDirectory() as folder:
        root, file = Path(folder) / "runs", Path(folder) / "again.yaml"
        file.write_text(json.dumps(SWEEP))
        trials = finish(root, file)
        empty = f"workspace={folder}/empty"
        start = min(_seconds("sweep", empty) for _ in range(ROUNDS))
        call = ("sweep", str(file), f"workspace={root}", "--yes", "--no-server")
        first = _seconds(*call)
        later = min(_seconds(*call) for _ in range(ROUNDS))
        common = {"start": round(start, 2), "trials": trials}
        print(json.dumps({"name": "first call on a finished sweep", "ours": first, **common}))
        line = {"name": "a finished sweep once more", "ours": later, "goal": GOAL_S, **common}
        print(json.dumps(line), flush=True)
        return 0 if later - start <= GOAL_S else 1


def finish(root: Path, file: Path) -> int:
    """Let every stage of the sweep be done; how many trials it has."""
    from flows.sweeping.planning import make_sweep_plan

    plan = make_sweep_plan(str(file), [f"workspace={root}"])
    workspace = Workspace.open(root)
    config = to_json(plan.trials[0].plan.config)
    for stage in plan.stages().values():
        _done(workspace, stage, config)
    return len(plan.trials)


def _done(workspace: Workspace, stage: PlannedStage, config: dict[str, Any]) -> None:
    paths = workspace.layout.stage(stage.id)
    attempt = paths.attempt(1)
    attempt.control.mkdir(parents=True)
    intent = {"number": 1, "comment": "c", "executor": "local", "owner": "h:1:1.00"}
    intent |= {"config": config, "inputs": {}}
    attempt.intent.write_text(json.dumps({**intent, "claimed_at": "2026-11-21T00:00:00+00:00"}))
    ended = {"outcome": {"failure": "none", "decision": "finish"}, "seconds": 10.0}
    attempt.outcome.write_text(json.dumps({**ended, "ended_at": "2026-11-21T01:00:00+00:00"}))
    spec = {
        **{"version": 1, "name": stage.name, "kind": stage.kind, "model": stage.model},
        **{"fingerprint": stage.fingerprint, "stage_version": 1, "sources": dict(stage.sources)},
        "identity": to_json(stage.identity),
        "input_fingerprints": dict(stage.input_fingerprints),
    }
    paths.spec.write_text(json.dumps(spec))
    at = "2026-11-21T01:00:00+00:00"
    result = StageResult(1, 1, "output", (), {"evaluations": [], "reference": []}, {}, 10.0, at)
    paths.result.write_text(json.dumps(to_json(result)))


def _seconds(*words: str) -> float:
    began = time.monotonic()
    done = refiner(*words)
    if done.code:
        sys.exit(f"refiner {' '.join(words)} ended with {done.code}: {done.stderr}")
    return round(time.monotonic() - began, 2)
