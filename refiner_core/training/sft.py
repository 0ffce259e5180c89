"""Supervised fine-tuning: packed demonstrations to weights, loss on assistant tokens only.

In: ``data_dir/sft_train.parquet`` (and ``sft_val.parquet`` where there is one), a model folder.
Out: ``output_dir/model``, metrics per step, checkpoints, and a JSON-ready report.

The order of rows is a function of (seed, epoch) and every step's packs are planned before the
first one, so that a resumed run is bitwise the uninterrupted one. What is execution (how often to
evaluate or save, recomputing activations) changes no weight.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.types import DemonstrationRow, StageIO
from refiner_core.data.prepared import load_demonstrations
from refiner_core.generation.load import set_threads
from refiner_core.training.boundary import Boundary, curve, require_finite
from refiner_core.training.engine import check_window
from refiner_core.training.engines.choose import open_engine
from refiner_core.training.optim import schedule_factor
from refiner_core.training.order import SftStep, order_hash, sft_steps
from refiner_core.training.packing import (
    Batch,
    Pack,
    Sample,
    build_pack,
    collate,
    pack_samples,
    to_device,
)
from refiner_core.training.ranks import OneRank, Ranks, RanksIO
from refiner_core.training.support import refuse_unsupported

TRAIN_FILE, VALIDATION_FILE = "sft_train.parquet", "sft_val.parquet"


def train_sft(
    config: RecipeConfig,
    *,
    data_dir: Path,
    model_ref: str,
    output_dir: Path,
    io: StageIO | None,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train on demonstrations; resumes from ``io.latest_checkpoint()`` where there is one.

    Parameters
    ----------
    config
        The whole recipe; ``sft``, ``model`` and ``seed`` are used.
    data_dir
        Holds ``sft_train.parquet`` and, optionally, ``sft_val.parquet``.
    model_ref
        Folder or Hub id of the weights to start from.
    output_dir
        Gets ``model/``, an exported folder.
    io
        Metrics, checkpoints, progress and stop requests; rank 0 has it, the other ranks None.
    ranks
        The processes that train together; none is this one alone.

    Returns
    -------
    dict
        ``steps``, ``epochs``, ``tokens``, ``loss_tokens``, ``train_loss`` (first, final, curve) and
        ``validation_loss`` (final, best, best_step, curve; None without a validation set).

    Raises
    ------
    Interrupted
        A stop was asked for; the state is saved.
    StageFailed
        The loss or its gradient is not finite.
    UnsupportedError
        See :func:`refiner_core.training.support.refuse_unsupported`.
    """
    refuse_unsupported(config, "sft")
    run = _SftRun(config, data_dir, model_ref, io, ranks or OneRank())
    with run.boundary:
        run.train()
    run.engine.export(output_dir / "model")
    return run.report()


