"""Group-relative policy optimisation: prompts to rollouts to rewards to weights, step after step.

In: ``data_dir/rl_train.parquet``, a model folder, a judge. Out: ``output_dir/model``, metrics and
rollouts per step, checkpoints, and a JSON-ready report.

One step: prompts (an epoch's shuffle) -> samples (seeded by what they are) -> rewards -> advantages
-> packs -> one or more optimiser steps -> metrics and rollouts stored -> checkpoint where due. A
step whose groups all lack spread changes no weight, but it counts and is logged. A judge that
streams works on finished samples while the others are decoded; ``time/judge_s`` is what is waited
for it after the last one.

Resume is exact: a step depends on the seed, its number and the state of the checkpoint alone.
A stop that is asked for before a step's update gives the step up and saves the state before it:
what was sampled comes out the same again, and the time to save may be short.
Measurements go under ``time/``, ``tokens_per_second``, ``memory/`` and ``judge/`` (what the judge
did: its store knows more the second time); nothing else depends on a clock or on what ran before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import Interrupted, JudgeOutage
from refiner_core.contract.types import Generator, Judge, JudgeUsage, Progress, StageIO
from refiner_core.data.prepared import load_prompts
from refiner_core.generation.load import set_threads
from refiner_core.judges.usage import (
    usage_between,
    usage_from_json,
    usage_metrics,
    usage_of,
    usage_sum,
    usage_to_json,
)
from refiner_core.rewards import require_scored
from refiner_core.training.boundary import Boundary, curve
from refiner_core.training.engines.choose import open_engine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.grpo_update import GrpoUpdate
from refiner_core.training.optim import schedule_factor
from refiner_core.training.order import order_hash, prompt_batch
from refiner_core.training.ranks import OneRank, Ranks, RanksIO
from refiner_core.training.rollout import (
    RewardFunction,
    RolloutBatch,
    RolloutSampler,
    Sampled,
    StepRewards,
    check_lengths,
    form_groups,
    rollout_metrics,
    rollout_rows,
)
from refiner_core.training.support import refuse_unsupported

TRAIN_FILE = "rl_train.parquet"
#: Metrics whose course the report keeps.
CURVES = ("scores", "objective/kl3_avg", "val/sequence_lengths", "val/stop_rate")
#: Counts whose sums the report keeps.
COUNTS = (
    "groups/kept",
    "groups/dropped_zero_std",
    "groups/dropped_too_few_scored",
    "samples/unscored",
    "samples/malformed",
    "samples/truncated_masked",
    "optimizer_steps",
)


def train_grpo(
    config: RecipeConfig,
    *,
    data_dir: Path,
    model_ref: str,
    output_dir: Path,
    io: StageIO | None,
    judge: Judge | None,
    generator: Generator | None = None,
    rewards: RewardFunction | None = None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train on rewards; resumes from ``io.latest_checkpoint()`` where there is one.

    Parameters
    ----------
    config
        The whole recipe; ``grpo``, ``reward``, ``judge``, ``model`` and ``seed`` are used.
    data_dir
        Holds ``rl_train.parquet``.
    model_ref
        Folder or Hub id of the weights to start from; they are also the KL reference.
    output_dir
        Gets ``model/``, an exported folder.
    io
        Metrics, rollouts, checkpoints, progress and stop requests; rank 0 has it, the other ranks
        None.
    judge
        Scores rubrics and citations; rank 0 has it, the other ranks None.
    generator, rewards
        Seams: by default transformers over the live model, and
        :func:`refiner_core.rewards.compute_rewards`.
    ranks
        The processes that train together; none is this one alone.

    Returns
    -------
    dict
        ``steps``, ``episodes``, ``tokens`` (sampled), ``counts`` and ``curves``; with a judge that
        counts, ``judge``: its usage in the steps that led here, without those that were given up.

    Raises
    ------
    Interrupted
        A stop was asked for; the state is saved.
    JudgeOutage
        Too many rollouts of a step could not be scored, or the judge could not be asked for too
        long; the state before the step is saved.
    StageFailed
        A loss or gradient is not finite.
    UnsupportedError
        See :func:`refiner_core.training.support.refuse_unsupported`.
    """
    refuse_unsupported(config, "grpo")
    run = _GrpoRun(config, data_dir, model_ref, io, judge, generator, rewards, ranks or OneRank())
    run.train()
    run.engine.export(output_dir / "model")
    return run.report()


