"""DeepSpeed: ZeRO-2 and 3 shard optimiser states, gradients and weights over the ranks.

In: a training stage's section and the ranks. Out: an
:class:`~refiner_core.training.engines.protocol.Engine`.

DeepSpeed does partitioning, gathering, reducing and stepping only. Batches, loss scales, schedules,
non-finite norms and checkpoints are handled here, the same as in plain torch. Points to know:

* Gradients are summed over packs and over ranks in float32; DeepSpeed averages over ranks, so a
  loss is first multiplied by their number.
* DeepSpeed must know before a backward pass whether it is the step's last. A loop shows this by
  asking for the norm or the step, so a backward pass is deferred until the next call.
* Under ZeRO-3 a model is loaded whole on rank 0 alone, and checked there. Other ranks allocate its
  parameters without touching them: DeepSpeed sends one after another, and keeps a share of each.
* An export, and new weights for servers, gather one parameter at a time. Only sampling by
  transformers needs the whole model on every rank (:meth:`_ZeroEngine.whole`).

DeepSpeed is imported when the first engine is opened, since the import takes seconds.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from refiner_core.contract.config import GrpoConfig, ModelConfig, SftConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.training.batches import Batch
from refiner_core.training.engines.protocol import Engine, ParameterState, Score, evaluating
from refiner_core.training.model import loading
from refiner_core.training.model.logprobs import Entropy, ScoringModel, TokenScores
from refiner_core.training.model.optim import adamw, parameter_groups, trainable
from refiner_core.training.pulse import PULSE
from refiner_core.training.ranks import Ranks

#: DeepSpeed's placeholder for a norm that is not finite.
_INVALID = -1.0


def gradient_norm(optimizer: Any) -> float:
    """The global 2-norm of the summed gradients; infinite if it is not finite."""
    if hasattr(optimizer, "scaled_global_norm"):  # ZeRO-2
        norm = float(optimizer.scaled_global_norm())
    else:
        norms = [float(norm) for norm in optimizer._get_norm_groups()]
        norm = math.hypot(*norms) if all(value >= 0 for value in norms) else math.inf
    return norm if math.isfinite(norm) and norm >= 0 else math.inf


def drop_gradients(wrapped: Any) -> None:
    """Use DeepSpeed's handling of non-finite gradients: no update, and all accumulated gradients
    are cleared."""
    optimizer = wrapped.optimizer
    zero3 = not hasattr(optimizer, "scaled_global_norm")
    name = "_get_norm_groups" if zero3 else "scaled_global_norm"
    invalid = torch.tensor(_INVALID)
    setattr(optimizer, name, lambda *_: [invalid] if zero3 else invalid)
    said = logging.getLogger("DeepSpeed")
    level = said.level
    said.setLevel(logging.ERROR)  # suppresses its overflow warning
    try:
        wrapped.step()
    finally:
        said.setLevel(level)
        delattr(optimizer, name)
    if not optimizer.overflow:
        raise RuntimeError("DeepSpeed made an update that should have been dropped")
    if not zero3:  # with offload it keeps these, and would add the next step's
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _share(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, padded as in DeepSpeed."""
    import torch.distributed as dist

    size = parameter.ds_tensor.numel()
    flat = whole.flatten()
    start = min(len(flat), dist.get_rank() * size)
    part = flat[start : start + size]
    return torch.cat([part, part.new_zeros(size - len(part))])


log = logging.getLogger(__name__)

#: Elements that DeepSpeed gathers or reduces at once.
BUCKET_ELEMENTS = 200_000_000


def open_zero_engine(
    section: SftConfig | GrpoConfig, config: ModelConfig, model_ref: str, ranks: Ranks, device: Any
) -> _ZeroEngine:
    """The model of ``model_ref`` under ``section.deepspeed_stage`` 3, or 2, which is also used for
    1: it shards the gradients too, for the same traffic.

    Raises
    ------
    UnsupportedError
        DeepSpeed is not installed, or cannot be used here.
    """
    stage = 3 if section.deepspeed_stage == 3 else 2
    _import_deepspeed(device)
    _join_process_group(device)
    loaded = (
        loading.load_on_first(model_ref, config, device, ranks)
        if stage == 3
        else loading.load_for_training(model_ref, config, device)
    )
    decayed, rest, _ = parameter_groups(loaded.model)
    weights = trainable(loaded.model)
    width = loaded.model.config.get_text_config().hidden_size
    settings = _deepspeed_settings(section, stage, config, width, cuda=device.type == "cuda")
    rates = (section.learning_rate, section.weight_decay, section.adam_beta2)
    optimizer = adamw(decayed, rest, weights, *rates)
    module = ScoringModel(loaded.model)
    module.train(loaded.model.training)
    wrapped = _initialized(model=module, optimizer=optimizer, config=settings)
    wrapped.module.train(loaded.model.training)
    return _ZeroEngine(loaded, wrapped, settings, config, ranks, section.learning_rate)


