"""Memory that a plan's training stages will take, against what their jobs ask for.

In: a plan. Out: estimates by stage, and sentences for people where a job would not have enough.
Reads the model's files where they are on this machine; imports nothing heavy. What GPUs have is not
known before a job runs, so that of them only the figures are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.checking.model_files import ModelFiles, model_files
from infra.disk.modelsize import ModelSize, model_size
from refiner_core.contract.checks.memory import MemoryNeed, ModelShape, training_memory
from refiner_core.contract.checks.sample import sampling_notes
from refiner_core.contract.checks.training import training_notes
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.placement import STAGES, section_of
from refiner_core.contract.plan import Plan
from refiner_core.environments.registry import environment_notes

_GIB = 2**30


def memory_needs(plan: Plan) -> list[MemoryNeed]:
    """Estimates for the training stages of a plan; none where nothing says the model's size."""
    found = _shape_of(plan.config)
    if found is None:
        return []
    kinds = {stage.kind for stage in plan.stages}
    return [training_memory(plan.config, stage, found) for stage in STAGES if stage in kinds]


def memory_json(plan: Plan) -> list[dict[str, Any]]:
    """The estimates for scripts."""
    return [
        {
            "stage": need.stage,
            "processes": need.processes,
            "gpu_bytes": need.gpu_bytes,
            "host_bytes": need.host_bytes,
            "asked_bytes": _asked(plan.config, need),
            "on_gpu": dict(need.on_gpu),
            "on_host": dict(need.on_host),
            "shared": dict(need.shared),
        }
        for need in memory_needs(plan)
    ]


def planning_notes(plan: Plan) -> list[str]:
    """What is worth saying of how a plan trains before it runs; nothing of it is refused."""
    config = plan.config
    notes = [*training_notes(config), *sampling_notes(config), *environment_notes(config)]
    for need in memory_needs(plan):
        asked = _asked(plan.config, need)
        if need.host_bytes > asked:
            parts = {name: size * need.processes for name, size in need.on_host.items()}
            notes.append(
                f"{need.stage} will take about {_gib(need.host_bytes)} of host memory, and asks "
                f"for {_gib(asked)} ({need.stage}.resources.memory_gb): "
                f"{_largest({**parts, **need.shared})}."
            )
    return notes


def _asked(config: RecipeConfig, need: MemoryNeed) -> int:
    return section_of(config, need.stage).resources.memory_gb * _GIB


def _largest(parts: Mapping[str, int]) -> str:
    """The three largest parts, in words."""
    first = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {_gib(size)}" for name, size in first)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def model_parameters(config: RecipeConfig) -> int | None:
    """How many parameters the recipe's model has; None where nothing says so."""
    found = _shape_of(config)
    return None if found is None else found.parameters


def _shape_of(config: RecipeConfig) -> ModelShape | None:
    files = model_files(config.model.name_or_path, config.model.revision)
    size: ModelSize = model_size(files.folder if files else None, config.model.name_or_path)
    if size.parameters is None:
        return None
    return _shape(size.parameters, files)


def _shape(parameters: int, files: ModelFiles | None) -> ModelShape:
    text = files.text_config if files else {}

    def number(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    width = number("head_dim") or (hidden // heads if heads else 0)
    return ModelShape(
        parameters=parameters,
        hidden=hidden,
        inner=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        pairs=width * (number("num_key_value_heads") or heads),
        words=number("vocab_size"),
    )
