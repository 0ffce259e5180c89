"""Attacks on a reward as a workspace keeps them, and the holes that they left open.

In: a recipe. Out: the file of the newest attacks on exactly its reward and judge, and notes.
"""

from __future__ import annotations

from pathlib import Path

from infra.store import atomic
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.fingerprint import digest, identity_values


def attacks_file(config: RecipeConfig) -> Path:
    """File of the attacks on a recipe's reward, as its judge scores it."""
    name = digest(identity_values(config, ("reward", "judge")))[:12]
    return Workspace.read_only(config.workspace).layout.attacks / f"{name}.json"


def attack_notes(config: RecipeConfig) -> list[str]:
    """A note on attacks that pay; none if the reward was not attacked, or none of them pays."""
    if config.environment.name or not {"grpo", "sample"} & {*config.stages}:
        return []
    found = atomic.read_json(attacks_file(config))
    paid = [one["name"] for one in found["attacks"] if one["pays"]] if found else []
    if not found or not paid:
        return []
    rows = found["honest"]["n"]
    return [
        f"{len(paid)} of {len(found['attacks'])} attacks on this reward pay ({', '.join(paid)}; "
        f"{rows} rows): training may find them. The fields reward.penalties.* set prices, and "
        "refiner reward attack shows what they close."
    ]
