"""Evidence of a sweep from arrays: what a workspace would say, without one.

>>> made = MadeSweep(("base", "more"), seeds=(1, 2, 3))
>>> made.add("base", 1, {"oracle": values}, reference={"rubric_score": floor})
>>> make_report(made.evidence())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from refiner_core.contract.fingerprint import digest
from refiner_core.contract.records import ArmRecord, SweepRecord, TrialRecord
from refiner_core.report.sweep.evidence import (
    MeasuredDecoding,
    PromptMeans,
    SweepEvidence,
    TrialEvidence,
)
from refiner_core.report.sweep.sweep_report import Row, TrialState

#: A protocol as results spell it out.
PROTOCOL: dict[str, Any] = {
    "split": "held-out",
    "decoding": "sampled",
    "judge": {"kind": "openai", "model": "judge-7b", "prompt": "v1", "revision": "r1"},
    "rubrics": {"source": "instance+static", "static": "v3"},
    "reward": None,
}


def trial_row(arm: str, seed: int, run: str, state: TrialState, **more: Any) -> Row:
    """A trial as a report shows it, of which nothing more is known."""
    unknown = dict.fromkeys(("gpu_hours", "cpu_hours", "queue_seconds", "judge_calls"))
    nothing = {"seconds": 0.0, "lost_seconds": 0.0, "lost_steps": 0, "attempts": 0}
    empty = dict.fromkeys(("reason", "progress", "tracked", "card", "published"), "")
    named = {"arm": arm, "seed": seed, "run": run, "state": state, "shared": ()}
    return {**named, **unknown, **nothing, **empty, **more}


def prompt_names(count: int) -> tuple[str, ...]:
    """``p0000`` …"""
    return tuple(f"p{i:04d}" for i in range(count))


class MadeSweep:
    """Trials and evaluations, put together one by one; the first arm is the baseline."""

    def __init__(
        self,
        arms: Sequence[str],
        seeds: Sequence[int] = (1, 2, 3),
        *,
        question: Mapping[str, Any] | None = None,
        forecast: Mapping[str, Any] | None = None,
        levels: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.arms, self.seeds = tuple(arms), tuple(seeds)
        self.question, self.forecast = question or {}, forecast or {}
        self.levels = levels or {}
        self.states: dict[tuple[str, int], tuple[TrialState, str]] = {}
        self.protocols: dict[str, Mapping[str, Any]] = {}
        self.evaluations: dict[str, tuple[MeasuredDecoding, ...]] = {}
        self.of_trial: dict[tuple[str, int], list[str]] = {}

    def add(
        self,
        arm: str,
        seed: int,
        values: Mapping[str, Any],
        *,
        reference: Mapping[str, Any] | None = None,
        prompts: Sequence[str] | None = None,
        protocol: Mapping[str, Any] = PROTOCOL,
        protocol_file: str = "",
        model: str = "grpo",
        stage: str = "",
        content: str = "one",
    ) -> None:
        """One evaluation. ``content`` stands for the digest of the prompts' texts; ``stage`` is its
        id, where trials share it."""
        count = len(next(iter(values.values())))
        names = tuple(prompts) if prompts is not None else prompt_names(count)
        asked = {"prompts": digest([names, content]), "num_prompts": len(names)}
        plain = {**protocol, **asked, "reward": None}
        rewarded = {**plain, "reward": protocol.get("reward") or {}}
        fingerprints = [digest(p)[:12] for p in (plain, rewarded)]
        self.protocols |= dict(zip(fingerprints, (plain, rewarded), strict=True))
        name = f"evaluate-{model}" + (f"@{protocol_file}" if protocol_file else "")
        stage = stage or f"{name}-{arm}-{seed}"
        measured = MeasuredDecoding(
            stage=stage,
            model=model,
            protocol_file=protocol_file,
            decoding=str(protocol["decoding"]),
            protocol=fingerprints[0],
            reward_protocol=fingerprints[1],
            means=_means(names, values),
            reference=None if reference is None else _means(names, reference),
            samples=Path("samples.parquet"),
        )
        self.evaluations[stage] = (*self.evaluations.get(stage, ()), measured)
        trial = self.of_trial.setdefault((arm, seed), [])
        if stage not in trial:
            trial.append(stage)

    def fail(self, arm: str, seed: int, reason: str) -> None:
        """A trial that came to nothing."""
        self.states[arm, seed] = ("failed", reason)

    def evidence(self, stored: Any = None) -> SweepEvidence:
        """All of it."""
        trials = [(arm, seed) for seed in self.seeds for arm in self.arms]
        return SweepEvidence(
            sweep=self._record(trials),
            made_at="2026-11-21T00:00:00.000+00:00",
            state="finished",
            trials=tuple(self._trial(*place) for place in trials),
            evaluations=self.evaluations,
            protocols=self.protocols,
            stored=stored,
        )

    def _trial(self, arm: str, seed: int) -> TrialEvidence:
        state, reason = self.states.get((arm, seed), ("done", ""))
        found = self.of_trial.get((arm, seed), [])
        return TrialEvidence(
            row=trial_row(arm, seed, f"run-{arm}-{seed}", state, reason=reason),
            stages=_stages(arm, seed),
            evaluations=tuple(found),
            missing=() if found else ("evaluate-grpo",),
        )

    def _record(self, trials: Sequence[tuple[str, int]]) -> SweepRecord:
        return SweepRecord(
            version=1,
            number=1,
            name="made",
            recipe="tiny",
            folder=".",
            text="",
            arms=tuple(ArmRecord(a, self.levels.get(a, {}), {}) for a in self.arms),
            baseline=self.arms[0],
            seeds=self.seeds,
            trials=tuple(TrialRecord(a, s, (), _stages(a, s)) for a, s in trials),
            limits={},
            question=self.question,
            forecast=self.forecast,
            code="",
            started_at="2026-11-21T00:00:00.000+00:00",
        )


def _stages(arm: str, seed: int) -> dict[str, str]:
    names = ("sft", "grpo", "evaluate-sft", "evaluate-grpo")
    return {name: f"{name}-{arm}-{seed}" for name in names}


def _means(names: tuple[str, ...], values: Mapping[str, Any]) -> PromptMeans:
    rows = np.array([np.asarray(v, dtype=np.float64) for v in values.values()])
    return PromptMeans(names, tuple(values), rows)


def made_from(
    values: Any,
    *,
    metric: str = "rubric_score",
    reference: Any = None,
    seeds: Sequence[int] | None = None,
    **settings: Any,
) -> MadeSweep:
    """A sweep of values [arms, seeds, prompts], and of the copier's, if there are any."""
    arms = [f"arm{i}" if i else "base" for i in range(len(values))]
    made = MadeSweep(arms, seeds or range(1, values.shape[1] + 1), **settings)
    for a, arm in enumerate(arms):
        for s, seed in enumerate(made.seeds):
            beside = None if reference is None else {metric: reference[a, s]}
            made.add(arm, seed, {metric: values[a, s]}, reference=beside)
    return made
