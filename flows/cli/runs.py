"""`refiner runs` and `tag`: find runs, and mark them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    argument,
    command_line,
    json_option,
    misuse,
    print_line,
    progress,
    show,
    show_listing,
    split_workspace,
)

if TYPE_CHECKING:
    from flows.run_table import RunRow


@click.command("runs")
@argument("words", nargs=-1, metavar="[workspace=DIR]")
@click.option("--where", metavar="FILTER", default="",
              help="only runs that match, e.g. 'grpo.beta < 0.01 and oracle > 0.8'")  # fmt: skip
@click.option("--metric", metavar="NAME", help="the metric to show (default: the reward)")
@click.option("--sort", metavar="NAME", help="order by a metric, column or field, largest first")
@click.option("--reverse", is_flag=True, help="turn the order round")
@click.option("--limit", "-n", type=click.IntRange(min=1), default=30, show_default=True,
              help="maximum number of rows")  # fmt: skip
@click.option("--all", "every", is_flag=True, help="also repetitions, and evaluations of nights")
@json_option
def runs_command(
    words: tuple[str, ...],
    where: str,
    metric: str | None,
    sort: str | None,
    reverse: bool,
    limit: int,
    every: bool,
    as_json: bool,
) -> None:
    """List runs: changes, state, a metric, cost and note, one row per configuration.

    FILTER compares columns (state, recipe, note, tags, gpu_hours, started …), metrics and
    configuration fields with numbers or quoted texts, joined by and, or, not.
    """
    from flows.run_table import check_names, list_rows, main_metric, sorted_rows

    folder, rest = split_workspace(words)
    if rest:
        raise misuse(f"It was given {' '.join(rest)}. It takes workspace=DIR; see --where.")
    every_row = list_rows(folder, every=every, where=where, progress=progress("runs"))
    if metric is not None:
        check_names(every_row, [metric])
    rows = sorted_rows(every_row, sort, reverse=reverse) if sort else every_row
    rows = rows[::-1] if reverse and not sort else rows
    _show_rows(rows, metric or main_metric(rows), limit, folder, as_json)


def _show_rows(rows: Sequence[RunRow], metric: str, limit: int, folder: str, as_json: bool) -> None:
    from flows.run_table import changes_of
    from refiner_core.report.printing import measured, moment

    changes, where = changes_of(rows), f"workspace={folder}"
    names = _short_names([row.run for row in rows])
    table = []
    for row in rows[:limit]:
        said = [row.sweep, *changes[row.run], row.note and f'"{row.note}"']
        table.append(
            (
                *(names[row.run], moment(row.started), row.recipe, row.state),
                measured(row.metrics.get(metric) or {}, ""),
                _cost(row),
                " ".join([*filter(None, said), *(f"#{tag}" for tag in row.tags)]),
            )
        )
    header = ("run", "started", "recipe", "state", metric or "metric", "cost", "changes and note")
    if not rows:
        nothing = [f"No run matches in {folder}."]
        show(as_json, lambda: {"version": 1, "runs": []}, lambda: nothing, ["refiner run tiny"])
        return
    following = [command_line("report", rows[0].run, where)]
    show_listing(as_json, lambda: rows_json(rows), table, header, following)
    if len(rows) > limit and not as_json:
        print_line(f"{limit} of {len(rows)} runs; --limit {len(rows)} shows all")


def rows_json(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Rows as JSON."""
    from refiner_core.contract.records import to_json

    hidden = ("key", "began", "night", "fields")
    found = [{k: v for k, v in to_json(row).items() if k not in hidden} for row in rows]
    return {"version": 1, "runs": found}


def _short_names(runs: Sequence[str]) -> dict[str, str]:
    """The ends of ids, as long as they differ."""
    length = 4
    while length < 40 and len({run[-length:] for run in runs}) < len(runs):
        length += 5
    return {run: run[-length:] for run in runs}


def _cost(row: RunRow) -> str:
    from refiner_core.report.printing import hours

    if row.gpu_hours:
        return f"{hours(row.gpu_hours)} GPU-h"
    return f"{hours(row.cpu_hours)} CPU-h" if row.cpu_hours else ""


@click.command("tag")
@argument("run", metavar="RUN")
@argument("words", nargs=-1, metavar="[TAG]... [workspace=DIR]")
@click.option("--note", help="replace the note of the run")
@click.option("--remove", is_flag=True, help="remove the tags instead")
@json_option
def tag_command(
    run: str, words: tuple[str, ...], note: str | None, remove: bool, as_json: bool
) -> None:
    """Give RUN tags and a note, shown by `refiner runs` and `status`.

    W&B and Prefect show those that a run begins with: tracking.notes and tracking.tags.
    """
    from flows.run_table import label_run

    folder, tags = split_workspace(words)
    label = label_run(run, folder, tags=tags, note=note, remove=remove)
    shown = " ".join(f"#{tag}" for tag in label["tags"])
    lines = [f"{label['run']}: {label['note']} {shown}".rstrip(": ")]
    show(as_json, lambda: {"version": 1, **label}, lambda: lines)
