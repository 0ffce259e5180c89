"""A nightly evaluation whose evaluations are told what came out; everything that reads records is
the real thing, and time is what a test says.

>>> lab = NightLab(tmp_path)
>>> lab.measure("canary", "2026-11-02", quality=0.5)
>>> lab.night("2026-11-02").state
'done'
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.nightly.checkpoints import evaluations_in, night_plan, resolve
from flows.nightly.history import read_history
from flows.nightly.night import NightOutcome, load_nightly, run_night
from infra.attempt.attempt import AttemptRun
from infra.store.nightly_records import NightlyRecords
from infra.store.stage_records import StageClaim
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.types import PromptRow
from refiner_core.evaluation.metrics import METRICS
from refiner_core.evaluation.protocol import make_protocol
from refiner_core.evaluation.results import MeasuredRows, write_results
from refiner_core.nightly.page import HistoryView
from tests.support.recorded_run import OWNER, write_model

PROMPTS = 24
FILE = """
name: lab
schedule: "0 3 * * *"
timezone: {timezone}
recipe: tiny
overrides:
  - workspace={workspace}
  - evaluate.decoding=[greedy]
  - evaluate.bootstrap_samples=50
  - tracking.wandb=disabled
  {overrides}
checkpoints:
  - {{name: model, folder: "{model}"}}
canary: {{folder: "{canary}", digest: "{digest}"}}
alerts:
  metrics: [oracle]
  {alerts}
"""


class NightLab:
    """One nightly evaluation of a folder ``model``, with a canary, in a workspace of its own."""

    def __init__(self, root: Path, *, timezone: str = "UTC", **more: str):
        self.root = root
        self.workspace = Workspace.open(root / "runs")
        for name in ("model", "canary"):
            if not (root / name).exists():
                write_model(root / name, name)
        self.values = {"timezone": timezone, "alerts": "", "overrides": ""}
        self.values |= more
        self.write()

    def write(self, **more: object) -> None:
        """Write the file again."""
        from flows.checking.sources import model_digest

        self.values |= {k: v for k, v in more.items() if isinstance(v, str | int)}
        text = FILE.format(
            workspace=self.root / "runs",
            model=self.root / "model",
            canary=self.root / "canary",
            digest=model_digest(str(self.root / "canary"), ""),
            **self.values,
        )
        (self.root / "lab.yaml").write_text(text)
        self.nightly = load_nightly(str(self.root / "lab.yaml"))
        self.records = NightlyRecords(self.workspace, "lab")

    def train(self, weights: str) -> None:
        """Other weights in the model's folder."""
        (self.root / "model" / "model.safetensors").write_text(weights)

    def plan(self, checkpoint: str, night: str) -> Plan:
        entry = next(c for c in self.nightly.everybody if c.name == checkpoint)
        with contextlib.chdir(self.nightly.folder):
            return night_plan(self.nightly, resolve(entry, self.workspace), night)

    def measure(
        self, checkpoint: str, night: str, quality: float = 0.5, *, served: str = "judge-1"
    ) -> None:
        """Numbers of a checkpoint: what its weights are worth, a little different on each prompt
        and in each night. Where they are there already, nothing happens."""
        plan = self.plan(checkpoint, night)
        wanted = [s for s in plan.stages if self.workspace.read_result(s.id) is None]
        for stage in wanted:
            self._do(plan, stage, night, quality, served)
        if wanted:
            self.records.note_run(night, checkpoint, "a-run-of-that-night", "")

    def night(self, night: str, *, at: str = "03:00", wanted: str | None = None) -> NightOutcome:
        """Work on what is due at a moment (of UTC)."""
        now = datetime.fromisoformat(f"{night}T{at}:00").replace(tzinfo=UTC)
        return run_night(self.nightly, wanted, now=now)

    def both(
        self, night: str, canary: float = 0.5, model: float = 0.5, **more: str
    ) -> NightOutcome:
        """A whole night."""
        self.measure("canary", night, canary, **more)
        self.measure("model", night, model, **more)
        return self.night(night)

    def reading(self) -> HistoryView:
        return read_history(self.nightly, self.workspace)

    # ------------------------------------------------------------ parts

    def _do(self, plan: Plan, stage: PlannedStage, night: str, quality: float, served: str) -> None:
        inputs = {role: plan.by_name[n].id for role, n in stage.inputs.items()}
        claimed = self.workspace.claim_attempt(
            stage, plan.config_of(stage), inputs, StageClaim(OWNER, "local", 0)
        )
        with AttemptRun(self.workspace, stage.id, claimed.number, own_log=False) as run:
            if stage in evaluations_in(plan):
                run.finish(_results(run.config, stage, run.output_dir, night, quality, served))
            else:
                run.output_dir.mkdir(parents=True, exist_ok=True)
                run.finish({})


def _results(
    config: RecipeConfig, stage: PlannedStage, output: Path, night: str, quality: float, served: str
) -> dict[str, Any]:
    prompts = [PromptRow(f"row-{i}", "q", "q", (1,), ()) for i in range(PROMPTS)]
    protocol = make_protocol(config, prompts, "greedy", "0" * 64)
    rows = [_row(i, quality, night + stage.id) for i in range(PROMPTS)]
    measured = [MeasuredRows(protocol, rows)]
    found = write_results(output, config, ("base", "ref"), measured, ("random_copier", rows))
    found["judge_usage"] = {"served": {served: PROMPTS}}
    return found


def _row(number: int, quality: float, noise: str) -> Mapping[str, Any]:
    import random

    draw = random.Random(f"{number} {noise}")
    value = min(1.0, max(0.0, quality + (number % 5 - 2) / 10 + draw.uniform(-0.02, 0.02)))
    return {
        "sample_id": f"row-{number}",
        "sample_index": 0,
        "response_text": "",
        "finish_reason": "stop",
        "status": "scored",
        **dict.fromkeys(METRICS),
        "oracle": value,
        "judgements": "[]",
    }
