"""A finished sweep in a workspace, of any size, in seconds: records and samples files as the real
stages leave them, with drawn numbers.

>>> made = RecordedSweep(tmp_path, arms=("base", "more"), seeds=(1, 2, 3), prompts=40)
>>> made.write()
>>> gather(made.workspace, made.name)

Nothing is fsynced: it is for reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.layout import AttemptPaths
from infra.store.sweep_records import sweep_folder, write_sweep
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import digest
from refiner_core.contract.records import (
    RECORD_VERSION,
    ArmRecord,
    Attempt,
    RunRecord,
    StageResult,
    StageSpec,
    SweepRecord,
    TrialRecord,
    to_json,
)
from refiner_core.contract.types import PromptRow
from refiner_core.data.prepared import write_prompts
from refiner_core.evaluation.metrics import METRICS
from tests.support.made_evidence import PROTOCOL

AT = "2026-11-21T10:00:00.000+00:00"
_JUDGED = ("rubric_score", "citation_precision", "citation_recall", "citation_f1", "reward")
_RUBRICS = (("Cites", "positive", "v3"), ("Pads", "negative", "v3"))


@dataclass
class RecordedSweep:
    """What is written; ``effects`` maps arms to what they add to every share, ``shifts`` arms to
    what their evaluations' judge adds to every judged number, the copier's too."""

    root: Path
    arms: Sequence[str]
    seeds: Sequence[int] = (1, 2, 3)
    prompts: int = 40
    samples: int = 2
    steps: int = 20
    effects: Mapping[str, float] = field(default_factory=dict)
    shifts: Mapping[str, float] = field(default_factory=dict)
    name: str = "drawn"
    question: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        self.workspace = Workspace.open(self.root)
        self._config = to_json(RecipeConfig())
        self._written: set[str] = set()
        self._known: dict[tuple[int, float], pa.Array] = {}

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids."""
        return [f"row-{i:05d}" for i in range(self.prompts)]

    def write(self) -> None:
        """All of it."""
        trials = tuple(
            TrialRecord(arm, seed, (f"x={arm}", f"seed={seed}"), self.stages(arm, seed))
            for seed in self.seeds
            for arm in self.arms
        )
        for trial in trials:
            self._trial(trial)
        record = SweepRecord(
            version=1,
            number=1,
            name=self.name,
            recipe="tiny",
            folder=".",
            text=f"recipe: tiny\nseeds: {list(self.seeds)}\n",
            arms=tuple(ArmRecord(a, {"arm": a}, {"x": a}) for a in self.arms),
            baseline=self.arms[0],
            seeds=tuple(self.seeds),
            trials=trials,
            limits={},
            question=self.question,
            forecast={},
            code="0" * 16,
            started_at=AT,
            provenance={"commit": "c0ffee"},
        )
        assert write_sweep(self.workspace, record)

    def stages(self, arm: str, seed: int) -> dict[str, str]:
        """Name -> id; data and SFT are shared by all arms."""
        own = digest([arm, seed])[:12]
        of_seed = digest(["all", seed])[:12]
        return {
            "data": f"data-{digest('data')[:12]}",
            "sft": f"sft-{of_seed}",
            "evaluate-sft": f"evaluate-{of_seed}",
            "grpo": f"grpo-{own}",
            "evaluate-grpo": f"evaluate-{own}",
        }

    def _trial(self, trial: TrialRecord) -> None:
        missing = (trial.arm, trial.seed) in set(self.without)
        for name, stage in trial.stages.items():
            if stage not in self._written and not (missing and "grpo" in name):
                self._stage(name, stage, trial)
                self._written.add(stage)
        run = RunRecord(
            version=RECORD_VERSION,
            run=f"20261121-100000-tiny-{digest(trial.name)[:6]}",
            recipe="tiny",
            overrides=trial.overrides,
            command=("refiner", "sweep"),
            config=self._config,
            stages=trial.stages,
            code="0" * 16,
            started_at=AT,
            provenance={"sweep": {"name": self.name, "arm": trial.arm, "seed": trial.seed}},
        )
        paths = self.workspace.layout.run(run.run)
        _json(paths.record, to_json(run))
        runs = sweep_folder(self.workspace, self.name) / "runs"
        _json(runs / f"{trial.name.replace('/', '--')}.json", {"trial": trial.name, "run": run.run})

    # ------------------------------------------------------------ stages

    def _stage(self, name: str, stage: str, trial: TrialRecord) -> None:
        kind = name.partition("-")[0]
        paths, attempt = self.workspace.layout.stage(stage), self.workspace.layout.attempt(stage, 1)
        attempt.output.mkdir(parents=True)
        model = name.removeprefix("evaluate-") if kind == "evaluate" else ""
        spec = StageSpec(
            RECORD_VERSION, name, kind, digest(stage), model, 1, {"seed": trial.seed}, {}, {}
        )
        _json(paths.spec, to_json(spec))
        report = self._made(name, attempt, trial)
        result = StageResult(RECORD_VERSION, 1, "attempts/0001/output", (), report, {}, 61.0, AT)
        _json(paths.result, to_json(result))
        job = Attempt(1, f"refiner-{stage}", "local", "here:1:1.00", AT)
        data = trial.stages["data"]
        for path, value in (
            (attempt.intent, {**to_json(job), "config": self._config,
                              "inputs": {"data": data} if kind != "data" else {}}),
            (attempt.started, {"started_at": AT, "node": "n1"}),
            (attempt.outcome, {"outcome": {"failure": "none", "decision": "finish"},
                               "ended_at": AT, "seconds": 61.0}),
        ):  # fmt: skip
            _json(path, value)

    def _made(self, name: str, attempt: AttemptPaths, trial: TrialRecord) -> dict[str, Any]:
        """What a stage leaves, and says of itself."""
        if name == "data":
            rows = [
                PromptRow(i, f"What is {i}?", f"Tell me what {i} is.", (1, 2), "{}")
                for i in self.ids
            ]
            write_prompts(attempt.output / "rl_test.parquet", rows)
            return {"rl": {"kept": len(rows)}}
        if name.startswith("evaluate-"):
            return self._evaluated(name.removeprefix("evaluate-"), attempt.output, trial)
        rng = self._rng(name, trial)
        lines = [
            {"step": step, "metrics": {m: float(rng.random()) for m in _LOGGED}}
            for step in range(1, self.steps + 1)
        ]
        attempt.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"steps": self.steps}

    def _evaluated(self, model: str, folder: Path, trial: TrialRecord) -> dict[str, Any]:
        effect = self.effects.get(trial.arm, 0.0) if model == "grpo" else 0.0
        shift = self.shifts.get(trial.arm, 0.0)
        rng = self._rng(f"evaluate-{model}", trial)
        decodings = {"greedy": 1, "sampled": self.samples}
        files = {}
        for decoding, samples in decodings.items():
            files[decoding] = f"samples-{decoding}.parquet"
            table = self._samples(rng, samples, 0.5 + effect, shift)
            pq.write_table(table, folder / files[decoding], compression="zstd")
        floor = np.random.default_rng(0)
        copied = self._samples(floor, 1, 0.3, shift)
        pq.write_table(copied, folder / "samples-random_copier.parquet", compression="zstd")
        results = self._results(model, files)
        (folder / "results.json").write_text(json.dumps(results))
        return results

    def _results(self, model: str, files: Mapping[str, str]) -> dict[str, Any]:
        protocols: dict[str, Any] = {}
        found: dict[str, list[dict[str, Any]]] = {"evaluations": [], "reference": []}
        for decoding, file in files.items():
            plain = {**PROTOCOL, "decoding": decoding, "prompts": digest(self.ids)}
            rewarded = {**plain, "reward": {"paper_citation_weight": 0.2}}
            names = [digest(p)[:12] for p in (plain, rewarded)]
            protocols |= dict(zip(names, (plain, rewarded), strict=True))
            for metric in METRICS:
                common = {
                    "protocol": names[metric == "reward"],
                    "protocol_name": f"held-out/{decoding}",
                    "decoding": decoding,
                    "metric": metric,
                    **{"value": 0.5, "low": 0.4, "high": 0.6, "n": self.prompts},
                    **{"numerator": 1.0, "denominator": 2, "interval": "bootstrap over prompts"},
                }
                found["evaluations"].append({"stage": model, **common, "samples_file": file})
                copier = {"stage": "random_copier", "samples_file": "samples-random_copier.parquet"}
                found["reference"].append({**common, **copier})
        return {"version": 1, "model": model, "model_ref": "ref", "protocols": protocols, **found}

    def _samples(self, rng: Any, samples: int, mean: float, shift: float) -> pa.Table:
        size = self.prompts * samples
        columns: dict[str, Any] = {
            "sample_id": pa.array(np.repeat(np.array(self.ids, dtype=object), samples)),
            "sample_index": pa.array(np.tile(np.arange(samples, dtype=np.int32), self.prompts)),
            "response_text": pa.array([_TEXT] * size),
            "finish_reason": pa.array(["stop"] * size),
            "status": pa.array(["scored"] * size),
        }
        for metric in METRICS:
            values = mean + 0.1 * rng.standard_normal(size)
            values += shift * (metric in _JUDGED)
            columns[metric] = pa.array(values)
        columns["judgements"] = self._judged(size, mean + shift)
        return pa.table(columns)

    def _judged(self, size: int, mean: float) -> pa.Array:
        """Judgements of rubrics; drawn once for all evaluations of one mean."""
        key = (size, round(mean, 9))
        if key not in self._known:
            rng = np.random.default_rng(len(self._known))
            scores = np.clip(mean + 0.1 * rng.standard_normal((size, 3)), 0, 1).round(3)
            self._known[key] = pa.array([_judgements(row) for row in scores.tolist()])
        return self._known[key]

    def _rng(self, name: str, trial: TrialRecord) -> np.random.Generator:
        return np.random.default_rng(int(digest([name, trial.stages["grpo"]])[:12], 16))


_LOGGED = (
    *("scores", "objective/kl3_avg", "val/stop_rate", "val/sequence_lengths", "loss/train_avg"),
    *(f"other/{i}" for i in range(20)),
)
_TEXT = "<answer><snippet id=S_a1B9xQ2>The river was dammed in 1931.</snippet> " * 4 + "</answer>"


def _judgements(scores: Sequence[float]) -> str:
    found = [
        {
            "kind": "rubric", "title": title, "criterion": f"Whether it {title.lower()}.",
            "polarity": polarity, "weight": 1.0, "source": source,
            "score": score, "status": "scored", "detail": "",
        }
        for (title, polarity, source), score in zip(_RUBRICS, scores, strict=False)
    ]  # fmt: skip
    cited = {"kind": "citation_recall", "claim": "The river", "score": scores[-1]}
    return json.dumps([*found, {**cited, "status": "scored", "detail": ""}])


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
