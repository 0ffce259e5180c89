"""``command``: another trainer's script to weights in the layout of the Hub."""

from __future__ import annotations

from collections.abc import Mapping

from refiner_core.contract.config import RecipeConfig, uses
from refiner_core.contract.kinds.kind import CardWords, Kind, Reads


def _reads(kind: Kind, config: RecipeConfig, inputs: Mapping[str, str]) -> Reads:
    if config.command.adopted:  # the weights are what they are, whatever made them
        return Reads(("command.adopted",), ())
    if "policy" not in inputs and uses(config.command, "model"):
        return Reads((*kind.fields, "model.name_or_path", "model.revision"), ("model",))
    return Reads(kind.fields, ())


def _inputs(config: RecipeConfig, newest: str) -> dict[str, str]:
    found = {"data": "data"} if uses(config.command, "data") else {}
    return found | ({"policy": newest} if newest and uses(config.command, "model") else {})


KIND = Kind(
    "command",
    order=70,
    run="flows.stages.foreign:run_foreign",
    fields=("seed", "command"),
    reads=_reads,
    trains="elsewhere",
    inputs=_inputs,
    needs_network=lambda config: config.command.needs_network,
    label="external",
    card=CardWords(
        algorithm="that of another trainer",
        short="Externally trained",
        tags=("command",),
        sections=("command", "seed"),
        silent=("grpo.", "reward.", "judge.", "sft.", "publish.", "evaluate."),
        data_sets=(),
    ),
)
