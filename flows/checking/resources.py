"""Memory and programs needed by a plan's training stages, before anything runs.

In: a plan, the model's files. Out: estimates by stage, notes for people, and refusals for missing
programs. Imports nothing heavy. GPU memory is unknown before a job runs, so only estimates are
given for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from flows.checking.judges import attack_notes, judge_notes
from flows.checking.models import layer_notes, model_files, position_notes
from infra.disk.forecast import ModelSize, model_size
from infra.disk.manager import gib
from infra.store.workspace import Workspace
from refiner_core.contract.checks.training import training_notes
from refiner_core.contract.config import RecipeConfig, RolloutServerConfig, ServeConfig
from refiner_core.contract.errors import UnsupportedError
from refiner_core.contract.placement import (
    STAGES,
    MemoryNeed,
    ModelShape,
    section_of,
    starts_servers,
    training_memory,
)
from refiner_core.contract.plan import Plan
from refiner_core.contract.records import picked
from refiner_core.contract.services import asks_judge, engine_of, serves

_GIB = 2**30


def memory_needs(plan: Plan) -> list[MemoryNeed]:
    """Estimates for the training stages of a plan; none if the model's size is unknown."""
    found = model_shape(plan.config)
    if found is None:
        return []
    kinds = {stage.kind for stage in plan.stages}
    return [training_memory(plan.config, stage, found) for stage in STAGES if stage in kinds]


def memory_json(plan: Plan) -> list[dict[str, Any]]:
    """The estimates as JSON."""
    return [
        {
            **picked(need, "stage", "processes", "gpu_bytes", "host_bytes"),
            "asked_bytes": _asked(plan.config, need),
            **picked(need, "on_gpu", "on_host", "shared"),
        }
        for need in memory_needs(plan)
    ]


def planning_notes(plan: Plan) -> list[str]:
    """Notes on how a plan trains; they refuse nothing."""
    config = plan.config
    notes = [
        *(*training_notes(config), *layer_notes(config)),
        *(*judge_notes(config), *position_notes(config), *attack_notes(config)),
    ]
    if config.environment.name:
        from refiner_core.environments.registry import environment_notes

        notes += environment_notes(config)
    for need in memory_needs(plan):
        asked = _asked(plan.config, need)
        if need.host_bytes > asked:
            parts = {name: size * need.processes for name, size in need.on_host.items()}
            largest = sorted({**parts, **need.shared}.items(), key=lambda part: -part[1])[:3]
            said = ", ".join(f"{name} {gib(size)}" for name, size in largest)
            notes.append(
                f"{need.stage} will take about {gib(need.host_bytes)} of host memory, and asks "
                f"for {gib(asked)} ({need.stage}.resources.memory_gb): {said}."
            )
    return notes


def _asked(config: RecipeConfig, need: MemoryNeed) -> int:
    return section_of(config, need.stage).resources.memory_gb * _GIB


def model_shape(config: RecipeConfig) -> ModelShape | None:
    """Sizes of a recipe's model, by its files or its name; None if unknown."""
    files = model_files(config.model.name_or_path, config.model.revision)
    size: ModelSize = model_size(files.folder if files else None, config.model.name_or_path)
    if size.parameters is None:
        return None
    text = files.text_config if files else {}

    def number(name: str) -> int:
        value = text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    width = number("head_dim") or (hidden // heads if heads else 0)
    return ModelShape(
        parameters=size.parameters,
        hidden=hidden,
        inner=number("intermediate_size"),
        layers=number("num_hidden_layers"),
        pairs=width * (number("num_key_value_heads") or heads),
        words=number("vocab_size"),
    )


def check_server_programs(plan: Plan) -> None:
    """Refuse a plan whose servers cannot be started on this machine.

    Raises
    ------
    UnsupportedError
        An interpreter, a container's program or the engine's command is missing.
    """
    if plan.config.dispatch.executor != "local":
        return  # compute nodes cannot be checked from here
    workspace = Workspace.read_only(plan.config.workspace)
    kinds = {s.kind for s in plan.stages if workspace.read_result(s.id) is None}
    for section, field, engine in _programs(plan.config, kinds):
        from infra.services.process import ServerProgram

        program = ServerProgram(section, field, engine)
        if program.lacking:
            setting = f"{program.field}.python=/PATH/bin/python"
            raise UnsupportedError(
                f"{program.field} is to serve models with {program.engine}, and {program.lacking}.",
                expected=f"an environment with {program.engine}: `{program.field}.python`, `setup` "
                "or `container`",
                fix=f"make one (`python3 -m venv DIR && DIR/bin/pip install {program.engine}`) and "
                f"set {setting}; `refiner doctor RECIPE` tries it",
            )


def _programs(
    config: RecipeConfig, kinds: Collection[str]
) -> Iterator[tuple[RolloutServerConfig | ServeConfig, str, str]]:
    """The section, its name and the engine of each server that stages of these kinds start."""
    if any(starts_servers(config, kind) for kind in kinds):
        yield config.grpo.rollout_server, "grpo.rollout_server", "vllm"
    engine = engine_of(config.judge)
    asked = any(asks_judge(config, kind) for kind in kinds)
    if asked and serves(config.judge) and engine in ("vllm", "transformers"):
        yield config.judge.serve, "judge.serve", engine
