"""A finished run in a workspace, in a second: stages that train are told what came out, everything
that reads their records is the real thing.

>>> run = RecordedRun(tmp_path / "runs", "publish.which=every-save")
>>> run.data(); run.train("sft"); run.train("grpo")
>>> run.evaluate("evaluate-grpo", quality=0.5); run.carry_out("publish")
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.running.calls import make_recipe_plan
from flows.stages.work import run_stage
from flows.worker import work_of
from infra.attempt.attempt import AttemptRun
from infra.store.stage_records import StageClaim
from infra.store.traces import encode_rollouts
from infra.store.workspace import Workspace, now_text
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import RECORD_VERSION, AttemptOutcome, RunRecord, to_json
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import write_prompts
from refiner_core.data.random_baseline import random_baseline_answers
from refiner_core.data.synthetic import generate_rows
from refiner_core.evaluation.metrics import sample_row
from refiner_core.evaluation.protocol import Decoding, make_protocol
from refiner_core.evaluation.results import MeasuredRows, write_results
from refiner_core.judges import build_judge
from refiner_core.models import tiny_model_dir
from refiner_core.rewards import RewardInput, compute_rewards

SMALL = (
    "data.synthetic_sft_rows=20",
    "data.synthetic_rl_rows=12",
    "grpo.num_training_steps=6",
    "grpo.save_freq=2",
    "evaluate.bootstrap_samples=100",
    "evaluate.decoding=[greedy]",
    "tracking.wandb=disabled",
)
PROMPTS = 6
OWNER = "elsewhere:1:1.00"


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


class RecordedRun:
    """The tiny recipe (or another one) whose records are written down as they would come."""

    def __init__(
        self,
        root: Path,
        *overrides: str,
        recipe: str = "tiny",
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self._provenance = provenance or {}
        self.overrides = (
            (*SMALL, f"workspace={root}", *overrides) if recipe == "tiny" else overrides
        )
        self.plan = make_recipe_plan(recipe, self.overrides)
        self.workspace = Workspace.open(root)
        self.run = self._begin(recipe)

    @property
    def config(self) -> RecipeConfig:
        return self.plan.config

    def stage(self, name: str) -> PlannedStage:
        return self.plan.by_name[name]

    def report(self, name: str) -> Mapping[str, Any]:
        result = self.workspace.read_result(self.stage(name).id)
        assert result is not None, f"{name} is not done"
        return result.report

    def published(self, name: str) -> Path:
        return Path(str(self.report(name)["target"]))

    # ------------------------------------------------------------ stages that are told

    def data(self) -> None:
        """Six held-out prompts, and six to train on."""
        prompts = prompt_rows(2 * PROMPTS)

        def work(attempt: AttemptRun) -> dict[str, Any]:
            write_prompts(attempt.output_dir / "rl_test.parquet", prompts[:PROMPTS])
            write_prompts(attempt.output_dir / "rl_train.parquet", prompts[PROMPTS:])
            counts = {"read": 12, "kept": 12, "dropped": {}, "digest": "synthetic", "modes": {}}
            return {"rl": counts, "sft": {**counts, "read": 20, "kept": 20}, "split": {}}

        self.do("data", work)

    def train(self, name: str, steps: int | None = None, **report: Any) -> None:
        """Weights of a training stage; every one has bytes of its own."""
        steps = steps or (6 if name == "grpo" else 4)

        def work(attempt: AttemptRun) -> dict[str, Any]:
            write_model(attempt.output_dir / "model", f"{name} {steps}")
            if name == "grpo":
                for step in range(1, steps + 1):
                    rollouts = attempt.paths.rollouts / f"step-{step:08d}.parquet"
                    rollouts.parent.mkdir(parents=True, exist_ok=True)
                    rollouts.write_bytes(encode_rollouts(self._rollouts(step)))
            return {**training_report(name, steps), **report}

        self.do(name, work)

    def export(self, step: int, attempt: int | None = 1, elapsed_s: float | None = 9.0) -> None:
        """An export of a checkpoint of GRPO, as if training went on."""
        trained = self.stage("grpo").id

        def work(running: AttemptRun) -> dict[str, Any]:
            write_model(running.output_dir / "model", f"grpo {step}")
            made = {"stage": trained, "attempt": attempt, "elapsed_s": elapsed_s}
            return {**training_report("grpo", step), **made}

        stage = self.stage(f"export-step{step}")
        folder = self.workspace.layout.stage(trained).checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        marker = {"step": step, "attempt": attempt or 1, "files": {}}
        (folder / "COMPLETE.json").write_text(json.dumps(marker))
        self.do(stage.name, work)

    def evaluate(self, name: str, quality: float = 1.0, prompts: int = PROMPTS) -> None:
        """Numbers of a model that copies at random, and says nothing in 1 - ``quality`` of its
        answers; scored, counted and written by the real thing."""
        stage = self.stage(name)

        def work(attempt: AttemptRun) -> dict[str, Any]:
            config = attempt.config
            asked = prompt_rows(prompts)
            measured = [
                self._measured(config, asked, d, quality, stage.protocol)
                for d in config.evaluate.decoding
            ]
            floor = _answers(config, asked, 1.0)
            beside = ("random_copier", floor)
            return write_results(attempt.output_dir, config, (stage.model, "ref"), measured, beside)

        self.do(name, work)

    def carry_out(self, name: str) -> Mapping[str, Any]:
        """A stage by its real function."""

        def work(attempt: AttemptRun) -> dict[str, Any]:
            return run_stage(work_of(attempt))

        self.do(name, work)
        return self.report(name)

    # ------------------------------------------------------------ records

    def do(self, name: str, work: Callable[[AttemptRun], dict[str, Any]]) -> None:
        """One attempt at a stage, to its end."""
        with AttemptRun(
            self.workspace, self.stage(name).id, self.claim(name), own_log=False
        ) as run:
            try:
                run.finish(work(run))
            except BaseException as error:
                run.fail(error)
                raise

    def claim(self, name: str) -> int:
        """The next attempt at a stage."""
        stage = self.stage(name)
        numbers = self.workspace.layout.stage(stage.id).attempt_numbers()
        inputs = {role: self.plan.by_name[n].id for role, n in stage.inputs.items()}
        claim = StageClaim(OWNER, "local", max(numbers, default=0))
        attempt = self.workspace.claim_attempt(stage, self.plan.config_of(stage), inputs, claim)
        return attempt.number

    def begin(self, name: str) -> int:
        """An attempt that has started and goes on."""
        number = self.claim(name)
        with AttemptRun(self.workspace, self.stage(name).id, number, own_log=False):
            return number

    def fail(self, name: str, outcome: AttemptOutcome, seconds: float = 30.0) -> int:
        """An attempt that came to nothing."""
        number = self.begin(name)
        self.workspace.close_attempt(self.stage(name).id, number, outcome, seconds)
        return number

    def _begin(self, recipe: str) -> RunRecord:
        while any(run_id[:15] >= _stamp() for run_id in self.workspace.run_ids()):
            time.sleep(0.02)  # calls of one second have no order
        run = RunRecord(
            version=RECORD_VERSION,
            run=self.workspace.new_run_id(self.plan.recipe),
            recipe=self.plan.recipe,
            overrides=self.overrides,
            command=("refiner", "run", recipe, *self.overrides),
            config=to_json(self.config),
            stages={s.name: s.id for s in self.plan.stages},
            code="0" * 16,
            started_at=now_text(),
            provenance={
                **{"commit": "c0ffee", "dirty": False, "recipe": recipe},
                **self._provenance,
            },
        )
        self.workspace.write_run(run)
        return run

    # ------------------------------------------------------------ numbers

    def _measured(
        self,
        config: RecipeConfig,
        prompts: Sequence[PromptRow],
        decoding: Decoding,
        quality: float,
        file: str = "",
    ) -> MeasuredRows:
        digest = self.stage("data").fingerprint
        protocol = make_protocol(config, prompts, decoding, digest, file)
        return MeasuredRows(protocol, _answers(config, prompts, quality))

    def _rollouts(self, step: int) -> list[dict[str, Any]]:
        rows = []
        for row in _answers(self.config, prompt_rows(2 * PROMPTS)[PROMPTS : PROMPTS + 2], 1.0):
            rows.append(
                {
                    "step": step,
                    **{k: row[k] for k in ("sample_id", "sample_index", "response_text")},
                    **{k: row[k] for k in ("finish_reason", "status", "judgements", "reward")},
                    "advantage": 0.5,
                    "reward/rubric": row["rubric_score"],
                }
            )
        return rows


def write_model(folder: Path, weights: str) -> None:
    """A model in the layout of the Hub, as far as publishing looks at it."""
    folder.mkdir(parents=True)
    source = tiny_model_dir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "model.safetensors").write_text(weights)
    (folder / "trainer_state.json").write_text("not for others")


def training_report(name: str, steps: int) -> dict[str, Any]:
    """What a training stage would say of itself."""
    if name == "sft":
        curve = [[s, 4.0 / s] for s in range(1, steps + 1)]
        return {"steps": steps, "train_loss": {"first": 4.0, "final": 1.0, "curve": curve}}
    points = [[s, 1.0 + s / 8] for s in range(1, steps + 1)]
    return {
        "steps": steps,
        "episodes": 8 * steps,
        "tokens": 300 * steps,
        "epoch": 0,
        "counts": {"samples/malformed": 0, "samples/unscored": 0, "optimizer_steps": steps},
        "curves": {"scores": points},
    }


def prompt_rows(count: int) -> list[PromptRow]:
    """The prompts of a recorded run: the first half is held out."""
    found = []
    for number, row in enumerate(generate_rows("rl", count, seed=0)):
        text = row["conversations"][-1]["content"]
        question = text.partition("<query>")[2].partition("</query>")[0]
        found.append(PromptRow(f"row-{number}", question, text, (1, 2, 3), row["rubrics"]))
    return found


def _answers(
    config: RecipeConfig, prompts: Sequence[PromptRow], quality: float
) -> list[dict[str, Any]]:
    items = []
    for number, prompt in enumerate(prompts):
        silent = number >= round(quality * len(prompts))
        text = (
            "I do not know."
            if silent
            else random_baseline_answers(prompt.prompt_text, random.Random(number))
        )
        items.append(RewardInput(prompt, text, stopped=True))
    results = compute_rewards(items, config.reward, build_judge(config.judge))
    return [
        sample_row(i.prompt, 0, i.text, length_tokens=9, stopped=True, result=r)
        for i, r in zip(items, results, strict=True)
    ]
