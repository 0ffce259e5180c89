"""Plans: what a recipe would do, why. All of it changes nothing.

In: a recipe and overrides, as for ``refiner plan``. Out: plans and what is said of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flows.running.calls import make_recipe_plan
from infra.orchestrator.observe import StageForecast, explain_difference, observe_actions
from infra.store.workspace import Workspace
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.plan import Plan
from refiner_core.contract.recipes import shipped_recipes
from refiner_core.contract.records import picked, to_json

#: Version of the JSON that `plan --json` and `run --json` print.
OUTPUT_VERSION = 1


class Explained(NamedTuple):
    """A stage, what a run would do about it, and in what it differs from the nearest record."""

    forecast: StageForecast
    differences: Sequence[str]


def forecast(plan: Plan) -> list[StageForecast]:
    """Forecast of what a run would do now, stage by stage.

    Parameters
    ----------
    plan
        What :func:`flows.api.make_recipe_plan` has made.

    Returns
    -------
    list of StageForecast
        Each with ``stage``, ``action`` (run, skip, reattach) and ``reason``.

    Raises
    ------
    WorkspaceError
        A record is damaged; says which, and what to do.
    """
    return observe_actions(plan, Workspace.read_only(plan.config.workspace))


def plan_json(plan: Plan, forecasts: Sequence[StageForecast]) -> dict[str, Any]:
    """A plan for scripts.

    Parameters
    ----------
    plan, forecasts
        The plan, and what :func:`flows.api.forecast` says of it.

    Returns
    -------
    dict
        What ``refiner run --dry-run --json`` prints; `plan --json` adds disk and memory.
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
) -> tuple[Plan, list[Explained]]:
    """Explain, field by field, why a stage would run or be skipped.

    Parameters
    ----------
    stage
        A name such as ``evaluate-sft``, or a kind, which may mean several.
    recipe, overrides
        As for :func:`flows.api.make_recipe_plan`.

    Returns
    -------
    Plan, list of Explained
        The plan, and the stages that are meant.

    Raises
    ------
    ConfigurationError
        There is no such stage, or the recipe cannot be carried out as it stands.
    """
    plan = make_recipe_plan(recipe, overrides)
    wanted = {s.name for s in plan.find(stage)}
    workspace = Workspace.read_only(plan.config.workspace)
    found = [f for f in forecast(plan) if f.stage.name in wanted]
    return plan, [Explained(f, explain_difference(f.stage, workspace)) for f in found]


def list_recipes() -> dict[str, RecipeConfig]:
    """The recipes that come with refiner.

    Returns
    -------
    dict
        Name to configuration; ``description`` says what it is for.

    Raises
    ------
    ConfigurationError
        One of them is damaged: the installation is.
    """
    return {name: load_recipe(name) for name in shipped_recipes()}
