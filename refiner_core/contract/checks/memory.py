"""Memory that a training stage will take, before it runs: by process, part by part.

In: a recipe's configuration and a model's shape. Out: a :class:`MemoryNeed`. Weights, gradients,
optimiser and further copies of the model follow from sizes and ZeRO stage; activations and the
key/value cache are rules of thumb for a decoder with gated feed-forward parts, and a process takes
what Python and torch take. Measured peaks stand in a stage's metrics (`memory/…`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.placement import TrainingStage, placement_of, section_of

_GIB = 2**30
#: Python, torch and transformers in one process; with a GPU, its libraries and pinned buffers too,
#: and on the GPU its context.
_PROCESS, _GPU_PROCESS, _CONTEXT = int(0.8 * _GIB), 3 * _GIB, _GIB
#: Logits alive at once (:mod:`refiner_core.training.model.logprobs`); with their gradient, float32.
_LOGITS, _LOGIT_BYTES = 1 << 26, 8
_TYPE = {"float32": 4, "bfloat16": 2}
_FLOAT = 4  # gradients are added up in float32, whatever the weights are
_MOMENTS, _MASTERS = 8, 4
#: Numbers that processes exchange at once, in plain torch and under DeepSpeed.
_BUCKET, _ZERO_BUCKET = 1 << 26, 200_000_000
#: Muon keeps one moment of hidden matrices where AdamW keeps two; the rest is an eighth or so.
_MUON_SAVES = 3.5
#: Numbers that a layer keeps per token for its gradient: of the hidden and of the inner width.
_KEPT_HIDDEN, _KEPT_INNER = 10, 4


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes; 0 where unknown. ``pairs`` is the width of one layer's keys."""

    parameters: int
    hidden: int = 0
    inner: int = 0
    layers: int = 0
    pairs: int = 0
    words: int = 0


@dataclass(frozen=True)
class MemoryNeed:
    """What one stage takes.

    Attributes
    ----------
    on_gpu
        Bytes on the GPU of each process, by what they are for; empty without GPUs.
    on_host
        Bytes in the host's memory of each process.
    shared
        Bytes in the host's memory of the first node, once.
    processes
        Training processes on a node.
    """

    stage: TrainingStage
    on_gpu: Mapping[str, int]
    on_host: Mapping[str, int]
    shared: Mapping[str, int]
    processes: int

    @property
    def gpu_bytes(self) -> int:
        """The most on one GPU."""
        return sum(self.on_gpu.values())

    @property
    def host_bytes(self) -> int:
        """The most in the host's memory of the first node."""
        return self.processes * sum(self.on_host.values()) + sum(self.shared.values())


def training_memory(config: RecipeConfig, stage: TrainingStage, model: ModelShape) -> MemoryNeed:
    """What a training stage of a model of that shape takes."""
    section = section_of(config, stage)
    placed, zero = placement_of(config, stage), section.deepspeed_stage or 0
    has_gpus, weights = bool(placed.trainer_gpus), model.parameters * _TYPE[config.model.dtype]
    state = _optimizer_bytes(config, stage, model)
    parts: dict[str, int] = {
        "weights": _share(weights, placed.world, zero >= 3),
        "gradients": _share(_FLOAT * model.parameters, placed.world, zero >= 2),
        "optimizer": _share(state, placed.world, zero >= 1),
        "buffers": _buffers(config, model, placed.world, zero, has_gpus),
        "activations": _activations(config, stage, model),
        "logits": min(_LOGITS, _tokens(config, stage) * model.words) * _LOGIT_BYTES,
    }
    host = {"process": _GPU_PROCESS if has_gpus else _PROCESS}
    if section.offload_optimizer:
        host["optimizer"] = parts.pop("optimizer")
    if section.offload_param:
        host["weights"] = parts.pop("weights")
    if stage == "grpo":
        parts |= _copies(config, weights, zero)
        parts |= _sampling(config, model, placed.world)
    shared = {}
    if section.async_save:  # each process copies its share of the states, and rank 0 the weights
        host["states being saved"] = _share(state, placed.world, is_shared=True)
        shared["weights being saved"] = weights
    if stage == "grpo":
        shared |= _for_servers(config, weights)
    parts = {name: size for name, size in parts.items() if size}
    if not has_gpus:
        host = {name: parts.get(name, 0) + host.get(name, 0) for name in {**parts, **host}}
        return MemoryNeed(stage, {}, host, shared, placed.nproc_per_node)
    return MemoryNeed(stage, {"context": _CONTEXT, **parts}, host, shared, placed.nproc_per_node)