class _SftRun:
    """The state of one training run; everything that changes is in ``progress`` or the model."""

    def __init__(
        self,
        config: RecipeConfig,
        data_dir: Path,
        model_ref: str,
        io: StageIO | None,
        ranks: Ranks,
    ) -> None:
        sft = config.sft
        set_threads(config.model)
        self.sft, self.io, self.ranks = sft, RanksIO(io, ranks), ranks
        rows = load_demonstrations(data_dir / TRAIN_FILE)
        self.samples = _samples(rows, sft.pack_length)
        self.steps = _plan(config, rows)
        self.engine = open_engine(config, "sft", model_ref, self.ranks)
        check_window(self.engine.model, max(len(row.input_ids) for row in rows))
        self.validation = self._batches(_validation_packs(data_dir / VALIDATION_FILE, sft))
        self.boundary = Boundary(
            *(self.io, self.engine, "sft"),
            *(len(self.steps), sft.save_freq, sft.first_save),
            async_save=sft.async_save,
        )
        data_hash = order_hash([row.sample_id for row in rows])
        self.progress: dict[str, Any] = self.boundary.restore(data_hash) or {
            "data_hash": data_hash,
            "step": 0,
            "tokens": 0,
            "loss_tokens": 0,
            "losses": [],
            "validation": [],
        }

    def train(self) -> None:
        """Every step that is left."""
        self.boundary.stop_if_asked(self.progress["step"], self.progress)
        for index in range(self.progress["step"], len(self.steps)):
            started = time.perf_counter()
            metrics = self._step(index)
            step_s = time.perf_counter() - started
            metrics["time/step_s"] = step_s
            metrics["tokens_per_second"] = metrics.pop("tokens") / step_s
            metrics.update(self.engine.memory())
            metrics.update(self.boundary.metrics())
            step = index + 1
            if self.validation and (step % max(1, self.sft.eval_freq) == 0 or self._is_last(step)):
                loss = self._validation_loss()
                metrics["loss/validation"] = loss
                self.progress["validation"].append([step, loss])
            self.io.log_metrics(step, metrics)
            self.progress["step"] = step
            self.boundary.after(step, self.progress, {"loss": metrics["loss/train_avg"]})

    def report(self) -> dict[str, Any]:
        """What came out, from the progress alone: the same whether or not it was interrupted."""
        losses, validation = self.progress["losses"], self.progress["validation"]
        best = min(validation, key=lambda point: point[1], default=None)
        return {
            "steps": self.progress["step"],
            "epochs": self.steps[-1].epoch + 1,
            "demonstrations": len(self.samples),
            "tokens": self.progress["tokens"],
            "loss_tokens": self.progress["loss_tokens"],
            "train_loss": {"first": losses[0], "final": losses[-1], "curve": curve(losses)},
            "validation_loss": best
            and {
                "final": validation[-1][1],
                "best": best[1],
                "best_step": best[0],
                "curve": validation,
            },
        }

    def _is_last(self, step: int) -> bool:
        return step == len(self.steps)

    def _step(self, index: int) -> dict[str, float]:
        """One optimiser step: mean loss over all loss tokens of all its packs."""
        plan = self.steps[index]
        packs = [build_pack([[self.samples[i]] for i in indices]) for indices in plan.packs]
        loss_tokens = sum(len(pack.target_T) for pack in packs)
        loss = 0.0
        for batch in self._batches(packs):
            if len(batch.target_T):
                part = -self.engine.score(batch).logprob_T.sum() / loss_tokens
                self.engine.backward(part)
                loss += float(part.detach())
        require_finite("sft", index + 1, loss=loss)
        factor = schedule_factor(
            index, len(self.steps), self.sft.lr_scheduler_type, self.sft.warmup_ratio
        )
        norm = self.engine.step(factor)
        require_finite("sft", index + 1, gradient_norm=norm)
        tokens = sum(len(pack) for pack in packs)
        self.progress["tokens"] += tokens
        self.progress["loss_tokens"] += loss_tokens
        self.progress["losses"].append(loss)
        return {
            "training_step": index + 1,
            "epoch": plan.epoch,
            "loss/train_avg": loss,
            "learning_rate": self.sft.learning_rate * factor,
            "grad_norm": norm,
            "tokens": tokens,
        }

    def _batches(self, packs: Sequence[Pack]) -> list[Batch]:
        size = self.sft.per_device_train_batch_size
        return [
            to_device(
                collate(
                    packs[i : i + size], pad_id=self.engine.pad_id, balance=self.engine.balance
                ),
                self.engine.device,
            )
            for i in range(0, len(packs), size)
        ]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _validation_loss(self) -> float:
        total = sum(
            -float(self.engine.score(batch).logprob_T.double().sum()) for batch in self.validation
        )
        loss = total / sum(len(batch.target_T) for batch in self.validation)
        require_finite("sft", self.progress["step"] + 1, validation_loss=loss)
        return loss


def _plan(config: RecipeConfig, rows: Sequence[DemonstrationRow]) -> list[SftStep]:
    sft = config.sft
    steps = sft_steps(
        config.seed,
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
            fix="look at the data stage's counts, or raise sft.num_train_epochs",
        )
    return steps


def _samples(rows: Sequence[DemonstrationRow], pack_length: int) -> list[Sample]:
    long = [row for row in rows if len(row.input_ids) > pack_length]
    if long:
        longest = max(long, key=lambda row: len(row.input_ids))
        raise ConfigurationError(
            f"{len(long)} demonstrations are longer than a pack of {pack_length} tokens "
            f"(the longest, {longest.sample_id}, has {len(longest.input_ids)})",
            expected="sft.pack_length as long as the longest demonstration",
            fix=f"set sft.pack_length={len(longest.input_ids)} or more",
        )
    return [Sample((), row.input_ids, row.loss_mask) for row in rows]


def _validation_packs(path: Path, sft: SftConfig) -> list[Pack]:
    if not path.exists():
        return []
    samples = _samples(load_demonstrations(path), sft.pack_length)
    packs = pack_samples(samples, sft.pack_length)
    return [pack for pack in packs if pack.target_T]
