"""Plans: what a recipe would do, and why. Changes nothing.

In: a recipe and overrides, as for ``refiner plan``. Out: plans, forecasts and explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flows.running.calls import make_recipe_plan
from infra.orchestrator.observe import ActionForecast, explain_difference, observe_actions
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import picked, to_json

#: Version of the JSON that `plan --json` and `run --json` print.
OUTPUT_VERSION = 1


class StageExplanation(NamedTuple):
    """A stage, what a run would do with it, and its differences from the nearest record."""

    forecast: ActionForecast
    differences: Sequence[str]


def forecast(plan: Plan) -> list[ActionForecast]:
    """What a run would do now, stage by stage.

    Parameters
    ----------
    plan
        From :func:`flows.api.make_recipe_plan`.

    Returns
    -------
    list of StageForecast
        Each with ``stage``, ``action`` (run, skip, reattach) and ``reason``.

    Raises
    ------
    WorkspaceError
        A record is damaged; the message names it and the fix.
    """
    return observe_actions(plan, Workspace.read_only(plan.config.workspace))


def plan_json(plan: Plan, forecasts: Sequence[ActionForecast]) -> dict[str, Any]:
    """A plan as JSON.

    Parameters
    ----------
    plan, forecasts
        The plan, and the result of :func:`flows.api.forecast`.

    Returns
    -------
    dict
        The content of ``refiner run --dry-run --json``; `plan --json` adds disk and memory.
    """
    return {
        "version": OUTPUT_VERSION,
        "recipe": plan.recipe,
        "workspace": plan.config.workspace,
        "stages": [
            {
                "stage": f.stage.kind,
                **picked(f.stage, "name", "id", "fingerprint"),
                **picked(f, "action", "reason"),
                **picked(f.stage, "inputs", "needs_network", "resources"),
                "config": dict(f.stage.identity),
            }
            for f in forecasts
        ],
        "config": to_json(plan.config),
    }


def explain_stage(
    stage: str, recipe: str, overrides: Sequence[str] = ()
) -> tuple[Plan, list[StageExplanation]]:
    """Explain, field by field, why a stage would run or be skipped.

    Parameters
    ----------
    stage
        A name such as ``evaluate-sft``, or a kind, which may cover several.
    recipe, overrides
        As for :func:`flows.api.make_recipe_plan`.

    Returns
    -------
    Plan, list of Explained
        The plan, and the matching stages.

    Raises
    ------
    ConfigurationError
        There is no such stage, or the recipe cannot be carried out.
    """
    plan = make_recipe_plan(recipe, overrides)
    wanted = {s.name for s in plan.find(stage)}
    workspace = Workspace.read_only(plan.config.workspace)
    found = [f for f in forecast(plan) if f.stage.name in wanted]
    return plan, [StageExplanation(f, explain_difference(f.stage, workspace)) for f in found]


def list_recipes() -> dict[str, RecipeConfig]:
    """List the shipped recipes.

    Returns
    -------
    dict
        Name to configuration, with a ``description``.

    Raises
    ------
    ConfigurationError
        A recipe is damaged, and so is the installation.
    """
    return {name: load_recipe(name) for name in shipped_recipes()}
