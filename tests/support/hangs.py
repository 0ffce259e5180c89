"""Planned faults of a stage in two ranks, and what its worker has said of them.

In: a folder and faults. Out: per fault the recorded outcome, and the seconds from the fault to it.
All start from one template: a workspace with a healthy attempt, whose times are known.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from infra.attempt.rank_watch import STACKS
from infra.store.workspace import StageClaim, Workspace
from refiner_core.contract.records import AttemptOutcome
from tests.support.command import ROOT, environment
from tests.support.plans import OWNER, small_plan

WORKER = ROOT / "tests" / "support" / "ranks_worker.py"
MODULE = "tests.support.hanging_rank"
#: The class that each kind of fault should get.
CLASSES = {
    "sleep": "hung",
    "loop": "hung",
    "skip": "hung or bug",  # where the next calls differ in kind they wait, else they notice
    "die": "killed",
    "exit": "bug",
    "memory": "out_of_memory",
    "disk": "system_outage",
    "full": "disk_full",
}


@dataclass(frozen=True)
class PlannedFault:
    """A fault of one rank, in one phase of one step."""

    kind: str
    phase: str
    rank: int
    step: int = 3

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("kind", "phase", "rank", "step")}


@dataclass(frozen=True)
class FaultVerdict:
    """What was recorded of a fault; ``usual_s`` is the usual length of its phase."""

    fault: PlannedFault
    outcome: AttemptOutcome | None
    seconds: float
    usual_s: float
    stacks: str = ""

    @property
    def named(self) -> bool:
        """Tell whether rank and class are right."""
        found = self.outcome
        right = found is not None and found.failure in CLASSES[self.fault.kind].split(" or ")
        return right and found.rank == self.fault.rank

    @property
    def in_time(self) -> bool:
        """Tell whether the verdict came within three usual lengths and 30 s."""
        return self.seconds <= 3 * self.usual_s + 30


class FaultLab:
    """A template, and copies of it with faults."""

    def __init__(self, folder: Path, *, floor_s: float = 20.0, step_s: float = 0.5) -> None:
        self.folder, self.step_s = folder, step_s
        self.plan = small_plan("data", "sft", hung_floor_s=floor_s)
        self.stage = next(s for s in self.plan.stages if s.kind == "sft")
        self._run(folder / "template", {})

    def run(self, fault: PlannedFault, name: str) -> FaultVerdict:
        """Run an attempt with a fault to its end."""
        root = self.folder / name
        shutil.copytree(self.folder / "template", root)
        ended = self._run(root, {"fault": fault.to_json()})
        workspace = Workspace.open(root)
        record = workspace.read_record(self.stage.id)
        attempt = None if record is None else record.attempts[-1]
        path = root / "fault.json"
        began = json.loads(path.read_text())["at"] if path.exists() else ended
        beat = workspace.read_heartbeat(self.stage.id, 1) or {}
        _, _, usual_s = beat.get("phases", {}).get(fault.phase, (0, 0, self.step_s / 5))
        outcome = None if attempt is None else attempt.outcome
        paths = workspace.layout.attempt(self.stage.id, 2)
        stacks = paths.control / STACKS
        text = stacks.read_text() if stacks.exists() else ""
        shutil.rmtree(root)
        return FaultVerdict(fault, outcome, ended - began, float(usual_s), text)

    def _run(self, root: Path, behaviour: dict[str, object]) -> float:
        workspace = Workspace.open(root)
        told = {"steps": 5, "step_s": self.step_s, **behaviour}
        (root / "behaviour.json").write_text(json.dumps(told))
        after = max(workspace.layout.stage(self.stage.id).attempt_numbers(), default=0)
        claim = StageClaim(OWNER, "local", after)
        workspace.claim_attempt(self.stage, self.plan.config, {}, claim)
        process = subprocess.Popen(
            [sys.executable, str(WORKER), "--workspace", str(root), self.stage.id, str(after + 1)],
            env={
                **environment(),
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(root),
                "RANKS_MODULE": MODULE,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)
        return time.time()