class _GrpoRun:
    """The state of one training run; everything that changes is in ``progress`` or the model."""

    def __init__(
        self,
        config: RecipeConfig,
        data_dir: Path,
        model_ref: str,
        io: StageIO | None,
        judge: Judge | None,
        generator: Generator | None,
        rewards: RewardFunction | None,
        ranks: Ranks,
    ) -> None:
        grpo = config.grpo
        set_threads(config.model)
        if judge is None:
            raise ValueError("rank 0 needs a judge")
        self.config, self.grpo, self.judge = config, grpo, judge
        self.io, self.ranks = RanksIO(io, ranks), ranks
        self.rewards = rewards
        self.prompts = load_prompts(data_dir / TRAIN_FILE)
        prompt_batch(config.seed, len(self.prompts), grpo.num_unique_prompts_rollout, 0)
        check_lengths(self.prompts, grpo)
        self.engine = open_engine(config, "grpo", model_ref, self.ranks)
        generator = generator or _default_generator(self.engine, grpo.generation_batch_size)
        self.sampler = RolloutSampler(grpo, config.seed, generator, self.engine.tokenizer)
        reference = self.engine.reference(model_ref) if grpo.beta else None
        self.update = GrpoUpdate(self.engine, reference, grpo, config.seed)
        self.boundary = Boundary(
            *(self.io, self.engine, "grpo"),
            *(grpo.num_training_steps, grpo.save_freq, grpo.first_save),
        )
        data_hash = order_hash([row.sample_id for row in self.prompts])
        self.progress: dict[str, Any] = self.boundary.restore(data_hash) or {
            "data_hash": data_hash,
            "step": 0,
            "epoch": 0,
            "cursor": 0,
            "episode": 0,
            "tokens": 0,
            "counts": dict.fromkeys(COUNTS, 0),
            "curves": {name: [] for name in CURVES},
        }

    def train(self) -> None:
        """Every step that is left."""
        self.boundary.stop_if_asked(self.progress["step"], self.progress)
        for step in range(self.progress["step"] + 1, self.grpo.num_training_steps + 1):
            clock, usage = _Clock(), usage_of(self.judge)
            try:
                batch = self._rollouts(step, clock)
            except (JudgeOutage, Interrupted):
                self.boundary.save(step - 1, self.progress)
                raise
            metrics = rollout_metrics(batch)
            metrics.update(self._judge_metrics(usage))
            metrics.update(self._train_on(batch, step, clock))
            self._count(step, batch, metrics)
            metrics.update(clock.metrics(_tokens(batch)))
            metrics.update(self.engine.memory())
            self.io.save_rollouts(step, rollout_rows(step, batch))
            self.io.log_metrics(step, metrics)
            shown = {name: metrics[name] for name in ("scores",) if name in metrics}
            self.boundary.after(step, self.progress, shown)

    def report(self) -> dict[str, Any]:
        """What came out, from the progress alone: the same whether or not it was interrupted."""
        curves = {n: p for n, v in self.progress["curves"].items() if (p := curve(v))}
        return {
            "steps": self.progress["step"],
            "episodes": self.progress["episode"],
            "tokens": self.progress["tokens"],
            "epoch": self.progress["epoch"],
            "prompts": len(self.prompts),
            "counts": self.progress["counts"],
            "curves": curves,
            **{key: self.progress[key] for key in ("judge",) if key in self.progress},
        }

    def _rollouts(self, step: int, clock: _Clock) -> RolloutBatch:
        grpo = self.grpo
        chosen = prompt_batch(
            self.config.seed, len(self.prompts), grpo.num_unique_prompts_rollout, step - 1
        )
        rewards = StepRewards(self.config.reward, self.judge, self.rewards)
        total = len(chosen.indices) * grpo.num_samples_per_prompt_rollout
        tell = _Teller(self, step, "generate", "samples_finished")

        def finished(place: int, sample: Sampled) -> None:
            rewards.add(place, sample)
            tell(tell.count + 1, total)

        with clock.time("generate"):
            prompts = [(index, self.prompts[index]) for index in chosen.indices]
            samples = self.sampler.sample(prompts, step=step, on_sample=finished)
        self.boundary.stop_if_asked(step - 1, self.progress)
        with clock.time("judge"):
            results = rewards.results(samples, _Teller(self, step, "judge", "samples_judged"))
        require_scored(results, self.config.judge.max_failed_share, of="rollouts of a step")
        self.boundary.stop_if_asked(step - 1, self.progress)
        return form_groups(
            samples,
            results,
            size=grpo.num_samples_per_prompt_rollout,
            normalization=grpo.advantage_normalization_type,
        )

    def _train_on(self, batch: RolloutBatch, step: int, clock: _Clock) -> dict[str, float]:
        grpo = self.grpo
        samples = batch.train_samples(mask_truncated=grpo.mask_truncated_completions)
        candidates = batch.train_samples(mask_truncated=False)
        factor = schedule_factor(
            step - 1, grpo.num_training_steps, grpo.lr_scheduler_type, grpo.warmup_ratio
        )
        metrics: dict[str, float] = {
            "learning_rate": grpo.learning_rate * factor,
            "samples/trained": len(samples),
            "samples/truncated_masked": len(candidates) - len(samples),
            "optimizer_steps": 0,
        }
        if samples:
            self.tell(step, "update")
            with clock.time("update"):
                metrics.update(self.update.run(samples, step=step, factor=factor))
        return metrics

    def _count(self, step: int, batch: RolloutBatch, metrics: dict[str, float]) -> None:
        """Move the progress on by one step, and add position to the metrics."""
        chosen = prompt_batch(
            self.config.seed, len(self.prompts), self.grpo.num_unique_prompts_rollout, step - 1
        )
        progress = self.progress
        progress["step"] = step
        progress["epoch"] = chosen.epoch
        progress["cursor"] = chosen.cursor + len(chosen.indices)
        progress["episode"] += len(batch.samples)
        progress["tokens"] += sum(len(s.completion.token_ids) for s in batch.samples)
        for name in COUNTS:
            progress["counts"][name] += metrics[name]
        for name in CURVES:
            progress["curves"][name].append(metrics.get(name))  # one entry per step, or None
        metrics.update(training_step=step, episode=progress["episode"], epoch=progress["epoch"])

    def _judge_metrics(self, before: JudgeUsage | None) -> dict[str, float]:
        """What the judge has done since ``before``; adds it to the progress."""
        now = usage_of(self.judge)
        if before is None or now is None:
            return {}
        used = usage_between(before, now)
        known = usage_from_json(self.progress.get("judge", {}))
        self.progress["judge"] = usage_to_json(usage_sum(known, used))
        return usage_metrics(used)

    def tell(self, step: int, phase: str, values: Mapping[str, float] | None = None) -> None:
        """Say where the step is."""
        self.io.progress(Progress(step - 1, self.grpo.num_training_steps, phase, values or {}))


