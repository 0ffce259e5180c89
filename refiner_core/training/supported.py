"""What this version of the training engine does not do, said before anything starts.

In: a recipe's configuration. Out: nothing, or a refusal that names the field. Imports no torch, so
that planning can ask too.

Later work, refused here: DeepSpeed, more than one GPU or node, off-loading, rollouts by vLLM.
"""

from __future__ import annotations

from typing import Literal

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import UnsupportedError


def refuse_unsupported(config: RecipeConfig, stage: Literal["sft", "grpo"] | None = None) -> None:
    """Check every training stage of the recipe, and ``stage`` whether it is listed or not.

    Raises
    ------
    UnsupportedError
        Names the field: ``*.deepspeed_stage``, ``*.resources.gpus`` or ``nodes`` above 1,
        ``grpo.generation_backend=vllm``, ``grpo.offload_optimizer``.
    """
    checked = {*config.stages, stage}
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


def _unsupported(field: str, value: object, supported: str) -> UnsupportedError:
    return UnsupportedError(
        f"{field}={value} is not supported by this version",
        expected=f"{field}={supported}",
        fix=f"set {field}={supported}",
    )
