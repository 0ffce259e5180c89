"""Group-relative policy optimisation (GRPO): the training loop.

In: ``data_dir/rl_train.parquet``, a model folder, a judge. Out: ``output_dir/model``, metrics and
rollouts per step, checkpoints, and a JSON-ready report.

One step: prompts (an epoch's shuffle) -> samples (seeded by their identity) -> rewards ->
advantages -> packs -> one or more optimiser steps -> metrics and rollouts stored -> checkpoint if
due. A step without spread in any group changes no weight, but is counted and logged. A streaming
judge scores finished samples while others are decoded; ``time/judge_s`` is the wait for it after
the last sample. With ``async_steps`` the next batches are sampled meanwhile, by older weights
(:mod:`refiner_core.training.rollouts.pipeline`).

Resume is exact: a step depends on the seed, its number and the checkpoint alone, which includes the
rollouts in flight. A stop requested before a step's update abandons the step and saves the state
before it. With ``async_steps`` a save waits for the running sampling.

With several ranks, rank 0 has the judge and IO; all ranks share every decision and error.
Measurements go under ``time/``, ``tokens_per_second``, ``memory/`` and ``judge/``; no other metric
depends on a clock or on earlier runs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import (
    EnvironmentOutage,
    HealthStop,
    Interrupted,
    JudgeOutage,
    WorkspaceError,
)
from refiner_core.contract.monitoring import monitors
from refiner_core.contract.placement import refuse_unsupported
from refiner_core.contract.types import Generator, Judge, JudgeUsage, Progress, PromptRow, StageIO
from refiner_core.data.prepared import load_prompts
from refiner_core.generation.completions import check_positions
from refiner_core.generation.load import set_threads
from refiner_core.judges.context import usage_from_json, usage_metrics, usage_sum, usage_to_json
from refiner_core.samples import judge_meter
from refiner_core.training.batches import order_hash, prompt_batch
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.export import progress_report
from refiner_core.training.model import loading
from refiner_core.training.model.optim import schedule_factor
from refiner_core.training.monitor import Gold, GoldMonitor
from refiner_core.training.ranks import Ranks, RanksIO, on_all, on_first
from refiner_core.training.rollouts.pipeline import IN_FLIGHT, PendingBatch, Pipeline
from refiner_core.training.rollouts.policies import CopyPolicy, OpenServers, Policy, ServedPolicy
from refiner_core.training.rollouts.rollout import RolloutBatch, TrainSample, own_tokens
from refiner_core.training.rollouts.single_turn import Attempts, SingleTurnTask, longest_of
from refiner_core.training.steps.checkpoint_manager import (
    CheckpointManager,
    StepTimer,
    progress_reporter,
)
from refiner_core.training.updates import GrpoUpdate

if TYPE_CHECKING:
    from refiner_core.environments.protocol import Environment

log = logging.getLogger(__name__)

TRAIN_FILE, TEST_FILE = "rl_train.parquet", "rl_test.parquet"
#: Metrics whose curves the report keeps.
CURVES = ("scores", "objective/kl3_avg", "val/sequence_lengths", "val/stop_rate")
#: Counts whose sums the report keeps.
COUNTS = (
    "groups/kept",
    "groups/dropped_zero_std",
    "groups/dropped_too_few_scored",
    "samples/unscored",
    "samples/malformed",
    "samples/truncated_masked",
    "samples/dropped_stale",
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
    ranks: Ranks | None = None,
    open_servers: OpenServers | None = None,
    environment: Environment | None = None,
    golds: Sequence[Gold] = (),
) -> dict[str, Any]:
    """Train on rewards; resumes from ``io.latest_checkpoint()`` if there is one.

    Parameters
    ----------
    config
        The whole recipe; ``grpo``, ``reward``, ``judge``, ``model`` and ``seed`` are used.
    data_dir
        Holds ``rl_train.parquet``.
    model_ref
        Folder or Hub id of the weights to start from; they are also the KL reference.
    output_dir
        Destination of ``model/``, an exported folder.
    io
        Metrics, rollouts, checkpoints, progress and stop requests; None on ranks other than 0.
    judge
        Scores rubrics and citations; None on ranks other than 0. For a recipe with an environment,
        rank 0 has one only if ``environment.nl_assertions`` needs it.
    generator
        For tests; default: transformers over the live model (with ``async_steps``, a copy of it).
    ranks
        The processes that train together; None: this process alone.
    open_servers
        Starts the servers of ``generation_backend=vllm``; None on ranks other than 0, unless there
        are servers on several nodes.
    environment
        For tests; default: the recipe's, opened on every rank that samples.
    golds
        Gold judges of the monitor; none on ranks other than 0.

    Returns
    -------
    dict
        ``steps``, ``episodes``, ``tokens`` (sampled), ``counts`` and ``curves``; with a judge that
        counts, ``judge``: its usage in the steps that led here, without abandoned steps; with a
        monitor, ``monitor``: its series.

    Raises
    ------
    Interrupted
        A stop was requested; the state is saved.
    JudgeOutage
        Too many rollouts of a step could not be scored, or the judge was unavailable for too
        long; the state before the step is saved.
    EnvironmentOutage
        Errors of the environment or its user ended too many of a step's episodes; the state before
        the step is saved.
    StageFailed
        A loss or gradient is not finite, or a health check with policy `stop` fired.
    MonitorPause
        The monitor raised its alarm, with the action `pause`; the state is saved.
    UnsupportedError
        See :func:`refiner_core.contract.placement.refuse_unsupported`.
    """
    refuse_unsupported(config, "grpo")
    set_threads(config.model)
    ranks = ranks or Ranks()
    # Episodes are rewarded by their environment, which may ask a judge.
    asks = not config.environment.name or config.environment.nl_assertions == "judge"
    if (judge is not None and ranks.rank > 0) or (judge is None and asks and ranks.rank == 0):
        raise ValueError("rank 0, and no other, has the judge")
    prompts = load_prompts(data_dir / TRAIN_FILE)
    prompt_batch(config.seed, len(prompts), config.grpo.num_unique_prompts_rollout, 0)
    samples = ranks.rank == 0 or config.grpo.generation_backend != "vllm"
    turn_task = open_turns(config, judge=judge, environment=environment, samples=samples)
    turn_task.check(prompts)
    with ExitStack() as stack:
        engine = open_engine(config, "grpo", model_ref, ranks)
        text = engine.model.config.get_text_config().to_dict()
        check_positions(text, longest_of(turn_task, prompts, config.grpo))
        policy = _open_policy(config, engine, model_ref, generator, open_servers, stack)
        reference = engine.reference(model_ref) if config.grpo.beta else None
        update = GrpoUpdate(engine, reference, config.grpo, config.seed, longest=turn_task.longest)
        run = _GrpoRun(config, prompts, update, policy, RanksIO(io, ranks), judge, turn_task)
        stack.callback(run.rollouts.close)
        if monitors(config):
            held_out = load_prompts(data_dir / TEST_FILE)
            series = run.progress.setdefault("monitor", {})
            run.monitor = GoldMonitor(config, held_out, run.rollouts, ranks, judge, golds, series)
        with run.checkpoints:
            run.train()
        run.take_best()
        steps = config.grpo.num_training_steps
        run.io.progress(Progress(steps, steps, "export"))
        engine.export(output_dir / "model")
        if run.monitor is not None:
            run.io.keep_checkpoints(run.monitor.kept_at_end)
        return run.report()


def _open_policy(
    config: RecipeConfig,
    engine: Engine,
    model_ref: str,
    generator: Generator | None,
    open_servers: OpenServers | None,
    stack: ExitStack,
) -> Policy:
    """The sampler: the given generator, servers, or transformers."""
    from refiner_core.generation.transformers_backend import TransformersGenerator

    batch_size = config.grpo.generation_batch_size
    if generator is not None:
        return Policy(generator, engine.whole)
    if config.grpo.generation_backend == "vllm":
        assert open_servers is not None or engine.ranks.rank, "rank 0 opens the servers"
        start = open_servers or (lambda _: nullcontext())
        opened: Any = on_all(engine.ranks, lambda: stack.enter_context(start(engine)))
        return ServedPolicy(opened) if engine.ranks.rank == 0 else ServedPolicy(None, opened)
    if not config.grpo.async_steps:
        live = TransformersGenerator(engine.model, engine.tokenizer, batch_size=batch_size)
        return Policy(live, engine.whole)
    return CopyPolicy(
        loading.load_model(model_ref, config.model, engine.device),
        lambda model, on_step: TransformersGenerator(
            model, engine.tokenizer, batch_size=batch_size, on_step=on_step
        ),
    )


class _Rollouts(NamedTuple):
    """A step's rollouts as known on all ranks: training samples, and numbers."""

    samples: list[TrainSample]
    candidates: int
    metrics: dict[str, float]
    size: int
    response_tokens: int
    tokens: int
    attempts: Attempts