class _Teller:
    """Tells that a part of a step begins, and then how far it is, at most once a second."""

    def __init__(self, run: _GrpoRun, step: int, phase: str, unit: str) -> None:
        self.run, self.step, self.phase, self.unit = run, step, phase, unit
        self.count, self.last_s = 0, time.monotonic()
        run.tell(step, phase)

    def __call__(self, count: int, total: int) -> None:
        self.count, now_s = count, time.monotonic()
        if now_s - self.last_s >= 1.0:
            self.last_s = now_s
            values = {self.unit: float(count), "samples": float(total)}
            self.run.tell(self.step, self.phase, values)


class _Clock:
    """Wall-clock seconds of the parts of one step."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._parts[part] = time.perf_counter() - started

    def metrics(self, tokens: int) -> dict[str, float]:
        total = time.perf_counter() - self._started
        parts = {f"time/{part}_s": seconds for part, seconds in self._parts.items()}
        return {**parts, "time/step_s": total, "tokens_per_second": tokens / total}


def _tokens(batch: RolloutBatch) -> int:
    """Prompt and response tokens of a step, prompts counted once per sample."""
    return sum(len(s.prompt.prompt_ids) + len(s.completion.token_ids) for s in batch.samples)


def _default_generator(engine: Engine, batch_size: int) -> Generator:
    from refiner_core.generation.transformers_backend import TransformersGenerator

    return TransformersGenerator(engine.model, engine.tokenizer, batch_size=batch_size)
