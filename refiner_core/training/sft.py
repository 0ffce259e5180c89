"""Supervised fine-tuning: packed demonstrations to weights, loss on assistant tokens only.

``rft`` is the same on the model's own accepted attempts (:mod:`refiner_core.rejection`), with its
own section.

In: ``data_dir/sft_train.parquet`` (and ``sft_val.parquet`` if it exists), a model folder.
Out: ``output_dir/model``, metrics per step, checkpoints, and a JSON-ready report.

The order of rows is a function of (seed, epoch), and all packs are planned before the first step,
so that a resumed run is bitwise the uninterrupted one. Execution fields (intervals of evaluation
and saves, recomputing activations) change no weight. With several ranks a step's packs are
divided, and the loss is one sum over all of them; only the order of sums differs.

Measurements per step: ``time/update_s`` (forward, backward, step), ``time/validate_s``,
``time/save_s`` (training paused for a save), ``time/idle_s`` (the rest), and their
sum ``time/step_s``; ``tokens_per_second`` is over the update alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.errors import DataError, HealthStop
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.placement import refuse_unsupported, sft_section
from refiner_core.contract.types import DemonstrationRow, Progress, StageIO
from refiner_core.data.prepared import load_demonstrations
from refiner_core.generation.completions import check_positions
from refiner_core.generation.load import set_threads
from refiner_core.training.batches import (
    OWN_ROW,
    Batch,
    Pack,
    Sample,
    SftStep,
    build_pack,
    order_hash,
    pack_samples,
    sft_steps,
    share_packs,
)
from refiner_core.training.engines.plain import open_engine
from refiner_core.training.model.loading import check_window
from refiner_core.training.model.optim import schedule_factor
from refiner_core.training.ranks import Ranks, RanksIO
from refiner_core.training.steps.checkpoint_manager import CheckpointManager, curve
from refiner_core.training.steps.health import HealthMonitor, not_finite

TRAIN_FILE, VALIDATION_FILE = "sft_train.parquet", "sft_val.parquet"


def train_sft(
    config: RecipeConfig,
    *,
    data_dir: Path,
    model_ref: str,
    output_dir: Path,
    io: StageIO | None,
    ranks: Ranks | None = None,
    stage: str = "sft",
) -> dict[str, Any]:
    """Train on demonstrations; resumes from ``io.latest_checkpoint()`` if there is one.

    Parameters
    ----------
    config
        The whole recipe; the section of ``stage``, ``model`` and ``seed`` are used.
    data_dir
        Holds ``sft_train.parquet`` and, optionally, ``sft_val.parquet``.
    model_ref
        Folder or Hub id of the weights to start from.
    output_dir
        Destination of ``model/``, an exported folder.
    io
        Metrics, checkpoints, progress and stop requests; None on ranks other than 0.
    ranks
        The processes that train together; None: this process alone.
    stage
        The section's name, also used in boundaries, checks and errors.

    Returns
    -------
    dict
        ``steps``, ``epochs``, ``tokens``, ``loss_tokens``, ``train_loss`` (first, final, curve) and
        ``validation_loss`` (final, best, best_step, curve; None without a validation set).

    Raises
    ------
    Interrupted
        A stop was requested; the state is saved.
    HealthStop
        A health check with policy `stop` fired; the state before the step is saved.
    StageFailed
        The loss or its gradient is not finite.
    UnsupportedError
        See :func:`refiner_core.contract.placement.refuse_unsupported`.
    """
    refuse_unsupported(config, stage)
    run = _SftRun(config, stage, data_dir, model_ref, io, ranks or Ranks())
    with run.checkpoints:
        run.train()
    run.io.progress(Progress(len(run.steps), len(run.steps), "export"))
    run.engine.export(output_dir / "model")
    return run.report()


class _SftRun:
    """The state of one training run; everything that changes is in ``progress`` or the model."""

    def __init__(
        self,
        config: RecipeConfig,
        stage: str,
        data_dir: Path,
        model_ref: str,
        io: StageIO | None,
        ranks: Ranks,
    ) -> None:
        sft = sft_section(config, stage)
        set_threads(config.model)
        self.stage: str = stage
        self.sft, self.io, self.ranks = sft, RanksIO(io, ranks), ranks
        rows = load_demonstrations(data_dir / TRAIN_FILE)
        self.samples = _samples(rows)
        self.steps = _plan(config.seed, sft, rows, stage)
        self.engine = open_engine(config, stage, model_ref, self.ranks)
        longest = max(len(row.input_ids) for row in rows)
        check_window(self.engine.model, longest)
        check_positions(self.engine.model.config.get_text_config().to_dict(), longest)
        self.validation_packs = _validation_packs(
            data_dir / VALIDATION_FILE, sft, OWN_ROW if self.engine.balance == OWN_ROW else None
        )
        self.validation = self._batches(self.validation_packs)
        self.checkpoints = CheckpointManager(
            *(self.io, self.engine, stage),
            *(len(self.steps), sft.save_freq, sft.first_save),
            async_save=sft.async_save,
        )
        data_hash = order_hash([row.sample_id for row in rows])
        self.progress: dict[str, Any] = self.checkpoints.restore(data_hash) or {
            "data_hash": data_hash,
            "step": 0,
            "tokens": 0,
            "loss_tokens": 0,
            "losses": [],
            "validation": [],
        }
        self.health = HealthMonitor(sft.health, stage, says=self.ranks.rank == 0)
        self.health.restore(self.progress.get("health"))

    def train(self) -> None:
        """Run all remaining steps."""
        self.checkpoints.stop_if_requested(self.progress["step"], self.progress)
        began = time.perf_counter()
        for index in range(self.progress["step"], len(self.steps)):
            step = index + 1
            self._report(index, "train")
            started = time.perf_counter()
            try:
                metrics = self._step(index)
            except HealthStop:
                self.checkpoints.save(index, self.progress)
                raise
            times = {"time/update_s": time.perf_counter() - started}
            metrics["tokens_per_second"] = metrics.pop("tokens") / times["time/update_s"]
            started = time.perf_counter()
            due = step % max(1, self.sft.eval_freq) == 0 or step == len(self.steps)
            if self.validation_packs and due:
                self._report(index, "validate")
                loss = self._validation_loss()
                metrics["loss/validation"] = loss
                self.progress["validation"].append([step, loss])
                times["time/validate_s"] = time.perf_counter() - started
            times.update(self.checkpoints.metrics())
            now = time.perf_counter()
            metrics.update(_split(times, now - began))
            began = now
            metrics.update(self.engine.memory())
            metrics.update(self.health.metrics())
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self.io.log_metrics(step, metrics)
            self.progress["health"] = self.health.state()
            self.progress["step"] = step
            known = "loss/train_avg" in metrics
            shown = {"loss": metrics["loss/train_avg"]} if known else {}
            self.checkpoints.after(step, self.progress, shown)

    def _report(self, step: int, phase: str) -> None:
        self.io.progress(Progress(step, len(self.steps), phase))

    def report(self) -> dict[str, Any]:
        """The report, computed from the progress alone: equal with or without interruptions."""
        losses, validation = self.progress["losses"], self.progress["validation"]
        known = [loss for loss in losses if loss is not None]  # a skipped step may have none
        best = min(validation, key=lambda point: point[1], default=None)
        return {
            "steps": self.progress["step"],
            "epochs": self.steps[-1][0] + 1,
            "demonstrations": len(self.samples),
            "tokens": self.progress["tokens"],
            "loss_tokens": self.progress["loss_tokens"],
            "train_loss": known and {"first": known[0], "final": known[-1], "curve": curve(losses)},
            "validation_loss": best
            and {
                "final": validation[-1][1],
                "best": best[1],
                "best_step": best[0],
                "curve": validation,
            },
        }

    def _step(self, index: int) -> dict[str, float]:
        """One optimiser step: mean loss over all loss tokens of all packs of all ranks."""
        epoch, planned = self.steps[index]
        if self.engine.balance == OWN_ROW:  # rows are padded: similar lengths belong together
            samples = [self.samples[i] for indices in planned for i in indices]
            packs = pack_samples(samples, self.sft.pack_length, balance=OWN_ROW)
        else:
            packs = [build_pack([[self.samples[i]] for i in indices]) for indices in planned]
        loss_tokens = sum(len(pack.target_T) for pack in packs)
        loss = 0.0
        for batch in self._batches(packs):
            if len(batch.target_T) or self.ranks.world > 1:  # all ranks run it together
                part = -self.engine.score(batch).logprob_T.sum() / max(1, loss_tokens)
                self.engine.backward(part)
                loss += float(part.detach())
        [loss] = self.ranks.add([loss])
        factor = schedule_factor(
            index, len(self.steps), self.sft.lr_scheduler_type, self.sft.warmup_ratio
        )
        norm = self.engine.gradient_norm()
        self.health.begin(index + 1)
        if self.health.before_update(loss=loss, grad_norm=norm):
            self.engine.drop()
        else:
            self.engine.step(factor)
        tokens = sum(len(pack) for pack in packs)
        self.progress["tokens"] += tokens
        self.progress["loss_tokens"] += loss_tokens
        self.progress["losses"].append(loss if math.isfinite(loss) else None)
        return {
            "training_step": index + 1,
            "epoch": epoch,
            "loss/train_avg": loss,
            "learning_rate": self.sft.learning_rate * factor,
            "grad_norm": norm,
            "tokens": tokens,
        }

    def _batches(self, packs: Sequence[Pack]) -> list[Batch]:
        """This rank's share, in the same number of forward passes on every rank."""
        size, balance = self.sft.per_device_train_batch_size, self.engine.balance
        if not packs:
            return []
        shares = share_packs(packs, self.ranks.world, balance=balance, multiple_of=size)
        return list(self.engine.batches(shares[self.ranks.rank], size))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _validation_loss(self) -> float:
        mine = sum(
            -float(self.engine.score(batch).logprob_T.double().sum()) for batch in self.validation
        )
        [total] = self.ranks.add([mine])
        loss = total / sum(len(pack.target_T) for pack in self.validation_packs)
        if not math.isfinite(loss):
            step = self.progress["step"] + 1
            raise not_finite(f"{self.stage} step {step}: the validation loss is {loss}")
        return loss


