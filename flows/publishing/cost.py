"""What a model has cost, from the attempts behind it.

In: attempts with their times, and what each asked for. Out: GPU-hours and core-hours, those that
were lost among them, seconds by stage. Lost is what another attempt did again: of an attempt that
ended at step 120 after a start at 0, and was followed by one that went on from step 100, one sixth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.publishing.behind import Behind
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig, Resources
from refiner_core.contract.records import Attempt, from_json

_HOUR_S = 3600.0
_DIGITS = 6


def cost_of(workspace: Workspace, made: Behind, config: RecipeConfig) -> dict[str, Any]:
    """The cost of a model, as :class:`refiner_core.cards.CardFacts` has it; empty where nothing is
    known (weights that were adopted). Where it is not known of one attempt how long it took (a
    checkpoint of a version that did not say), nothing is said of its stage, and there is no total.

    Parameters
    ----------
    config
        Says what a GPU-hour costs.
    """
    hours = dict.fromkeys(("gpu_hours", "core_hours", "lost_gpu_hours", "lost_core_hours"), 0.0)
    seconds: dict[str, float] = {}
    unknown: set[str] = set()
    for name, attempts in made.attempts.items():
        if made.reports.get(name, {}).get("adopted"):
            continue
        stage_id, kind = made.ids[name], made.records[name].spec.kind
        for place, attempt in enumerate(attempts):
            if attempt.seconds is None:
                if attempt.started_at is not None:
                    unknown.add(name)
                continue
            asked = _resources(workspace, stage_id, attempt.number, kind)
            used = {"gpu_hours": asked.gpus * asked.nodes, "core_hours": asked.cpus * asked.nodes}
            lost = _lost_share(attempt, attempts[place + 1 :])
            for unit, count in used.items():
                hours[unit] += count * attempt.seconds / _HOUR_S
                hours[f"lost_{unit}"] += lost * count * attempt.seconds / _HOUR_S
            seconds[name] = seconds.get(name, 0.0) + attempt.seconds
    known = {name: round(value, 3) for name, value in seconds.items() if name not in unknown}
    if unknown or not known:
        return {"seconds": known} if known else {}
    found: dict[str, Any] = {key: round(value, _DIGITS) for key, value in hours.items()}
    found["seconds"] = known
    if config.publish.price_per_gpu_hour is not None:
        found["price"] = config.publish.price_per_gpu_hour
        found["currency"] = config.publish.currency
    return found


def _resources(workspace: Workspace, stage_id: str, number: int, kind: str) -> Resources:
    """What an attempt asked for, by the configuration that was recorded with it."""
    recorded = workspace.part(workspace.layout.attempt(stage_id, number), "config")
    config = from_json(RecipeConfig, recorded)
    resources: Resources = getattr(config, kind).resources
    return resources


def _lost_share(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """The share of an attempt's work that the next one did again."""
    if attempt.outcome is None or attempt.outcome.failure == "none" or not later:
        return 0.0
    start, end = attempt.resumed_from_step or 0, attempt.outcome.step
    again_from = max(later[0].resumed_from_step or 0, start)
    if again_from <= start:
        return 1.0  # nothing of it was kept
    if end is None or end <= again_from:
        return 0.0
    return (end - again_from) / (end - start)
