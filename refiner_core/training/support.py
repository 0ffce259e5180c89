"""What this machine lacks for a training, refused before anything starts. Torch-free.

What no machine could do is refused when a plan is made
(:mod:`refiner_core.contract.checks.recipe`); whether a GPU is there is known where the model is
loaded (:func:`refiner_core.generation.load.device_for`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import STAGES, TrainingStage, section_of


def refuse_unsupported(config: RecipeConfig, stage: TrainingStage | None = None) -> None:
    """Refuse what the recipe needs and this machine has not, for the training stage that is about
    to run here, or for all that would run on this machine.

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
                expected="DeepSpeed beside refiner, as it is installed with it",
                fix=f"install deepspeed, or set {name}.deepspeed_stage=null",
            )
