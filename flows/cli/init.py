"""`refiner init`: a folder with a recipe of one's own, from a few questions or flags."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flows.cli.options import json_option, print_json
from flows.starting.questions import QUESTIONS, Asked, Question

if TYPE_CHECKING:
    from refiner_core.contract.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


def _flags(command: F) -> F:
    """A flag for every question."""
    for question in reversed(QUESTIONS):
        words = f"{question.text} {question.why}"
        name = question.name.replace("-", "_")
        command = click.option(question.flag, name, metavar="ANSWER", help=words)(command)
    return command


@click.command("init")
@click.argument("folder", metavar="[DIR]", default=".")
@_flags
@click.option("--yes", "-y", is_flag=True, help="take the default of whatever no flag says")
@json_option
def init_command(folder: str, yes: bool, as_json: bool, **flags: str | None) -> None:
    """Begin: make DIR (default: here) with a recipe of your own, ready to plan.

    Asks a few questions, each with a default; a flag answers its question beforehand. The recipe
    includes a shipped one and holds what differs, a profile of your cluster goes along where jobs
    go to Slurm. Nothing is overwritten, and nothing is made unless the recipe can be planned.
    """
    from flows.api import init_folder

    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    ask = _ask if on_terminal and not yes else None
    place, plan, files = init_folder(folder, given, ask=ask, take_defaults=yes)
    _show(plan, place, files, as_json)


def _ask(question: Question, asked: Asked) -> str:
    """Ask until the answer fits; Ctrl-C and an end of input end it."""
    from refiner_core.contract.errors import RefinerError

    default = question.default(asked)
    offered = question.choices(asked)
    click.echo(f"\n{question.text}" + f" ({', '.join(offered)})" * bool(offered), err=True)
    click.echo(f"  {question.why}", err=True)
    while True:
        answer = click.prompt(
            f"  {question.name}", default=default, show_default=bool(default), err=True
        ).strip()
        try:
            kept = question.check(answer, asked)
            said = question.said(kept, asked)
        except RefinerError as error:
            click.echo(f"  {error}", err=True)
            continue
        if said:
            click.echo(f"  {said}", err=True)
        return kept


def _show(plan: Plan, folder: Path, files: dict[str, str], as_json: bool) -> None:
    from flows.cli.plan import show_made_plan
    from flows.starting.drafting import RECIPE, SWEEP

    recipe = _typed(folder / RECIPE)
    following = [["refiner", verb, recipe] for verb in ("doctor", "plan", "run")]
    if SWEEP in files:
        following.append(["refiner", "sweep", _typed(folder / SWEEP), "--dry-run"])
    if as_json:
        print_json(
            {
                "version": 1,
                "folder": str(folder),
                "files": list(files),
                "stages": [
                    {"stage": s.kind, "name": s.name, "fingerprint": s.fingerprint}
                    for s in plan.stages
                ],
                "next": [shlex.join(words) for words in following],
            }
        )
        return
    click.echo(f"Made {', '.join(files)} in {folder}.\n")
    show_made_plan(plan, as_json=False)
    click.echo("\nNext:\n  " + "\n  ".join(map(shlex.join, following)), err=True)


def _typed(path: Path) -> str:
    """As one would type it from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
