"""`refiner init`: a folder with a recipe of one's own, from a few questions or flags."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from flows.cli.options import json_option, print_json, say, say_next
from flows.starting.questions import QUESTIONS, Asked, Question
from refiner_core.contract.errors import RefinerError


def _flags(command: Any) -> Any:
    """A flag for every question."""
    for question in reversed(QUESTIONS):
        words = f"{question.text} {question.why}"
        command = click.option(f"--{question.name}", metavar="ANSWER", help=words)(command)
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
    from flows.cli.plan import show_made_plan
    from flows.starting.folder import RECIPE, SWEEP, init_folder

    given = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    ask = _ask if on_terminal and not yes else None
    place, plan, files = init_folder(folder, given, ask=ask, take_defaults=yes)
    recipe = _typed(place / RECIPE)
    following = [f"refiner {verb} {shlex.quote(recipe)}" for verb in ("doctor", "plan", "run")]
    if SWEEP in files:
        following.append(shlex.join(["refiner", "sweep", _typed(place / SWEEP), "--dry-run"]))
    if as_json:
        stages = [
            {"stage": s.kind, "name": s.name, "fingerprint": s.fingerprint} for s in plan.stages
        ]
        made = {"folder": str(place), "files": list(files), "stages": stages, "next": following}
        print_json({"version": 1, **made})
        return
    click.echo(f"Made {', '.join(files)} in {place}.\n")
    show_made_plan(plan, as_json=False)
    say_next(*following, gap=True)


def _ask(question: Question, asked: Asked) -> str:
    """Ask until the answer fits; Ctrl-C and an end of input end it."""
    default, words = question.proposal(asked), question.words(asked)
    say(f"\n{question.text}" + f" ({', '.join(words)})" * bool(words) + f"\n  {question.why}")
    while True:
        answer = click.prompt(
            f"  {question.name}", default=default, show_default=bool(default), err=True
        )
        try:
            return question.check(answer.strip(), asked)
        except RefinerError as error:
            say(f"  {error}")


def _typed(path: Path) -> str:
    """As one would type it from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
