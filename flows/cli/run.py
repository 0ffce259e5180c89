"""`refiner run`: bring about what a recipe asks for."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import click

from flows.cli.options import (
    json_option,
    overrides_argument,
    print_json,
    recipe_argument,
    until_nobody_reads,
)


@click.command("run")
@recipe_argument
@overrides_argument
@click.option("--dry-run", is_flag=True, help="print the plan and change nothing")
@json_option
@click.option("--no-server", is_flag=True, help="no Prefect server, no picture in its UI")
@click.option("--quiet", "-q", is_flag=True, help="no progress; warnings and failures only")
def run_command(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    no_server: bool,
    quiet: bool,
) -> int:
    """Carry out RECIPE: a shipped name (see `refiner recipes`) or a YAML file.

    What is done is skipped, what already runs is waited for, what was interrupted goes on from its
    last checkpoint. Ctrl-C, SIGTERM and closing the terminal (unless under nohup) ask the running
    stages to save and stop; the same command goes on.
    """
    from flows.api import make_recipe_plan, run_json, run_recipe
    from flows.cli.plan import show_plan

    if dry_run:
        show_plan(make_recipe_plan(recipe, overrides), recipe, overrides, as_json)
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores a closed terminal
            signal.signal(number, _like_ctrl_c)
    outcome = run_recipe(recipe, overrides, use_server=not no_server, quiet=quiet)
    with until_nobody_reads():
        if as_json:
            print_json(run_json(outcome))
        else:
            from flows.summary import summary_lines

            for line in summary_lines(outcome):
                click.echo(line)
        sys.stdout.flush()
    return outcome.exit_code


def _like_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
