"""Which engine a recipe means."""

from __future__ import annotations

from typing import Any

from refiner_core.contract.config import RecipeConfig, SftConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import TrainingStage, section_of
from refiner_core.contract.resources import Resources
from refiner_core.generation.load import device_for
from refiner_core.training.batches.order import seed_random
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.model import loading
from refiner_core.training.model.optim import Updater
from refiner_core.training.ranks import OneRank, Ranks, gpu_of


def open_engine(
    config: RecipeConfig,
    stage: TrainingStage,
    model_ref: str,
    ranks: Ranks | None = None,
) -> Engine:
    """The model of ``model_ref``, ready to be trained as the stage's section says.

    ``deepspeed_stage`` 1 to 3 shares optimiser states, gradients and weights out by DeepSpeed. 0
    shares nothing, and is what plain torch does over several ranks: DeepSpeed's own way of it adds
    bfloat16 gradients up in bfloat16.

    Raises
    ------
    ConfigurationError
        The model cannot be found or read.
    UnsupportedError
        It cannot be packed, or this machine lacks what the section asks for.
    """
    seed_random(config.seed)  # before anything draws; a checkpoint's states are put back later
    section = section_of(config, stage)
    muon = section if isinstance(section, SftConfig) and section.optimizer == "muon" else None
    ranks = ranks or OneRank()
    device = device_of(section.resources, ranks)
    if section.deepspeed_stage:
        if muon is not None:
            raise UnsupportedError(
                f"Muon needs whole matrices, and {stage}.deepspeed_stage={muon.deepspeed_stage} "
                "shares them out",
                expected=f"{stage}.optimizer=adamw, or {stage}.deepspeed_stage 0 or null",
                fix=f"set {stage}.optimizer=adamw",
            )
        from refiner_core.training.engines.zero import open_zero_engine

        return open_zero_engine(section, config.model, model_ref, ranks, device)
    loaded = loading.load_for_training(model_ref, config.model, device)
    updater = Updater(
        loaded.model,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        muon_learning_rate=None if muon is None else muon.muon_learning_rate,
    )
    return PlainEngine(loaded, updater, config.model, ranks)


def device_of(resources: Resources, ranks: Ranks) -> Any:
    """This rank's GPU where one is asked for, else the CPU.

    Raises
    ------
    UnsupportedError
        If a GPU is asked for and torch sees none.
    ConfigurationError
        If this rank has none.
    """
    import torch

    device = device_for(resources)
    if device.type == "cpu" or ranks.world == 1:
        return device
    return torch.device("cuda", gpu_of(ranks.local_rank))
