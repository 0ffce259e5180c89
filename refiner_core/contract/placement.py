"""Who gets which GPU: training processes and rollout servers of a stage.

In: a recipe's configuration and a training stage. Out: a :class:`Placement`, the same for whoever
launches processes, starts servers, checks a plan or forecasts memory.

torchrun starts equally many processes on every node. All rollout servers are on the first one: they
listen on loopback and take weights through its memory, and rank 0, which is there, is the only one
that talks to them. What they take of its GPUs is therefore left idle on further nodes, which is
said when a plan is made. Processes take the first GPUs of a node and servers the last; with
`rollout_server.colocate` servers take the first ones, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from refiner_core.contract.config import GrpoConfig, RecipeConfig, SftConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.kinds import TRAINED_HERE

#: Stages that move weights, in the order in which a recipe has them.
TrainingStage = str
STAGES = TRAINED_HERE


def section_of(config: RecipeConfig, stage: TrainingStage) -> SftConfig | GrpoConfig:
    """The configuration of a training stage."""
    section: SftConfig | GrpoConfig = getattr(config, stage)
    return section


def sft_section(config: RecipeConfig, stage: str) -> SftConfig:
    """The configuration of a stage that fine-tunes on demonstrations; of any other, that of
    ``sft``."""
    found = getattr(config, stage, None)
    return found if isinstance(found, SftConfig) else config.sft


def training_stage(kind: str) -> TrainingStage:
    """The training stage that a kind of stage is.

    Raises
    ------
    ValueError
        It trains nothing here.
    """
    for stage in STAGES:
        if stage == kind:
            return stage
    raise ValueError(f"a {kind} stage trains no weights")


@dataclass(frozen=True)
class Placement:
    """Processes and servers of a training stage.

    Attributes
    ----------
    nodes
        How many nodes the job has.
    nproc_per_node
        Training processes on each.
    trainer_gpus
        GPUs of a node's processes, by local rank, as numbers within what the job was given on
        that node; empty without GPUs.
    server_gpus
        GPUs of each rollout server, all on the first node; one entry per server, empty ones
        without GPUs.
    idle_gpus
        GPUs that nobody uses, on all nodes together.
    """

    nodes: int
    nproc_per_node: int
    trainer_gpus: tuple[int, ...] = ()
    server_gpus: tuple[tuple[int, ...], ...] = ()
    idle_gpus: int = 0

    @property
    def world(self) -> int:
        """Training processes on all nodes together."""
        return self.nodes * self.nproc_per_node

    @property
    def servers(self) -> int:
        """Rollout servers."""
        return len(self.server_gpus)


def placement_of(config: RecipeConfig, stage: TrainingStage) -> Placement:
    """Where the processes and rollout servers of a training stage go.

    Raises
    ------
    ConfigurationError
        They do not fit on a node; says the numbers and the fields.
    """
    section = section_of(config, stage)
    gpus, nodes, wanted = section.resources.gpus, section.resources.nodes, section.nproc_per_node
    servers, width = _servers(config, stage), config.grpo.vllm_tensor_parallel_size
    taken, shared = servers * width if gpus else 0, config.grpo.rollout_server.colocate
    if taken > gpus or (taken and taken == gpus and not shared):
        raise _servers_do_not_fit(gpus, servers, width, shared)
    free = gpus if shared else gpus - taken
    if gpus and wanted is not None and wanted > free:
        raise _processes_do_not_fit(stage, wanted, gpus, gpus - free)
    processes = wanted if wanted is not None else max(1, free)
    first = 0 if shared else gpus - taken
    trainer_gpus = tuple(range(processes)) if gpus else ()
    server_gpus = tuple(
        tuple(range(first + i * width, first + (i + 1) * width)) if gpus else ()
        for i in range(servers)
    )
    used = {*trainer_gpus, *(gpu for one in server_gpus for gpu in one)}
    idle = (gpus - len(used)) + (nodes - 1) * (gpus - len(trainer_gpus))
    return Placement(nodes, processes, trainer_gpus, server_gpus, idle)


def sampling_servers(config: RecipeConfig) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each rollout server of a ``sample`` stage, as numbers within its job's. Nobody
    trains there: servers take as many GPUs as they can share out evenly; without GPUs there are
    ``grpo.vllm_num_engines`` of them.

    Raises
    ------
    ConfigurationError
        Not one server fits.
    """
    gpus, width = config.sample.resources.gpus, config.grpo.vllm_tensor_parallel_size
    if gpus < width and not (gpus == 0 and width == 1):
        raise ConfigurationError(
            f"A rollout server is to have {width} GPUs (grpo.vllm_tensor_parallel_size), and "
            f"attempts are sampled on {gpus} (sample.resources.gpus).",
            expected=f"sample.resources.gpus >= {width}",
            fix=f"set sample.resources.gpus={width}, or grpo.vllm_tensor_parallel_size=1",
        )
    if not gpus:
        return ((),) * config.grpo.vllm_num_engines
    return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(gpus // width))


def _servers(config: RecipeConfig, stage: TrainingStage) -> int:
    if stage != "grpo" or config.grpo.generation_backend != "vllm":
        return 0
    if config.grpo.resources.gpus == 0 and config.grpo.vllm_tensor_parallel_size > 1:
        raise ConfigurationError(
            f"A rollout server is to have {config.grpo.vllm_tensor_parallel_size} GPUs "
            "(grpo.vllm_tensor_parallel_size), but the job has none (grpo.resources.gpus=0).",
            expected="one process per rollout server without GPUs",
            fix="set grpo.vllm_tensor_parallel_size=1, or grpo.resources.gpus",
        )
    return config.grpo.vllm_num_engines


def _servers_do_not_fit(gpus: int, servers: int, width: int, shared: bool) -> ConfigurationError:
    left = "" if shared else ", and none would be left to train on"
    return ConfigurationError(
        f"{servers} rollout server{'s' if servers > 1 else ''} with {width} "
        f"GPU{'s' if width > 1 else ''} each (grpo.vllm_num_engines, "
        f"grpo.vllm_tensor_parallel_size) take {servers * width} of the {gpus} GPUs of a node "
        f"(grpo.resources.gpus){left}.",
        expected="servers x GPUs each <= GPUs of a node"
        if shared
        else "servers x GPUs each + at least one training process <= GPUs of a node",
        fix="lower grpo.vllm_num_engines or grpo.vllm_tensor_parallel_size, or raise "
        "grpo.resources.gpus"
        + ("" if shared else "; grpo.rollout_server.colocate=true lets both share GPUs"),
    )


def _processes_do_not_fit(stage: str, wanted: int, gpus: int, taken: int) -> ConfigurationError:
    servers = f", of which rollout servers take {taken}" if taken else ""
    return ConfigurationError(
        f"{wanted} training processes per node ({stage}.nproc_per_node) need a GPU each, but a "
        f"node has {gpus} ({stage}.resources.gpus){servers}.",
        expected=f"{stage}.nproc_per_node <= {gpus - taken}",
        fix=f"set {stage}.nproc_per_node={gpus - taken}, or raise {stage}.resources.gpus",
    )
