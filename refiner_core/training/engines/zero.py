"""DeepSpeed: ZeRO-1 to 3 share optimiser states, gradients and weights out over the ranks.

In: a training stage's section and the ranks. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

DeepSpeed is asked for what it does well (partitioning, gathering, reducing, stepping) and for
nothing else: batches, loss scales, schedules, norms that are not finite, and checkpoints are ours,
the same as in plain torch. Points to know:

* Gradients are summed over packs and over ranks in float32; DeepSpeed averages over ranks, so a
  loss is multiplied by their number first.
* DeepSpeed must know before a backward pass whether it is the step's last. A loop tells by asking
  for the norm or the step, so a backward pass is put off until what comes next is known.
* A model is loaded whole on each rank's device and checked there before it is taken apart.
* Weights are read whole inside :meth:`ZeroEngine.whole` only.

DeepSpeed is imported when the first engine is opened: that takes seconds.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from refiner_core.contract.config import GrpoConfig, ModelConfig, SftConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.training.batches.packing import Batch
from refiner_core.training.engines import zero_steps
from refiner_core.training.engines.plain import FrozenModel
from refiner_core.training.engines.together import (
    evaluating,
    most_of_all,
    on_first_rank,
    require_equal_weights,
)
from refiner_core.training.engines.zero_state import ZeroState, gathered
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import Entropy, ScoringModel, TokenScores
from refiner_core.training.model.optim import adamw, parameter_groups, trainable
from refiner_core.training.ranks import Ranks
from refiner_core.training.state import checkpoint
from refiner_core.training.state.host_copies import HostCopies

log = logging.getLogger(__name__)

#: Numbers that DeepSpeed gathers or reduces at once.
BUCKET_ELEMENTS = 200_000_000


def open_zero_engine(
    section: SftConfig | GrpoConfig,
    config: ModelConfig,
    model_ref: str,
    ranks: Ranks,
    device: Any,
) -> ZeroEngine:
    """The model of ``model_ref`` under ``section.deepspeed_stage``, which is 1, 2 or 3.

    Raises
    ------
    UnsupportedError
        DeepSpeed is not installed, or cannot be used here.
    """
    stage = int(section.deepspeed_stage or 0)
    deepspeed = _import_deepspeed(device)
    _join_process_group(device)
    loaded = loading.load_for_training(model_ref, config, device, reentrant=stage == 3)
    groups = parameter_groups(loaded.model)
    weights = trainable(loaded.model)
    width = loaded.model.config.get_text_config().hidden_size
    settings = deepspeed_settings(
        stage=stage,
        bf16=config.dtype == "bfloat16",
        max_grad_norm=section.max_grad_norm,
        hidden_size=width,
        cuda=device.type == "cuda",
        offload_optimizer=section.offload_optimizer,
        offload_param=section.offload_param,
    )
    optimizer = adamw(groups, weights, section.learning_rate, section.weight_decay)
    module = ScoringModel(loaded.model)
    module.train(loaded.model.training)
    said = io.StringIO()
    with redirect_stdout(said):  # it prints how much memory the machine has, and more
        wrapped, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )
    log.debug("DeepSpeed: %s", said.getvalue())
    wrapped.module.train(loaded.model.training)
    state = ZeroState(loaded.model, wrapped, groups, stage)
    return ZeroEngine(loaded, wrapped, state, config, ranks, section.learning_rate)


def deepspeed_settings(
    *,
    stage: int,
    bf16: bool,
    max_grad_norm: float,
    hidden_size: int,
    cuda: bool,
    offload_optimizer: bool = False,
    offload_param: bool = False,
) -> dict[str, Any]:
    """What DeepSpeed is told, as the dictionary that it takes for a file."""
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": cuda,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if stage == 3:
        zero |= {
            # Vectors stay whole everywhere; matrices do not, however small.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS // 4,
            "memory_efficient_linear": False,  # it would replace torch's own for the whole process
        }
        if offload_param:
            zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    return {
        "train_micro_batch_size_per_gpu": 1,  # losses are weighted by us
        "gradient_accumulation_steps": 1,  # and boundaries are set by us
        "gradient_clipping": max(0.0, max_grad_norm),
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the CPU, unbuilt
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


class ZeroEngine:
    """A model that DeepSpeed shares out."""

    def __init__(
        self,
        loaded: loading.Loaded,
        wrapped: Any,
        state: ZeroState,
        config: ModelConfig,
        ranks: Ranks,
        learning_rate: float,
    ) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.share_prompts, self.balance = loaded.share_prompts, loaded.balance
        self.pad_id, self.ranks = loaded.pad_id, ranks
        self._wrapped, self._state, self._config = wrapped, state, config
        self._device, self._learning_rate = wrapped.device, learning_rate
        self._copies = HostCopies()
        self._pending: Any = None  # a loss whose backward pass was put off
        self._last: tuple[Batch, float, Entropy] | None = None
        self._begun = self._reduced = False
        self._norm: float | None = None

    @property
    def device(self) -> Any:
        """This rank's device."""
        return self._device

    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        self._run_pending(last=False)
        if torch.is_grad_enabled():
            self._last = (batch, temperature, entropy)
            return TokenScores(*self._wrapped(batch, temperature, entropy))
        with evaluating(self._wrapped.module):  # nothing to recompute
            return TokenScores(*self._wrapped(batch, temperature, entropy))

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss, before anything else happens to them."""
        if self._reduced:
            raise RuntimeError("gradients were summed over the ranks already; step or drop first")
        self._run_pending(last=False)
        self._pending = loss * self.ranks.world
        self._begun = True

    def step(self, factor: float) -> float:
        """Update, clear the gradients, and return their norm before clipping."""
        norm = self.gradient_norm()
        if not self._begun or not math.isfinite(norm):
            self.drop()
            return norm
        for group in self._wrapped.basic_optimizer.param_groups:
            group["lr"] = self._learning_rate * factor
        self._wrapped.step()
        self._clear()
        return norm

    def gradient_norm(self) -> float:
        """The norm of the gradients; no more can be added to them."""
        if not self._begun:
            return 0.0
        self._reduce()
        if self._norm is None:
            self._norm = zero_steps.gradient_norm(self._wrapped.optimizer)
        return self._norm

    def drop(self) -> None:
        """Clear the gradients."""
        if self._begun:
            self._reduce()
            zero_steps.drop_gradients(self._wrapped)
        self._clear()

    def reference(self, model_ref: str) -> FrozenModel:
        """Another copy of a model, frozen, and whole on every rank."""
        return FrozenModel(loading.load_model(model_ref, self._config, self.device))

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with all its weights, in evaluation mode and without DeepSpeed's hooks. Under
        ZeRO-3 it takes the memory of all weights on every rank."""
        self._run_pending(last=False)
        parameters = list(self.model.parameters())
        with gathered(parameters), _without_hooks(self._wrapped.module), evaluating(self.model):
            yield self.model

    def snapshot(self, progress: Mapping[str, Any]) -> checkpoint.StateSnapshot:
        """The state as of now."""
        self._check_equal()
        return checkpoint.take_snapshot(self._state, progress, self.ranks, self._copies)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Put a saved state back; returns its progress."""
        self.drop()
        return checkpoint.restore_state(folder, self._state, self.ranks)

    def export(self, folder: Path) -> None:
        """Write model and tokenizer, from whole weights that rank 0 gathers in host memory."""
        self._check_equal()
        first = self.ranks.rank == 0
        weights = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in self._state.weights(lambda _: first)
            if tensor is not None
        }
        on_first_rank(
            self.ranks, lambda: loading.export(self.model, self.tokenizer, folder, weights)
        )

    def memory(self) -> dict[str, float]:
        """The most memory that a rank has taken so far."""
        return most_of_all(self.ranks, loading.memory_metrics(self.device))

    def _check_equal(self) -> None:
        if not self._state.partitioned:
            require_equal_weights(self.model, self.ranks)

    def _run_pending(self, *, last: bool) -> None:
        loss, self._pending = self._pending, None
        if loss is None:
            return
        self._wrapped.set_gradient_accumulation_boundary(last)
        with torch.enable_grad():  # whoever asks next may not want any
            self._wrapped.backward(loss, scale_wrt_gas=False)
        self._reduced = last

    def _reduce(self) -> None:
        """End the accumulation of this step."""
        if not self._reduced and self._pending is None and self._last is not None:
            # The last backward pass ran before anybody knew that it was: one more, that adds 0.
            batch, temperature, entropy = self._last
            with torch.enable_grad():
                scores = self._wrapped(batch, temperature, entropy)
                self._pending = 0.0 * scores[0].sum()
        self._run_pending(last=True)

    def _clear(self) -> None:
        self._pending = self._last = self._norm = None
        self._begun = self._reduced = False


@contextmanager
def _without_hooks(module: Any) -> Iterator[None]:
    """DeepSpeed's hooks would gather and free weights in the middle of somebody else's forward."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    kept = [(m, name, getattr(m, name)) for m in module.modules() for name in names]
    try:
        for owner, name, hooks in kept:
            setattr(owner, name, type(hooks)())
        yield
    finally:
        for owner, name, hooks in kept:
            setattr(owner, name, hooks)


def _import_deepspeed(device: Any) -> Any:
    """The package, quiet, and told which kind of device it is for."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It takes the GPU of this number, also where a rank sees its own only: when it is opened, and
    # again at the first steps under ZeRO-3.
    number = os.environ.get("LOCAL_RANK", "0") if device.index is None else str(device.index)
    os.environ["LOCAL_RANK"] = number
    # It calls what this torch has renamed, at every gather.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    try:
        import deepspeed
    except ImportError as error:
        raise UnsupportedError(
            f"DeepSpeed cannot be imported ({error})",
            expected="an installed deepspeed",
            fix="install it (`pip install deepspeed`), or set deepspeed_stage=null",
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # On a CPU it would compile an all-reduce of its own first, which not every CPU can run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _join_process_group(device: Any) -> None:
    """A process by itself is a group of one; others have joined theirs already."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
