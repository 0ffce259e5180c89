"""Which engine a recipe means."""

from __future__ import annotations

from typing import Literal

from refiner_core.contract.config import RecipeConfig
from refiner_core.generation.load import device_for
from refiner_core.training import engine
from refiner_core.training.engines.plain import PlainEngine
from refiner_core.training.engines.protocol import Engine
from refiner_core.training.optim import Updater
from refiner_core.training.order import seed_random
from refiner_core.training.ranks import OneRank, Ranks


def open_engine(
    config: RecipeConfig,
    stage: Literal["sft", "grpo"],
    model_ref: str,
    ranks: Ranks | None = None,
) -> Engine:
    """The model of ``model_ref``, ready to be trained as the stage's section says.

    Raises
    ------
    ConfigurationError
        The model cannot be found or read.
    UnsupportedError
        It cannot be packed, or this machine lacks what the section asks for.
    """
    seed_random(config.seed)  # before anything draws; a checkpoint's states are put back later
    section = config.sft if stage == "sft" else config.grpo
    muon = config.sft.optimizer == "muon" and stage == "sft"
    loaded = engine.load_for_training(model_ref, config.model, device_for(section.resources))
    updater = Updater(
        loaded.model,
        learning_rate=section.learning_rate,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        muon_learning_rate=config.sft.muon_learning_rate if muon else None,
    )
    return PlainEngine(loaded, updater, config.model, ranks or OneRank())
