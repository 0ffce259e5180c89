"""Placement of training processes and rollout servers: GPUs, and memory.

In: a recipe's configuration and a training stage. Out: a :class:`Placement`, the same for
launching processes, starting servers, checking a plan and forecasting memory; and with a model's
shape a :class:`MemoryNeed`, by process, part by part.

All nodes run the same number of processes and of rollout servers, which take weights through their
node's memory; only rank 0 talks to servers. GPUs that neither takes are reported when a plan is
made. Processes take the first GPUs of a node and servers the last; with `rollout_server.colocate`
servers take the first ones, too. A judge beside the stage (`judge.serve.where=beside`) takes the
last `judge.resources.gpus` of the first node.

Weights, gradients, optimiser and further copies of the model follow from sizes and ZeRO stage;
activations and the key/value cache are rules of thumb for a decoder with gated feed-forward parts,
and a process takes what Python and torch take. A stage's metrics have the measured peaks
(`memory/…`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from refiner_core.contract.config import (
    EvaluateConfig,
    GrpoConfig,
    RecipeConfig,
    SampleConfig,
    SftConfig,
)
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.fields import refuse_fields
from refiner_core.contract.kinds import KINDS, TRAINED_HERE
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.services import is_service, judge_gpus

#: Stages that train weights, in the recipe's order.
STAGES = TRAINED_HERE


def section_of(config: RecipeConfig, stage: str) -> SftConfig | GrpoConfig:
    """The configuration of a training stage."""
    section: SftConfig | GrpoConfig = getattr(config, stage)
    return section


def sft_section(config: RecipeConfig, stage: str) -> SftConfig:
    """The configuration of a stage that fine-tunes on demonstrations; for any other, that of
    ``sft``."""
    found = getattr(config, stage, None)
    return found if isinstance(found, SftConfig) else config.sft


@dataclass(frozen=True)
class Placement:
    """Processes and servers of a training stage.

    Attributes
    ----------
    nodes
        Number of nodes of the job.
    nproc_per_node
        Training processes on each.
    trainer_gpus
        GPUs of a node's processes, by local rank, as numbers within the job's GPUs on that node;
        empty without GPUs.
    server_gpus
        GPUs of each rollout server of a node; one entry per server, empty ones without GPUs.
    idle_gpus
        Unused GPUs, on all nodes together.
    judge_gpus
        GPUs of a judge beside the stage, on the first node.
    """

    nodes: int
    nproc_per_node: int
    trainer_gpus: tuple[int, ...] = ()
    server_gpus: tuple[tuple[int, ...], ...] = ()
    idle_gpus: int = 0
    judge_gpus: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        """Training processes on all nodes together."""
        return self.nodes * self.nproc_per_node

    @property
    def servers(self) -> int:
        """Rollout servers on all nodes together."""
        return self.nodes * len(self.server_gpus)


def placement_of(config: RecipeConfig, stage: str) -> Placement:
    """Place the processes and rollout servers of a training stage.

    Raises
    ------
    ConfigurationError
        They do not fit on a node; names the numbers and the fields.
    """
    refuse = functools.partial(refuse_fields, config)
    section, width = section_of(config, stage), config.grpo.vllm_tensor_parallel_size
    nodes, wanted, judge = (
        section.resources.nodes,
        section.nproc_per_node,
        judge_numbers(config, stage),
    )
    gpus = section.resources.gpus - len(judge)
    vllm = stage == "grpo" and config.grpo.generation_backend == "vllm"
    servers, shared = config.grpo.vllm_num_engines * vllm, config.grpo.rollout_server.colocate
    taken = servers * width if gpus else 0
    refuse(
        vllm and (taken >= gpus + shared if gpus else width > 1),
        "grpo.vllm_num_engines grpo.vllm_tensor_parallel_size grpo.resources.gpus "
        "grpo.rollout_server.colocate",
        "servers x GPUs each < GPUs of a node, so that one is left for training, or <= with "
        "colocate; without GPUs, one process per server",
        "lower grpo.vllm_num_engines or grpo.vllm_tensor_parallel_size, raise grpo.resources.gpus, "
        "or set grpo.rollout_server.colocate=true, which lets both share GPUs",
    )
    free = gpus if shared else gpus - taken
    refuse(
        gpus and wanted is not None and wanted > free,
        f"{stage}.nproc_per_node {stage}.resources.gpus",
        f"at most {free} processes a node: each needs a GPU that no rollout server takes",
        f"set {stage}.nproc_per_node={free}, or raise {stage}.resources.gpus",
    )
    processes = wanted if wanted is not None else max(1, free)
    first = 0 if shared else gpus - taken
    trainer_gpus = tuple(range(processes)) if gpus else ()
    server_gpus = tuple(
        tuple(range(first + i * width, first + (i + 1) * width)) if gpus else ()
        for i in range(servers)
    )
    used = {*trainer_gpus, *(gpu for one in server_gpus for gpu in one)}
    idle = nodes * (gpus - len(used)) + (nodes - 1) * len(judge)
    return Placement(nodes, processes, trainer_gpus, server_gpus, idle, judge)


def judge_numbers(config: RecipeConfig, kind: str) -> tuple[int, ...]:
    """The GPUs of a judge beside stages of a kind, as numbers within their job's: the last ones.

    Raises
    ------
    ConfigurationError
        The job has no GPU beside them.
    """
    count = judge_gpus(config, kind)
    gpus = getattr(config, kind).resources.gpus if count else 0
    refuse_fields(
        config,
        count and gpus <= count,
        f"judge.serve.where judge.resources.gpus {kind}.resources.gpus",
        f"{kind}.resources.gpus > {count}: a judge beside the stage takes GPUs of its job",
        f"set {kind}.resources.gpus={count + 1} or more, or judge.serve.where=job",
    )
    return tuple(range(gpus - count, gpus))


def stages_at_once(stages: Iterable[PlannedStage]) -> list[PlannedStage]:
    """The stage that needs the most GPUs at the same time, and its services; empty if none needs
    any."""
    known = {stage.name: stage for stage in stages if stage.resources.gpus}
    groups = [
        [stage, *(known[n] for n in stage.after if n in known and is_service(known[n].id))]
        for stage in known.values()
        if not is_service(stage.id)
    ]
    return max(groups, key=lambda group: sum(all_gpus(s) for s in group), default=[])


def all_gpus(stage: PlannedStage) -> int:
    """GPUs of a stage's job, on all its nodes."""
    return stage.resources.gpus * stage.resources.nodes