def _share(size: int, world: int, is_shared: bool) -> int:
    return -(-size // world) if is_shared else size


def _optimizer_bytes(config: RecipeConfig, stage: TrainingStage, model: ModelShape) -> int:
    """Two moments, and master weights where the model's own are too coarse."""
    each: float = _MOMENTS + (_MASTERS if config.model.dtype == "bfloat16" else 0)
    section = section_of(config, stage)
    if isinstance(section, SftConfig) and section.optimizer == "muon":
        each -= _MUON_SAVES
    return int(each * model.parameters)


def _buffers(config: RecipeConfig, model: ModelShape, world: int, zero: int, has_gpus: bool) -> int:
    """What processes exchange gradients through, and gather shared weights into; on GPUs the next
    piece travels meanwhile."""
    if world == 1:
        return 0
    if not zero:
        return 2 * _FLOAT * min(model.parameters, _BUCKET)
    gathered = _TYPE[config.model.dtype] if zero >= 3 else 0
    return (2 if has_gpus else 1) * (_FLOAT + gathered) * min(model.parameters, _ZERO_BUCKET)


def _tokens(config: RecipeConfig, stage: TrainingStage) -> int:
    """Tokens of one forward pass."""
    section = section_of(config, stage)
    return section.pack_length * section.per_device_train_batch_size


def _activations(config: RecipeConfig, stage: TrainingStage, model: ModelShape) -> int:
    """What one forward pass keeps for its gradient."""
    tokens = _tokens(config, stage)
    size = _TYPE[config.model.dtype]
    layer = tokens * (_KEPT_HIDDEN * model.hidden + _KEPT_INNER * model.inner) * size
    if config.model.gradient_checkpointing:
        return layer + model.layers * tokens * model.hidden * size
    return model.layers * layer


def _copies(config: RecipeConfig, weights: int, zero: int) -> dict[str, int]:
    """Further copies of the model in each process."""
    grpo, found = config.grpo, dict[str, int]()
    if grpo.beta:
        found["reference"] = weights
    if grpo.generation_backend == "transformers":
        if grpo.async_steps:
            found["sampler"] = weights
        elif zero >= 3:
            found["gathered to sample"] = weights
    return found


def _sampling(config: RecipeConfig, model: ModelShape, world: int) -> dict[str, int]:
    """Keys and values of the samples that are decoded together, prompts once per group."""
    grpo = config.grpo
    if grpo.generation_backend != "transformers":
        return {}
    group = grpo.num_samples_per_prompt_rollout
    here = -(-grpo.num_unique_prompts_rollout * group // world)
    samples = min(grpo.generation_batch_size, here)
    prompts = -(-samples // group)
    tokens = samples * grpo.response_length + prompts * config.data.max_prompt_token_length
    size = 2 * model.layers * model.pairs * _TYPE[config.model.dtype]
    return {"key/value cache": tokens * size}


def _for_servers(config: RecipeConfig, weights: int) -> dict[str, int]:
    """What rollout servers take of the host: weights that go through its memory, and on a CPU the
    servers themselves (without their caches, whose size is vLLM's to say)."""
    grpo = config.grpo
    if grpo.generation_backend != "vllm":
        return {}
    has_gpus, how = grpo.resources.gpus > 0, grpo.rollout_server.weight_transfer
    found = {}
    if how == "reload" or (how == "auto" and not has_gpus):
        found["weights for servers"] = weights
    if not has_gpus:
        found["servers"] = grpo.vllm_num_engines * (weights + 2 * _PROCESS)
    return found
