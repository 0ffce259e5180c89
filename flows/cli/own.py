"""`refiner init` and `refiner data`: a recipe and rows of one's own."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from flows.cli.aliases import former_option
from flows.cli.options import (
    argument,
    at_most_one,
    command_line,
    json_option,
    print_json,
    print_line,
    print_next,
    progress,
    show,
    split_overrides,
)
from flows.starting.flags import FLAGS

if TYPE_CHECKING:
    from refiner_core.data.checking import DataCheck


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


_kind_option = click.option(
    "--as",
    "which",
    type=click.Choice(["sft", "rl"]),
    help="what they are",
)
#: Rows printed per reason; the JSON has all.
_SHOWN = 20
_REFUSED = 3


@click.group("data")
def data_command() -> None:
    """Check and convert rows of your own; print rows that work."""


@data_command.command("check")
@argument("file", metavar="FILE")
@argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@_kind_option
@json_option
def check_data_command(file: str, words: tuple[str, ...], which: Any, as_json: bool) -> int:
    """Check the rows of FILE: every row that a run would refuse or drop, with its fix.

    With RECIPE also lengths against its windows, and held-out questions that nearly repeat a
    training question. The exit code is 3 if a run would refuse a row.
    """
    from flows.checking.own_data import check_data

    names, overrides = split_overrides(words)
    recipe = at_most_one(names, "recipe")
    check = check_data(file, recipe, overrides, which=which, progress=progress("rows"))
    show(as_json, lambda: _check_json(check), lambda: _check_lines(check, file))
    if not as_json and not check.refused and check.usable:
        where = f"data.{check.which}_path={file}"
        print_next(command_line("plan", recipe or "tiny", where))
    return _REFUSED if check.refused or not check.usable else 0


def _check_json(check: DataCheck) -> dict[str, Any]:
    from refiner_core.contract.records import to_json

    value = {**to_json(check), "refused": check.refused}
    value["near"] = [one._asdict() for one in check.near]
    return {"version": 1, **value}


def _check_lines(check: DataCheck, file: str) -> Iterator[str]:
    from refiner_core.report.printing import counted, table_lines

    kinds = {"sft": "demonstrations", "rl": "prompts with rubrics"}
    dropped = len(check.problems) - check.refused
    yield (
        f"{file}: {check.usable} of {check.rows} rows are usable as {kinds[check.which]}; "
        f"{check.refused} refused, {dropped} dropped"
    )
    by_reason = Counter((p.refused, p.reason, p.fix) for p in check.problems)
    for (refused, reason, fix), count in sorted(by_reason.items(), key=lambda pair: -pair[0][0]):
        lines = [p.line for p in check.problems if (p.refused, p.reason) == (refused, reason)]
        shown = ", ".join(map(str, lines[:_SHOWN])) + ", …" * (len(lines) > _SHOWN)
        yield f"\n{'refused' if refused else 'dropped'}, {counted(count, 'row')}: {reason}"
        yield f"  line{'s' * (count > 1)} {shown}"
        yield f"  to fix it: {fix}"
    if check.lengths:
        header = ("tokens", *next(iter(check.lengths.values())))
        rows = [(name, *map(str, found.values())) for name, found in check.lengths.items()]
        yield ""
        yield from table_lines(rows, header)
        yield ", ".join(f"{field} is {limit}" for field, limit in check.windows.items())
    if check.which == "rl" and check.questions:
        yield f"\n{check.questions} questions, of which {check.held_out} would be held out"
    if check.near:
        yield f"{len(check.near)} held-out questions nearly repeat a training question:"
        for one in check.near[:_SHOWN]:
            yield (
                f"  line {one.held_out_line} and line {one.training_line} "
                f"({100 * one.share:.0f} % alike): {one.question[:80]}"
            )


@data_command.command("example")
@_kind_option
@click.option("-n", "count", type=click.IntRange(1, 1000), default=2, show_default=True,
              help="number of rows")  # fmt: skip
def example_data_command(which: Any, count: int) -> None:
    """Print rows that work, as JSON Lines."""
    from flows.checking.own_data import example_rows

    for row in example_rows(which or "sft", count):
        click.echo(json.dumps(row, ensure_ascii=False))
    print_line("Next: write your own like these to rows.jsonl, then refiner data check rows.jsonl")


@data_command.command("convert")
@argument("file", metavar="FILE")
@argument("out", metavar="OUT")
@json_option
def convert_data_command(file: str, out: str, as_json: bool) -> None:
    """Write the rows of FILE to OUT (JSON Lines) in refiner's form.

    Known layouts: messages; prompt and completion, as texts or turns (TRL); question and answer;
    those of open-instruct. Evidence in a column such as `documents` goes into the prompt.
    """
    from flows.checking.own_data import convert_data

    made = convert_data(file, out)
    following = [command_line("data", "check", out)]
    line = f"{made['rows']} rows, {made['rubrics']} with rubrics: {out}"
    show(as_json, lambda: {"version": 1, "file": out, **made}, lambda: [line], following)