def _initialized(**given: Any) -> Any:
    """DeepSpeed's engine; what it prints (the machine's memory, among others) goes to the log."""
    import deepspeed

    printed = io.StringIO()
    with redirect_stdout(printed):
        wrapped, *_ = deepspeed.initialize(**given, dist_init_required=False)
    log.debug("DeepSpeed: %s", printed.getvalue())
    return wrapped


def _deepspeed_settings(
    section: SftConfig | GrpoConfig, stage: int, config: ModelConfig, width: int, *, cuda: bool
) -> dict[str, Any]:
    """Settings of DeepSpeed, as the dictionary form of its configuration file."""
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "overlap_comm": cuda,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if section.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if stage == 3:
        zero |= {
            # Vectors stay whole on all ranks; matrices do not, however small.
            "stage3_param_persistence_threshold": 10 * width,
            "stage3_prefetch_bucket_size": BUCKET_ELEMENTS // 4,
            "memory_efficient_linear": False,  # it would replace torch's own for the whole process
        }
        if section.offload_param:
            zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    return {
        "train_micro_batch_size_per_gpu": 1,  # losses are weighted here
        "gradient_accumulation_steps": 1,  # and boundaries are set here
        "gradient_clipping": max(0.0, section.max_grad_norm),
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW needs no build on the CPU
        "zero_optimization": zero,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


class _ZeroEngine(Engine):
    """A model sharded by DeepSpeed."""

    def __init__(
        self,
        loaded: loading.LoadedModel,
        wrapped: Any,
        settings: Mapping[str, Any],
        config: ModelConfig,
        ranks: Ranks,
        learning_rate: float,
    ) -> None:
        super().__init__(loaded, wrapped.device, config, ranks)
        stage = settings["zero_optimization"]["stage"]
        self.name, self.partitioned = f"zero{stage}", stage == 3
        self._wrapped, self._learning_rate, self._settings = wrapped, learning_rate, settings
        self._pending: Any = None  # a loss whose backward pass is deferred
        self._last: tuple[Batch, float, Entropy] | None = None
        self._begun = self._reduced = False
        self._norm: float | None = None

    def score(
        self, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "off"
    ) -> TokenScores:
        """Log-probabilities of the batch's targets."""
        PULSE.moved += 1
        self._run_pending(last=False)
        if torch.is_grad_enabled():
            self._last = (batch, temperature, entropy)
            return TokenScores(*self._wrapped(batch, temperature, entropy))
        with evaluating(self._wrapped.module):  # nothing to recompute
            return TokenScores(*self._wrapped(batch, temperature, entropy))

    def backward(self, loss: Any) -> None:
        """Add the gradients of a loss; the backward pass is deferred."""
        if self._reduced:
            raise RuntimeError("gradients are already summed over the ranks; step or drop first")
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
        """The norm of the gradients; afterwards no more can be added."""
        if not self._begun:
            return 0.0
        self._reduce()
        if self._norm is None:
            self._norm = gradient_norm(self._wrapped.optimizer)
        return self._norm

    def drop(self) -> None:
        """Clear the gradients."""
        if self._begun:
            self._reduce()
            drop_gradients(self._wrapped)
        self._clear()

    def reference(self, model_ref: str) -> Score:
        """Scores of a frozen model, sharded under ZeRO-3: all ranks score equally many batches."""
        if not self.partitioned:
            return super().reference(model_ref)
        loaded = loading.load_on_first(model_ref, self._config, self.device, self.ranks)
        module = ScoringModel(loaded.model.requires_grad_(False)).eval()
        unused = ("offload_optimizer",)
        zero = {k: v for k, v in self._settings["zero_optimization"].items() if k not in unused}
        wrapped = _initialized(model=module, config={**self._settings, "zero_optimization": zero})

        def score(batch: Batch, *, temperature: float = 1.0) -> TokenScores:
            return TokenScores(*wrapped(batch, temperature, "off"))

        return score

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with all its weights, in evaluation mode and without DeepSpeed's hooks. Under
        ZeRO-3 every rank needs memory for all weights."""
        self._run_pending(last=False)
        with super().whole() as model, _without_hooks(self._wrapped.module):
            yield model

    @contextmanager
    def gathered(self, tensors: Sequence[Any], *, changed: bool = False) -> Iterator[None]:
        """Whole weights of ZeRO-3 parameters on every rank; other weights already are."""
        partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        if not partitioned:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if changed else None):
            yield

    def states(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ParameterState]]:
        """Whole masters and moments, one parameter at a time."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        steps = self._steps()
        if steps is not None:
            self._link_moments()
        for name, parameter in trainable(self.model).items():
            state: dict[str, torch.Tensor | None] = {"step": steps}
            if parameter.dtype != torch.float32:
                state["master"] = safe_get_full_fp32_param(parameter)
            if steps is not None:
                for kind in _MOMENTS:
                    state[kind] = safe_get_full_optimizer_state(parameter, kind)
            if wanted(name):
                yield name, {kind: part for kind, part in state.items() if part is not None}

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set_states(self, state_of: Callable[[str], ParameterState]) -> None:
        """Copy states in: each rank reads whole tensors and keeps its share."""
        steps: float | None = None
        for flat in self._flat():
            self._wrapped.basic_optimizer.state.pop(flat, None)
        for name, parameter in trainable(self.model).items():
            state = state_of(name)
            with self.gathered([parameter]):
                weight = parameter.detach().float()
                self._set(parameter, None, state.get("master", weight))
            if all(kind in state for kind in (*_MOMENTS, "step")):
                if steps is None:
                    self._make_moments()
                steps = max(steps or 0.0, float(state["step"]))
                for kind in _MOMENTS:
                    self._set(parameter, kind, state[kind])
        if steps is not None:
            for flat in self._flat():
                self._state_of(flat)["step"].fill_(steps)

    def _set(self, parameter: Any, kind: str | None, whole: torch.Tensor) -> None:
        """Store this rank's share of a whole float32 tensor in the optimiser."""
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if not self.partitioned:
            whole = whole.to(parameter.device)
            if kind is None:
                safe_set_full_fp32_param(parameter, whole)
            else:
                safe_set_full_optimizer_state(parameter, whole, kind)
            return
        share = _share(parameter, whole)
        if kind is None:
            safe_set_local_fp32_param(parameter, share)
        else:
            safe_set_local_optimizer_state(parameter, share, kind)

    # ------------------------------------------------------------ flat partitions

    def _flat(self) -> list[Any]:
        """This rank's flat float32 partitions, the optimiser's parameters."""
        optimizer = self._wrapped.optimizer
        zero3 = self.partitioned
        name = "fp32_partitioned_groups_flat" if zero3 else "single_partition_of_fp32_groups"
        return list(getattr(optimizer, name))

    def _state_of(self, flat: Any) -> dict[str, Any]:
        state: dict[str, Any] = self._wrapped.basic_optimizer.state[flat]
        return state

    def _steps(self) -> torch.Tensor | None:
        """Number of updates; None before the first."""
        states = self._wrapped.basic_optimizer.state
        found = [states[flat]["step"] for flat in self._flat() if states.get(flat)]
        return found[0].detach().to("cpu") if found else None

    def _make_moments(self) -> None:
        for flat in self._flat():
            self._state_of(flat).update(
                step=torch.zeros((), dtype=torch.float32, device=flat.device),
                exp_avg=torch.zeros_like(flat),
                exp_avg_sq=torch.zeros_like(flat),
            )
        self._link_moments()

    def _link_moments(self) -> None:
        """Link parameters to their moments. DeepSpeed does it once, after the first of its
        parameter groups was stepped: the other groups' moments do not exist yet."""
        optimizer = self._wrapped.optimizer
        if not self.partitioned:
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()

    def _logits(self, ids_BL: torch.Tensor) -> Any:
        self._run_pending(last=False)
        return self._wrapped(ids_BL)

    def _run_pending(self, *, last: bool) -> None:
        loss, self._pending = self._pending, None
        if loss is None:
            return
        self._wrapped.set_gradient_accumulation_boundary(last)
        with torch.enable_grad():  # the next caller may have disabled gradients
            self._wrapped.backward(loss, scale_wrt_gas=False)
        self._reduced = last

    def _reduce(self) -> None:
        """Finish the accumulation of this step."""
        if not self._reduced and self._pending is None and self._last is not None:
            # The last backward pass ran before it was known to be the last: run one more, adding 0.
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
    """Remove DeepSpeed's hooks, which would gather and free weights inside another forward pass."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    kept = [(m, name, getattr(m, name)) for m in module.modules() for name in names]
    try:
        for owner, name, hooks in kept:
            setattr(owner, name, type(hooks)())
        yield
    finally:
        for owner, name, hooks in kept:
            setattr(owner, name, hooks)


def _import_deepspeed(device: Any) -> None:
    """Import the package, with quiet logging, and set it up for the kind of device."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # It uses the GPU of this number, even if a rank sees only its own: when it is opened, and
    # again at the first steps under ZeRO-3.
    number = os.environ.get("LOCAL_RANK", "0") if device.index is None else str(device.index)
    os.environ["LOCAL_RANK"] = number
    # At every gather it calls a function that this torch has renamed.
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
    # On a CPU it would first compile its own all-reduce, which not every CPU can run.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _join_process_group(device: Any) -> None:
    """Make a single process a group of one; ranks have already joined theirs."""
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
