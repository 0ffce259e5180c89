"""Former names of commands, and former options: they print what to use instead."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

from refiner_core.contract.records import picked

F = TypeVar("F", bound=Callable[..., Any])


def former(command: click.Command) -> click.Command:
    """Deprecated form of a command that is now at the top level."""
    before = copy.copy(command)
    before.deprecated = f"It is `refiner {command.name}` now."
    return before


def former_listing(kind: str, name: str) -> click.Command:
    """Deprecated command that lists one kind, as `refiner list` does."""

    @click.command(name, deprecated=f"It is `refiner list {kind}` now.")
    @click.option("--json", "as_json", is_flag=True, help="print JSON on stdout")
    def listed(as_json: bool) -> None:
        _top("list", kind=kind, as_json=as_json)

    return listed


def former_list_of_runs(workspace: str, as_json: bool) -> None:
    """`refiner status --all`: `refiner runs --all`, with the former keys as JSON, oldest first."""
    from flows.runs.run_table import list_rows

    click.echo("warning: `refiner status --all` is `refiner runs --all` now", err=True)
    if not as_json:
        _top("runs", words=(f"workspace={workspace}",), every=True)
        return
    rows = list_rows(workspace, every=True)[::-1]
    found = [
        {**picked(row, "run", "recipe", "state"), "stages_done": f"{row.stages_done}/{row.stages}"}
        for row in rows
    ]
    click.echo(json.dumps({"version": 1, "runs": found}, indent=2))


def _top(name: str, **given: object) -> None:
    """Call a command of `refiner`."""
    context = click.get_current_context()
    refiner = cast("click.Group", context.find_root().command)
    context.invoke(cast("click.Command", refiner.get_command(context, name)), **given)


def former_option(name: str, instead: str, *, flag: bool = False) -> Callable[[F], F]:
    """An option without effect that warns and names its replacement."""

    def warn(context: click.Context, option: click.Parameter, given: object) -> None:
        if given:
            click.echo(f"warning: {name} does nothing any more. {instead}", err=True)

    return click.option(name, is_flag=flag, hidden=True, expose_value=False, callback=warn)
