"""`refiner adopt`: a dead run of anybody's becomes a record that can go on, or be published."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from flows.cli.options import json_option, overrides_argument, print_json, print_table


@click.command("adopt")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@overrides_argument
@click.option("--step", type=int, help="which checkpoint; the newest complete one otherwise")
@click.option("--recipe", help="recipe whose data, judge and evaluation are used")
@click.option(
    "--companions",
    type=click.Path(path_type=Path),
    help="folder with config and tokenizer, where the checkpoint has none",
)
@click.option("--name", help="name of the model; the folder's otherwise")
@click.option("--copy", is_flag=True, help="copy the files instead of linking them")
@click.option("--in-place", is_flag=True, help="links by name; DIR must stay where it is")
@click.option("--dry-run", is_flag=True, help="look, say what would be done, change nothing")
@json_option
def adopt_command(
    folder: Path,
    overrides: tuple[str, ...],
    step: int | None,
    recipe: str | None,
    companions: Path | None,
    name: str | None,
    copy: bool,
    in_place: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Take over the run in DIR, whatever trainer has written it.

    Every checkpoint is looked at: shards that are cut short or missing, folders that are empty. Of
    another trainer's run, the newest complete checkpoint becomes a finished stage in the workspace,
    ready to be published and evaluated; nothing is copied unless asked for. Of refiner's own (a
    workspace, or a stage's folder), the stages go on where they were, by the same recipe.
    """
    from flows.api import adopt_run
    from refiner_core.contract.errors import ConfigurationError

    if copy and in_place:
        raise ConfigurationError(
            "--copy and --in-place exclude each other.",
            expected="one of them, or neither for hard links",
            fix="leave one out",
        )
    report = adopt_run(
        folder,
        overrides,
        step=step,
        recipe=recipe,
        companions=companions,
        name=name,
        how="copy" if copy else "in-place" if in_place else "link",
        dry_run=dry_run,
    )
    if as_json:
        print_json(report)
    else:
        _show(report)
    return 0


def _show(report: dict[str, Any]) -> None:
    if report["kind"] == "refiner":
        rows = [
            [s["name"], s["id"], "" if s["step"] is None else str(s["step"]), s["fate"]]
            for s in report["stages"]
        ]
        print_table(rows, ["STAGE", "ID", "STEP", "HERE"])
        for note in (n for s in report["stages"] for n in s["notes"]):
            click.echo(f"note: {note}")
    else:
        rows = [
            [str(c["step"]), c["path"], c["layout"], _size(c["bytes"]), c["note"]]
            for c in report["checkpoints"]
        ]
        print_table(rows, ["STEP", "CHECKPOINT", "LAYOUT", "SIZE", "STATE"])
        if report["adopted"]:
            new = "" if report["adopted"]["new"] else " (it was adopted before)"
            click.echo(f"Adopted step {report['step']} as {report['adopted']['id']}{new}.")
            click.echo(f"Files: {report['how']}; recipe: {report['recipe']}")
        for note in report["notes"]:
            click.echo(f"note: {note}")
    verb = (
        "Nothing was changed. Without --dry-run, the next command will be"
        if report["dry_run"]
        else "Next"
    )
    click.echo(f"{verb}: {shlex.join(report['next'])}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
