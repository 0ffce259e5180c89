"""What training in this version does not do, refused before anything starts. Torch-free."""

from __future__ import annotations

from typing import Literal

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError


def refuse_unsupported(config: RecipeConfig, stage: Literal["sft", "grpo"] | None = None) -> None:
    """Refuse what this version does not do, for one training stage or all that the recipe lists.

    Raises
    ------
    UnsupportedError
        Names the field: ``*.deepspeed_stage``, ``*.resources.gpus`` or ``nodes`` above 1,
        ``grpo.generation_backend=vllm``, ``grpo.offload_optimizer``. All of these are later work.
    """
    checked = config.stages if stage is None else (stage,)
    for name, section in (("sft", config.sft), ("grpo", config.grpo)):
        if name not in checked:
            continue
        if section.deepspeed_stage is not None:
            raise _unsupported(f"{name}.deepspeed_stage", section.deepspeed_stage, "null")
        for count in ("gpus", "nodes"):
            value = getattr(section.resources, count)
            if value > 1:
                raise _unsupported(f"{name}.resources.{count}", value, "1")
    if "grpo" in checked:
        if config.grpo.generation_backend != "transformers":
            backend = config.grpo.generation_backend
            raise _unsupported("grpo.generation_backend", backend, "transformers")
        if config.grpo.offload_optimizer:
            raise _unsupported("grpo.offload_optimizer", "true", "false")


def _unsupported(field: str, value: object, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"{field} is {value}, which this version plans but cannot train with yet.",
        expected=f"{field}={instead}",
        fix=f"set {field}={instead}, or look at the plan only (`refiner plan`)",
    )
