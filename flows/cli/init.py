"""`refiner init`: a folder with a new recipe, chosen by flags."""

from __future__ import annotations

import os
from typing import Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import argument, command_line, json_option, print_json, print_next
from flows.starting.flags import FLAGS


def _flags(command: Any) -> Any:
    from flows.starting.completion import complete_answer

    for name, flag in list(FLAGS.items())[::-1]:
        option = click.option(
            f"--{name}", metavar="ANSWER", help=flag.about, shell_complete=complete_answer
        )
        command = option(command)
    return command


@click.command("init")
@argument("folder", metavar="[DIR]", default=".")
@_flags
@former_option("--sweep", "Copy a shipped one: `refiner sweep` lists them.")
@click.option("--yes", "-y", is_flag=True, hidden=True, help="no effect any more")
@json_option
def init_command(folder: str, yes: bool, as_json: bool, **flags: str | None) -> None:
    """Start a recipe of your own in DIR (default: here), ready to plan.

    The recipe includes a shipped one and sets what differs, with a comment on each field. With
    Slurm, a profile of your cluster is written, too. Nothing is overwritten, and nothing is
    written unless the recipe can be planned.
    """
    from flows.cli.plan import show_plan_of
    from flows.starting.folder import RECIPE, init_folder

    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    place, plan, files = init_folder(folder, given)
    recipe = os.path.relpath(place / RECIPE)
    following = [command_line(verb, recipe) for verb in ("doctor", "plan", "run")]
    if as_json:
        stages = [
            {"stage": s.kind, "name": s.name, "fingerprint": s.fingerprint} for s in plan.stages
        ]
        made = {"folder": str(place), "files": list(files), "stages": stages, "next": following}
        print_json({"version": 1, **made})
        return
    click.echo(f"Made {', '.join(files)} in {place}.\n")
    show_plan_of(plan, as_json=False)
    if not given:
        click.echo("\nOther tasks, models, data, judges and clusters: refiner init --help")
    print_next(*following, gap=True)
