"""Goldens of what scripts and recorded workspaces rely on: files in ``tests/data/goldens``.

``fingerprints``: every stage of all shipped recipes and sweeps. ``commands``: every command, its
arguments and options, and the exit codes. ``plan``, ``sweep``: keys and types of what ``--json``
prints. (`status` and `report` need a run: :mod:`tests.integration.test_recorded_workspace`.)

    python -m tests.support.goldens     # write them again; read the diff before you commit it
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from flows.api import forecast, plan_json
from flows.cli.main import cli
from flows.running.calls import make_recipe_plan
from flows.sweeping.planning import make_sweep_plan, sweep_json
from refiner_core.contract.errors import EXIT_CODES
from refiner_core.contract.plan import Plan
from refiner_core.contract.recipes import shipped_recipes
from tests.support.command import ROOT

GOLDENS = Path(__file__).resolve().parents[1] / "data" / "goldens"
NOWHERE = "workspace=/nonexistent/refiner"


def fingerprints() -> dict[str, Any]:
    """Recipe or sweep -> trial -> stage -> fingerprint."""

    def of(plan: Plan) -> dict[str, str]:
        return {stage.name: stage.fingerprint for stage in plan.stages}

    return {
        "recipes": {name: of(make_recipe_plan(name, [NOWHERE])) for name in shipped_recipes()},
        "sweeps": {
            path.stem: {
                trial.name: of(trial.plan) for trial in make_sweep_plan(path.stem, [NOWHERE]).trials
            }
            for path in sorted((ROOT / "sweeps").glob("*.yaml"))
        },
    }


def commands() -> dict[str, Any]:
    """Exit codes, and command -> its arguments and options."""
    return {"exit codes": {str(code): text for code, text in EXIT_CODES.items()}, **_walk(cli, "")}


def _walk(command: click.Command, path: str) -> dict[str, Any]:
    name = f"{path} {command.name}".strip() if path else "refiner"
    found = {name: {_spelled(p): _told(p) for p in command.params}}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            child = command.get_command(context, inner)
            assert child is not None, inner
            child.name = inner
            found |= _walk(child, name)
    return found


def _spelled(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return " ".join(sorted([*parameter.opts, *parameter.secondary_opts], key=len))
    return str(parameter.name).upper()


def _told(parameter: click.Parameter) -> str:
    told = [parameter.type.name]
    if isinstance(parameter.type, click.Choice):
        told = ["|".join(map(str, parameter.type.choices))]
    if isinstance(parameter, click.Option) and parameter.is_flag:
        told = ["flag"]
    told += ["required"] * parameter.required + ["repeated"] * (
        parameter.multiple or parameter.nargs == -1
    )
    return ", ".join(told)


def shape(value: Any) -> Any:
    """Keys and types of a JSON value; the entries of a list have one shape between them."""
    if isinstance(value, Mapping):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [functools.reduce(_either, map(shape, value))] if value else []
    return "number" if type(value) in (int, float) else type(value).__name__


def _either(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _either(one[key], other[key])
            if key in one and key in other
            else one.get(key, other.get(key))
            for key in sorted({*one, *other})
        }
    if isinstance(one, list) and isinstance(other, list):
        return [functools.reduce(_either, [*one, *other])] if one or other else []
    if isinstance(one, str) and isinstance(other, str):
        return "|".join(sorted({*one.split("|"), *other.split("|")}))
    return other if one == "NoneType" else one


def plan() -> Any:
    """The shape of ``refiner plan tiny --json``."""
    made = make_recipe_plan("tiny", [NOWHERE])
    return shape(plan_json(made, forecast(made)))


def sweep() -> Any:
    """The shape of ``refiner sweep citation-weight-tiny --dry-run --json``."""
    return shape(sweep_json(make_sweep_plan("citation-weight-tiny", [NOWHERE])))


MADE: Mapping[str, Callable[[], Any]] = {
    "fingerprints": fingerprints,
    "commands": commands,
    "plan": plan,
    "sweep": sweep,
}


def read(name: str) -> Any:
    """The golden of that name."""
    return json.loads((GOLDENS / f"{name}.json").read_text())


def write(name: str, value: Any) -> None:
    """Write the golden of that name."""
    GOLDENS.mkdir(parents=True, exist_ok=True)
    (GOLDENS / f"{name}.json").write_text(
        json.dumps(value, indent=1, ensure_ascii=False, sort_keys=name != "commands") + "\n"
    )


if __name__ == "__main__":
    for name, make in MADE.items():
        write(name, make())