def _split(times: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Seconds from one logged step to the next, by part; the remainder is idle time."""
    busy = ("time/update_s", "time/validate_s", "time/save_s")
    idle = max(0.0, step_s - sum(times.get(name, 0.0) for name in busy))
    return {**times, "time/step_s": step_s, "time/idle_s": idle}


def _plan(seed: int, sft: SftConfig, rows: Sequence[DemonstrationRow], stage: str) -> list[SftStep]:
    steps = sft_steps(
        seed,
        [len(row.input_ids) for row in rows],
        pack_length=sft.pack_length,
        packs_per_step=sft.per_device_train_batch_size * sft.gradient_accumulation_steps,
        epochs=sft.num_train_epochs,
        max_steps=sft.max_train_steps,
    )
    if not steps:
        raise DataError(
            f"There is nothing to train on: {len(rows)} demonstrations, "
            f"{sft.num_train_epochs} epochs, max_train_steps {sft.max_train_steps}",
            expected="at least one optimiser step",
            fix=f"check the counts of `{KINDS[stage].learns_from}`, or raise "
            f"{stage}.num_train_epochs",
        )
    return steps


def _samples(rows: Sequence[DemonstrationRow]) -> list[Sample]:
    return [Sample((), row.input_ids, row.loss_mask) for row in rows]


def _validation_packs(path: Path, sft: SftConfig, balance: float | None) -> list[Pack]:
    if not path.exists():
        return []
    packs = pack_samples(_samples(load_demonstrations(path)), sft.pack_length, balance=balance)
    return [pack for pack in packs if pack.target_T]
