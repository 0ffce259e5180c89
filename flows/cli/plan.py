"""`refiner plan`, `explain`, `recipes`: look, change nothing, import nothing heavy."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    print_table,
    recipe_argument,
)

if TYPE_CHECKING:
    from refiner_core.contract.plan import Plan


@click.command("plan")
@recipe_argument
@overrides_argument
@json_option
def plan_command(recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what a recipe would do: which stages run, which are skipped, and why.

    Changes nothing, and needs neither network nor GPU.
    """
    from flows.api import make_recipe_plan

    show_plan(make_recipe_plan(recipe, overrides), recipe, overrides, as_json)


def show_plan(plan: Plan, recipe: str, overrides: Sequence[str], as_json: bool) -> None:
    """Print a plan as a table or as JSON."""
    from flows.api import forecast, plan_json

    forecasts = forecast(plan)
    if as_json:
        print_json(plan_json(plan, forecasts))
        return
    click.echo(f"{plan.recipe}: {plan.config.description}".strip())
    click.echo(f"workspace: {plan.config.workspace}\n")
    rows = [
        (
            f.stage.name,
            f.stage.fingerprint[:12],
            f.action,
            _resources(f.stage.resources.gpus, f.stage.resources.nodes, f.stage.resources.cpus),
            f.reason,
        )
        for f in forecasts
    ]
    print_table(rows, ("stage", "fingerprint", "action", "resources", "why"))
    command = shlex.join(["refiner", "run", recipe, *overrides])
    explain = shlex.join(["refiner", "explain", forecasts[-1].stage.name, recipe, *overrides])
    click.echo(f"\nNext:\n  {command}\n  {explain}", err=True)


def _resources(gpus: int, nodes: int, cpus: int) -> str:
    unit = f"{gpus} GPU" if gpus else f"{cpus} CPU"
    return unit if nodes == 1 else f"{nodes} x {unit}"


@click.command("explain")
@click.argument("stage", metavar="STAGE")
@recipe_argument
@overrides_argument
@json_option
def explain_command(stage: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say why STAGE (a name such as `evaluate-sft`, or a kind) would run or be skipped.

    Names every field in which it differs from the most similar stage that the workspace has.
    """
    from flows.api import forecast, make_recipe_plan
    from infra.explain import explain_difference
    from infra.workspace import Workspace

    plan = make_recipe_plan(recipe, overrides)
    wanted = {s.name for s in plan.find(stage)}
    workspace = Workspace.read_only(plan.config.workspace)
    found = []
    for entry in forecast(plan):
        if entry.stage.name in wanted:
            differences = explain_difference(entry.stage, workspace)
            found.append((entry, differences))
    if as_json:
        print_json(
            {
                "version": 1,
                "stages": [
                    {
                        "stage": e.stage.kind,
                        "name": e.stage.name,
                        "fingerprint": e.stage.fingerprint,
                        "action": e.action,
                        "reason": e.reason,
                        "differences": d,
                        "inputs": dict(e.stage.inputs),
                        "config": dict(e.stage.identity),
                    }
                    for e, d in found
                ],
            }
        )
        return
    for entry, differences in found:
        click.echo(f"{entry.stage.title}: {entry.action}, {entry.reason}")
        for line in differences:
            click.echo(f"  differs from the nearest recorded one in {line}")
        for key, value in sorted(entry.stage.identity.items()):
            click.echo(f"  {key} = {value}")
        for role, name in entry.stage.inputs.items():
            click.echo(f"  input {role} = {plan.by_name[name].title}")


@click.command("recipes")
@json_option
def recipes_command(as_json: bool) -> None:
    """List the shipped recipes with what each is for."""
    from refiner_core.contract.loading import load_recipe, shipped_recipes

    found = {name: load_recipe(name).description for name in shipped_recipes()}
    if as_json:
        print_json({"version": 1, "recipes": found})
        return
    for name, description in found.items():
        click.echo(name)
        click.echo(f"  {description}\n")