def sampling_section(config: RecipeConfig, stage: str) -> SampleConfig | EvaluateConfig:
    """The configuration of a stage that samples and does not train: ``sample`` or ``evaluate``."""
    section: SampleConfig | EvaluateConfig = getattr(config, stage)
    return section


def starts_servers(config: RecipeConfig, kind: str) -> bool:
    """True if stages of a kind start rollout servers."""
    section = KINDS[kind].samples_with if kind in KINDS else ""
    return bool(section) and getattr(config, section).generation_backend == "vllm"


def sampling_servers(config: RecipeConfig, stage: str) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each rollout server of a stage ``sample`` or ``evaluate``, as numbers within its
    job's. Without training there, servers share as many GPUs as divide evenly; without GPUs there
    are ``grpo.vllm_num_engines`` of them.

    Raises
    ------
    ConfigurationError
        Not one server fits.
    """
    asked, width = f"{stage}.resources.gpus", config.grpo.vllm_tensor_parallel_size
    judge = len(judge_numbers(config, stage))
    gpus = sampling_section(config, stage).resources.gpus - judge
    refuse_fields(
        config,
        gpus < width and not (gpus == 0 and width == 1),
        f"{asked} grpo.vllm_tensor_parallel_size",
        f"{asked} >= {width + judge}, for one rollout server",
        f"set {asked}={width + judge}, or grpo.vllm_tensor_parallel_size=1",
    )
    if not gpus:
        return ((),) * config.grpo.vllm_num_engines
    return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(gpus // width))


_GIB = 2**30
#: Python, torch and transformers in one process; with a GPU, its libraries and pinned buffers too,
#: and on the GPU its context.
_PROCESS, _GPU_PROCESS, _CONTEXT = int(0.8 * _GIB), 3 * _GIB, _GIB
#: Logits alive at once (:mod:`refiner_core.training.model.logprobs`); with their gradient, float32.
_LOGITS, _LOGIT_BYTES = 1 << 26, 8
_TYPE = {"float32": 4, "bfloat16": 2}
_FLOAT = 4  # gradients are added up in float32, whatever the weights are
_MOMENTS, _MASTERS = 8, 4
#: Numbers exchanged at once by processes, in plain torch and under DeepSpeed.
_BUCKET, _ZERO_BUCKET = 1 << 26, 200_000_000
#: Muon keeps one moment of hidden matrices where AdamW keeps two; the rest is about an eighth.
_MUON_SAVES = 3.5
#: Numbers kept per token and layer for the gradient: of the hidden and of the inner width.
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
    """Memory use of one stage.

    Attributes
    ----------
    on_gpu
        Bytes on the GPU of each process, by purpose; empty without GPUs.
    on_host
        Bytes in the host's memory of each process.
    shared
        Bytes in the host's memory of a node, once.
    processes
        Training processes on a node.
    """

    stage: str
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
        """The most in the host's memory of a node."""
        return self.processes * sum(self.on_host.values()) + sum(self.shared.values())


