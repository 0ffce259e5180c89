"""`refiner report`: what the arms of a sweep have shown, as page, Markdown, CSV and JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import (
    json_option,
    output_folder,
    print_json,
    print_table,
    split_workspace,
    until_nobody_reads,
)

if TYPE_CHECKING:
    from flows.reporting.writing import Written
    from infra.store.workspace import Workspace


@click.command("report")
@click.argument("words", nargs=-1, metavar="[SWEEP] [workspace=DIR]")
@click.option("--out", metavar="DIR", help="where the files go (default: WORKSPACE/reports/SWEEP)")
@click.option("--watch", is_flag=True, help="make it again until nobody works on the sweep")
@click.option("--every", "every_s", type=click.IntRange(min=1), default=15, show_default=True,
              metavar="SECONDS", help="how often, with --watch")  # fmt: skip
@click.option("--wandb", "to_wandb", is_flag=True, help="also put its tables into a W&B run")
@json_option
def report_command(
    words: tuple[str, ...],
    out: str | None,
    watch: bool,
    every_s: int,
    to_wandb: bool,
    as_json: bool,
) -> None:
    """Say what the arms of SWEEP have shown (default: the newest sweep of the workspace).

    Writes report.html, a page that needs nothing but a browser, with report.md, report.csv,
    trials.csv and report.json beside it. While a sweep runs its page loads itself again; --watch
    keeps it fresh.
    """
    from flows.reporting.writing import report_folder, write_report
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    sweep = _which(workspace, rest)
    folder = output_folder(out or report_folder(workspace, sweep))
    written = write_report(workspace, sweep, folder, reload_s=every_s)
    if watch:
        written = _watched(workspace, written, every_s)
    logged = _to_wandb(workspace, written) if to_wandb else ""
    if as_json:
        from refiner_core.report.sweep.table import values

        print_json({**values(written.report), "folder": str(written.folder), "wandb": logged})
        return
    with until_nobody_reads():
        _show(written)
    click.echo(f"\nPage: {written.page}", err=True)
    click.echo("Beside it: report.md, report.csv, trials.csv, report.json", err=True)
    if logged:
        click.echo(f"W&B: {logged}", err=True)
    if written.report.state == "running":
        click.echo(f"Next: refiner report {sweep} --watch keeps the page fresh.", err=True)


def _which(workspace: Workspace, words: Sequence[str]) -> str:
    """The sweep that is meant.

    Raises
    ------
    ConfigurationError
        None of that name, or there are none.
    """
    from flows.sweeping.names import newest_sweep
    from refiner_core.contract.errors import ConfigurationError

    if len(words) > 1:
        raise ConfigurationError(
            f"`refiner report` takes one sweep, not {len(words)}.",
            expected="the name of a sweep, and perhaps workspace=DIR",
            fix=f"leave out {words[1]}",
        )
    if words:
        workspace.read_sweep(words[0])
        return words[0]
    newest = newest_sweep(workspace, None)
    if newest is None:
        raise ConfigurationError(
            f"{workspace.root} has no sweeps.",
            expected="a workspace in which `refiner sweep FILE` has been called",
            fix="name another one with workspace=DIR",
        )
    return newest


def _watched(workspace: Workspace, written: Written, every_s: int) -> Written:
    """The last of the reports that are made until nobody works on the sweep."""
    from flows.reporting.writing import write_report
    from refiner_core.report.sweep.words import state_text

    click.echo(f"Page: {written.page}", err=True)
    told = ""
    while written.report.state == "running":
        if (said := state_text(written.report)) != told:
            told = said
            click.echo(said, err=True)
        time.sleep(every_s)
        written = write_report(workspace, written.report.sweep, written.folder, reload_s=every_s)
    return written


def _to_wandb(workspace: Workspace, written: Written) -> str:
    from flows.reporting.tracked import log_report

    return log_report(workspace, written)


def _show(written: Written) -> None:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.sweep import words
    from refiner_core.report.sweep.rows import Column, arm_row

    report = written.report
    state = words.state_text(report)
    click.echo(f"{plain(report.title or report.sweep)}  ({report.state}, {moment(report.made_at)})")
    click.echo(f"{state} {words.cost_text(report)}.")
    for text in report.warnings:
        click.echo(f"warning: {plain(text)}")
    if report.question:
        click.echo(f"\nQuestion  {plain(report.question)}")
    click.echo(f"Answer    {words.answer(report)}\n")
    if (primary := report.primary) is None:
        return
    click.echo(words.key_text(primary.key))
    column = Column.of(primary, report, drawn=False)
    rows = [arm_row(n, column, report) for n in primary.numbers]
    print_table(
        [
            [
                r.arm,
                f"{r.value} {r.bounds}".strip(),
                f"{r.difference} {r.difference_bounds}".strip(),
                r.p_adjusted,
                f"{r.sign} {r.verdict}".strip(),
                r.note,
            ]
            for r in rows
        ],
        ("arm", primary.key.metric, "difference", "p (adjusted)", "says", ""),
    )
