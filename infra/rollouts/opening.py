"""From a recipe to rollouts by vLLM: servers, their weights, and the generator, as one thing.

In: the recipe, a tokenizer, a folder that marks what belongs to this stage. Out: a context in which
the policy can be sent to the servers and sampled from; at its end nothing is left of them.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from infra.process.child import kill_leftovers
from infra.ranks.settings import visible
from infra.rollouts.servers import LocalRolloutServers, Place, memory_folder
from refiner_core.contract.config import ModelConfig, RecipeConfig
from refiner_core.contract.placement import placement_of, sampling_servers
from refiner_core.generation.vllm import extension
from refiner_core.generation.vllm.admin import tolerance_of
from refiner_core.generation.vllm.client import VllmGenerator
from refiner_core.generation.vllm.sync import WeightSync
from refiner_core.generation.vllm.transfer import open_transfer

log = logging.getLogger(__name__)

#: Below a stage's folder: what its servers are marked with, a number for each.
MARK_NAME = "rollout-servers"


@dataclass(frozen=True)
class VllmRollouts:
    """What a trainer has in its hands.

    ``generator`` samples with the weights of the last :meth:`sync`.
    """

    generator: VllmGenerator
    weights: WeightSync

    def sync(self, whole: AbstractContextManager[Any], version: str) -> None:
        """Give all servers the weights of the model that ``whole`` yields; the first call starts
        them. See :meth:`refiner_core.generation.vllm.sync.WeightSync.sync`."""
        self.weights.sync(whole, version)


@contextmanager
def open_vllm(
    config: RecipeConfig,
    tokenizer: Any,
    workdir: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
    on_step: Callable[[int, int], None] | None = None,
    server_gpus: Sequence[Sequence[int]] | None = None,
) -> Iterator[VllmRollouts]:
    """Rollouts by this node's share of ``grpo.vllm_num_engines`` servers.

    Parameters
    ----------
    config
        The whole recipe.
    tokenizer
        The trainer's.
    workdir
        A folder of this stage; servers are marked with it, and those that an earlier attempt has
        left on this node are ended.
    should_stop, tell
        Whether to give up, and how long it has taken, while servers start. They are called from
        other threads, also during a call of the generator: nothing that all ranks do together.
    on_step
        See :class:`~refiner_core.generation.vllm.client.VllmGenerator`.
    server_gpus
        GPUs of each server of this node, as numbers within the job's; by default those of
        :func:`~refiner_core.contract.placement.placement_of`.

    Raises
    ------
    ConfigurationError
        ``grpo.rollout_server.weights_dir`` is of no use.
    UnsupportedError
        Weights are to go from GPU to GPU, and there is none.
    """
    grpo, server = config.grpo, config.grpo.rollout_server
    gpus = placement_of(config, "grpo").server_gpus if server_gpus is None else server_gpus
    way = weight_transfer(config, len(gpus))
    transfer = None if way == "reload" else open_transfer(way, server.start_timeout_s)
    kill_leftovers(workdir / MARK_NAME)
    with memory_folder(Path(server.weights_dir)) as folder:
        shutil.copytree(Path(extension.__file__).parent, folder / "extension")
        key = secrets.token_urlsafe(32)
        places = [
            Place(
                gpus=visible(numbers) if numbers else "",
                extension=folder / "extension",
                mark=workdir / MARK_NAME / str(index),
                transfer=None if way == "reload" else way,
                key=key,
            )
            for index, numbers in enumerate(gpus)
        ]
        servers = LocalRolloutServers(config, places, folder, should_stop=should_stop, tell=tell)
        weights = WeightSync(
            servers,
            folder,
            tokenizer,
            tolerance=tolerance_of(server.canary_tolerance, config.model.dtype),
            window=grpo.max_token_length,
            transfer=transfer,
            timeout_s=server.start_timeout_s,
        )
        generator = VllmGenerator(
            weights,
            window=grpo.max_token_length,
            in_flight=2 * grpo.generation_batch_size,
            silence_s=server.request_timeout_s,
            on_step=on_step,
        )
        try:
            yield VllmRollouts(generator, weights)
        finally:
            if transfer is not None:
                transfer.close()
            servers.close()


@contextmanager
def open_sampler(
    config: RecipeConfig,
    model_ref: str,
    tokenizer: Any,
    workdir: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    tell: Callable[[float], None] = lambda seconds: None,
    on_step: Callable[[int, int], None] | None = None,
) -> Iterator[VllmGenerator]:
    """Servers for a ``sample`` stage: a model that does not move, nobody who trains, and all GPUs
    of ``sample.resources`` for the servers.

    They are started on a copy of the model in memory, and proven by a canary that this process
    scores on the CPU. See :func:`open_vllm` for the rest.
    """
    view = sampling_view(config)
    with open_vllm(
        *(view, tokenizer, workdir),
        should_stop=should_stop,
        tell=tell,
        on_step=on_step,
        server_gpus=sampling_servers(config),
    ) as rollouts:
        rollouts.sync(_loaded(view.model, model_ref), "sampled")
        yield rollouts.generator


def sampling_view(config: RecipeConfig) -> RecipeConfig:
    """The recipe as rollout servers read it, for a ``sample`` stage: weights go by a folder, and
    this process scores the canary on a CPU, whatever kernel training uses."""
    rule = config.sample
    grpo = replace(
        config.grpo,
        generation_backend="vllm",
        generation_batch_size=rule.generation_batch_size,
        resources=rule.resources,
        rollout_server=replace(config.grpo.rollout_server, weight_transfer="reload"),
    )
    return replace(config, grpo=grpo, model=replace(config.model, attn_implementation="sdpa"))


@contextmanager
def _loaded(model: ModelConfig, model_ref: str) -> Iterator[Any]:
    from refiner_core.generation.load import load_model, set_threads

    set_threads(model)
    yield load_model(model_ref, model)


def weight_transfer(config: RecipeConfig, servers: int) -> Literal["reload", "nccl", "ipc"]:
    """How weights get to a node's servers.

    ``auto`` is ``reload`` without GPUs; with them ``nccl``, which two processes on one GPU cannot
    use: there it is ``ipc`` for the one server that has the trainer's own GPU, and else ``reload``.
    """
    server, grpo = config.grpo.rollout_server, config.grpo
    if server.weight_transfer != "auto":
        return server.weight_transfer
    if grpo.resources.gpus == 0:
        return "reload"
    if not server.colocate:
        return "nccl"
    return "ipc" if servers == 1 and grpo.vllm_tensor_parallel_size == 1 else "reload"