class _GrpoRun:
    """The state of one training run; everything that changes is in ``progress``, the model, the
    health monitor (whose state is part of progress), or in flight."""

    def __init__(
        self,
        config: RecipeConfig,
        prompts: Sequence[PromptRow],
        update: GrpoUpdate,
        policy: Policy,
        io: RanksIO,
        judge: Judge | None,
        turn_task: SingleTurnTask,
    ) -> None:
        grpo = config.grpo
        self.config, self.grpo, self.judge, self.turn_task = config, grpo, judge, turn_task
        self.prompts, self.update, self.engine = prompts, update, update.engine
        self.io, self.ranks, self.health = io, io.ranks, update.health
        self.step = 0
        self.monitor: GoldMonitor | None = None
        self.batch: RolloutBatch | None = None  # of the current step; rank 0 only
        self.rollouts = Pipeline(
            *(config, prompts, self.engine, policy, turn_task),
            progress_reporter(self._report, turns=bool(config.environment.name)),
        )
        self.checkpoints = CheckpointManager(
            *(self.io, self.engine, "grpo"),
            *(grpo.num_training_steps, grpo.save_freq, grpo.first_save),
            async_save=grpo.async_save,
        )
        data_hash = order_hash([row.sample_id for row in prompts])
        self.progress: dict[str, Any] = self.checkpoints.restore(data_hash) or {
            "data_hash": data_hash,
            "step": 0,
            "epoch": 0,
            "cursor": 0,
            "episode": 0,
            "tokens": 0,
            "counts": dict.fromkeys((*COUNTS, *turn_task.counts), 0),
            "curves": {name: [] for name in (*CURVES, *turn_task.curves)},
        }
        turn_task.restore(self.progress)
        self.health.restore(self.progress.get("health"))
        position = (self.progress["epoch"], self.progress["cursor"])
        kept = self.checkpoints.attachment(IN_FLIGHT)
        self.rollouts.begin(self.progress["step"], position, kept, str(self.checkpoints.restored))

    def train(self) -> None:
        """Run all remaining steps."""
        self._stop_if_requested(self.progress["step"])
        self._look(self.progress["step"], {})
        for step in range(self.progress["step"] + 1, self.grpo.num_training_steps + 1):
            if self._stopped():
                break
            self.step, clock, usage = step, StepTimer(), judge_meter(self.judge)
            self.update.moved = 0
            self.health.begin(step)
            with self._saved_before(step):
                rollouts, pending = self._rollouts(step, clock)
                metrics = {**rollouts.metrics, **self._train_on(rollouts, step, clock)}
            metrics.update(self._judge_metrics(usage()))
            self._count(step, pending, rollouts, metrics)
            beside = pending.seconds if self.grpo.async_steps else None
            metrics.update(self.health.metrics())
            metrics.update(clock.metrics(rollouts.tokens, beside=beside))
            metrics.update(self.engine.memory())
            metrics.update(self.checkpoints.metrics())
            if self.batch is not None:
                self.io.save_rollouts(step, self.turn_task.rows(step, self.batch))
            self._look(step, metrics)
            if self._stopped():
                break
            shown = {name: metrics[name] for name in ("scores",) if name in metrics}
            self.checkpoints.after(step, self.progress, shown, partial(self._in_flight, step))

    def report(self) -> dict[str, Any]:
        """The report, computed from the progress alone: equal with or without interruptions."""
        monitored = {} if self.monitor is None else self.monitor.report()
        return {
            **progress_report(self.progress),
            "prompts": len(self.prompts),
            **self.turn_task.report(),
            **monitored,
        }

    # ------------------------------------------------------------ one step

    def _rollouts(self, step: int, clock: StepTimer) -> tuple[_Rollouts, PendingBatch]:
        """The step's rollouts, judged; starts further batches meanwhile."""
        pending = self.rollouts.take(step, clock)
        self._stop_if_requested(step - 1)
        self.rollouts.ahead(step, clock)
        self.rollouts.judge(pending, clock)
        self._stop_if_requested(step - 1)
        return on_first(self.ranks, lambda: self._grouped(pending)), pending

    def _grouped(self, pending: PendingBatch) -> _Rollouts:
        """Groups and advantages, on rank 0."""
        grpo, turn_task = self.grpo, self.turn_task
        self.batch = batch = turn_task.groups(pending.samples, pending.results)
        metrics = {
            **turn_task.metrics(batch),
            "samples/dropped_stale": self.rollouts.dropped_stale,
            "val/policy_age": pending.age,
        }
        if grpo.active_sampling:
            metrics["groups/sampling_rounds"] = len(pending.rounds)
        lengths = [len(s.completion.token_ids) for s in batch.samples]
        return _Rollouts(
            batch.train_samples(mask_truncated=grpo.mask_truncated_completions),
            len(batch.train_samples(mask_truncated=False)),
            metrics,
            len(batch.samples),
            sum(sum(own_tokens(sample.completion)) for sample in batch.samples),
            sum(lengths) + sum(len(s.prompt.prompt_ids) for s in batch.samples),
            turn_task.attempts(batch),
        )

    def _train_on(self, rollouts: _Rollouts, step: int, clock: StepTimer) -> dict[str, float]:
        grpo, samples = self.grpo, rollouts.samples
        factor = schedule_factor(
            step - 1, grpo.num_training_steps, grpo.lr_scheduler_type, grpo.warmup_ratio
        )
        metrics: dict[str, float] = {
            "learning_rate": grpo.learning_rate * factor,
            "samples/trained": len(samples),
            "samples/truncated_masked": rollouts.candidates - len(samples),
            "optimizer_steps": 0,
        }
        skip = self.health.after_rollouts(
            groups_with_spread=int(rollouts.metrics["groups/kept"]),
            truncated_share=1.0 - rollouts.metrics["val/stop_rate"],
        )
        if samples and not skip:
            self._report("update", {})
            with clock.time("update"):
                metrics.update(self.update.run(samples, step=step, factor=factor))
        return metrics

    def _count(
        self, step: int, pending: PendingBatch, rollouts: _Rollouts, metrics: dict[str, float]
    ) -> None:
        """Advance the progress by one step, and add the position to the metrics."""
        progress = self.progress
        progress["step"] = step
        progress["epoch"], progress["cursor"] = pending.epoch, pending.cursor
        progress["episode"] += rollouts.size
        progress["tokens"] += rollouts.response_tokens
        progress["health"] = self.health.state()
        self.turn_task.count(progress, rollouts.attempts)
        for name in (*COUNTS, *self.turn_task.counts):
            progress["counts"][name] = progress["counts"].get(name, 0) + metrics[name]
        for name in (*CURVES, *self.turn_task.curves):  # one entry per step; None without a number
            value = metrics.get(name, math.nan)
            progress["curves"][name].append(value if math.isfinite(value) else None)
        metrics.update(training_step=step, episode=progress["episode"], epoch=progress["epoch"])
        self.rollouts.done(step)

    # ------------------------------------------------------------ monitor

    def _stopped(self) -> bool:
        return self.monitor is not None and self.monitor.stopped

    def _look(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step, with the monitor's look at its weights if it is due, and act on an alarm."""
        monitor, attachments = self.monitor, partial(self._in_flight, step, judged=False)
        try:
            if monitor is not None and monitor.due(step):
                metrics.update(monitor.observe(step))
                self.io.keep_checkpoints(monitor.kept)
                self.checkpoints.also = monitor.state["best"]
        except (JudgeOutage, Interrupted) as error:
            self._log(step, metrics)
            if isinstance(error, JudgeOutage) and self.config.monitor.action == "warn":
                log.warning("the monitor does not look at step %d: %s", step, error)
                return
            self.checkpoints.save(step, self.progress, attachments)
            raise
        self._log(step, metrics)
        # A pause that is in no checkpoint would be repeated.
        if monitor is None or not (monitor.stopped or monitor.pauses(step)):
            return
        if monitor.stopped or step > self.checkpoints.saved_step:
            monitor.state["handled"] = True
            self.checkpoints.save(step, self.progress, attachments)
            monitor.act(step)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if step and metrics:
            self.io.log_metrics(step, metrics)

    def take_best(self) -> None:
        """After a stop by the monitor, load the weights that gold liked best."""
        if self.monitor is None or not self.monitor.stopped:
            return
        best, now = self.monitor.state["best"], self.progress["step"]
        if best != now:
            kept = self.io.keep_checkpoints([best])
            if not kept:
                raise WorkspaceError(
                    f"The checkpoint of step {best}, which gold liked best, is gone",
                    expected="the checkpoint that the monitor keeps",
                    fix="remove the stage to train it again",
                )
            self.engine.restore(kept[0].path)

    # ------------------------------------------------------------ checkpoints

    @contextmanager
    def _saved_before(self, step: int) -> Iterator[None]:
        """Save the state before the step if the block ends before the step's update."""
        try:
            yield
        except (JudgeOutage, EnvironmentOutage, Interrupted, HealthStop):
            if not self.update.moved and self.rollouts.savable(step - 1):
                attachments = partial(self._in_flight, step - 1, judged=False)
                self.checkpoints.save(step - 1, self.progress, attachments)
            raise

    def _stop_if_requested(self, step: int) -> None:
        attachments = partial(self._in_flight, step, judged=False)
        self.checkpoints.stop_if_requested(step, self.progress, attachments)

    def _in_flight(self, step: int, *, judged: bool | None = None) -> Mapping[str, bytes]:
        """The rollouts in flight; after a stop request there may be no time to wait for the
        judge."""
        if self.grpo.async_steps == 0:
            return {}
        return self.rollouts.dump(
            step, judged=not self.io.should_stop() if judged is None else judged
        )

    # ------------------------------------------------------------ reporting

    def _judge_metrics(self, used: JudgeUsage | None) -> dict[str, float]:
        """Metrics of the judge's usage in a step, which is also added to the progress."""
        if used is None:
            return {}
        known = usage_from_json(self.progress.get("judge", {}))
        self.progress["judge"] = usage_to_json(usage_sum(known, used))
        return usage_metrics(used)

    def _report(self, part: str, values: Mapping[str, float]) -> None:
        """Report the position within the step."""
        self.io.progress(Progress(self.step - 1, self.grpo.num_training_steps, part, values))


def open_turns(
    config: RecipeConfig, *, judge: Judge | None, environment: Environment | None, samples: bool
) -> SingleTurnTask:
    """The lane of a recipe.

    Parameters
    ----------
    environment
        The environment to use; None opens the recipe's, if it has one and this rank ``samples``.

    Raises
    ------
    ConfigurationError, UnsupportedError
        See :func:`refiner_core.environments.registry.open_environment`.
    """
    if not config.environment.name:
        return SingleTurnTask(config, judge)
    from refiner_core.training.rollouts.multi_turn import MultiTurnTask

    return MultiTurnTask(config, judge, environment, samples=samples)