def training_memory(config: RecipeConfig, stage: str, model: ModelShape) -> MemoryNeed:
    """Memory use of a training stage of a model of that shape."""
    section, dtype = section_of(config, stage), _TYPE[config.model.dtype]
    placed, zero = placement_of(config, stage), section.deepspeed_stage or 0
    has_gpus, weights = bool(placed.trainer_gpus), model.parameters * dtype
    tokens = section.pack_length * section.per_device_train_batch_size
    # Two moments, and master weights if the model's own are too coarse.
    each: float = _MOMENTS + (_MASTERS if config.model.dtype == "bfloat16" else 0)
    if isinstance(section, SftConfig) and section.optimizer == "muon":
        each -= _MUON_SAVES
    state = int(each * model.parameters)
    parts: dict[str, int] = {
        "weights": _share(weights, placed.world, zero >= 3),
        "gradients": _share(_FLOAT * model.parameters, placed.world, zero >= 2),
        "optimizer": _share(state, placed.world, zero >= 1),
        "buffers": _buffers(model, dtype, placed.world, zero, has_gpus),
        "activations": _activations(config, model, tokens),
        "logits": min(_LOGITS, tokens * model.words) * _LOGIT_BYTES,
    }
    host = {"process": _GPU_PROCESS if has_gpus else _PROCESS}
    shared: dict[str, int] = {}
    if section.offload_optimizer:
        host["optimizer"] = parts.pop("optimizer")
    if section.offload_param:
        host["weights"] = parts.pop("weights")
    if section.async_save:  # each process copies its share of the states, and rank 0 the weights
        host["states being saved"] = _share(state, placed.world, is_shared=True)
        shared["weights being saved"] = weights
    if stage == "grpo":
        parts |= _sampling(config, model, placed.world, weights)
        shared |= _for_servers(config, weights)
    parts = {name: size for name, size in parts.items() if size}
    shared = {name: size for name, size in shared.items() if size}
    if not has_gpus:
        host = {name: parts.get(name, 0) + host.get(name, 0) for name in {**parts, **host}}
        return MemoryNeed(stage, {}, host, shared, placed.nproc_per_node)
    return MemoryNeed(stage, {"context": _CONTEXT, **parts}, host, shared, placed.nproc_per_node)


def _share(size: int, world: int, is_shared: bool) -> int:
    return -(-size // world) if is_shared else size


def _buffers(model: ModelShape, dtype: int, world: int, zero: int, has_gpus: bool) -> int:
    """Buffers for exchanging gradients and gathering shared weights; on GPUs the next piece is
    transferred meanwhile."""
    if world == 1:
        return 0
    if not zero:
        return 2 * _FLOAT * min(model.parameters, _BUCKET)
    gathered = dtype if zero >= 3 else 0
    return (2 if has_gpus else 1) * (_FLOAT + gathered) * min(model.parameters, _ZERO_BUCKET)


def _activations(config: RecipeConfig, model: ModelShape, tokens: int) -> int:
    """Memory that one forward pass keeps for its gradient."""
    size = tokens * _TYPE[config.model.dtype]
    layer = (_KEPT_HIDDEN * model.hidden + _KEPT_INNER * model.inner) * size
    if config.model.gradient_checkpointing:
        return layer + model.layers * model.hidden * size
    return model.layers * layer


def _sampling(config: RecipeConfig, model: ModelShape, world: int, weights: int) -> dict[str, int]:
    """Further copies of the model in each process; keys and values of samples decoded together,
    prompts once per group."""
    grpo, group = config.grpo, config.grpo.num_samples_per_prompt_rollout
    sharded = grpo.deepspeed_stage == 3
    copies = {"reference": _share(weights, world, sharded) if grpo.beta else 0}
    if grpo.generation_backend != "transformers":
        return copies
    here = -(-grpo.num_unique_prompts_rollout * group // world)
    samples = min(grpo.generation_batch_size, here)
    prompts = -(-samples // group)
    tokens = samples * grpo.response_length + prompts * config.data.max_prompt_token_length
    size = 2 * model.layers * model.pairs * _TYPE[config.model.dtype]
    if grpo.async_steps or grpo.deepspeed_stage == 3:
        copies["sampler" if grpo.async_steps else "gathered to sample"] = weights
    return {**copies, "key/value cache": tokens * size}


def _for_servers(config: RecipeConfig, weights: int) -> dict[str, int]:
    """Host memory of rollout servers: weights that go through it, and on a CPU the servers
    themselves (without their caches, whose size vLLM decides)."""
    grpo = config.grpo
    if grpo.generation_backend != "vllm":
        return {}
    on_cpu = grpo.resources.gpus == 0
    return {
        "weights for servers": weights,
        "servers": grpo.vllm_num_engines * (weights + 2 * _PROCESS) * on_cpu,
    }


def refuse_unsupported(config: RecipeConfig, stage: str | None = None) -> None:
    """Refuse requirements that this machine lacks, for the training stage that is about to run
    here, or for all stages that would.

    Raises
    ------
    UnsupportedError
        Names the field: ``*.deepspeed_stage`` without DeepSpeed.
    """
    checked: Collection[str] = config.stages if config.dispatch.executor == "local" else ()
    if stage is not None:
        checked = (stage,)
    for name in STAGES:
        section = section_of(config, name)
        if name not in checked or not section.deepspeed_stage:
            continue
        if importlib.util.find_spec("deepspeed") is None:
            raise UnsupportedError(
                f"{name}.deepspeed_stage is {section.deepspeed_stage}, and DeepSpeed is not "
                "installed here",
                expected="DeepSpeed in refiner's environment, as its installation provides it",
                fix=f"install deepspeed, or set {name}.deepspeed_stage=null",
            )
