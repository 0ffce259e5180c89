"""`refiner report RUN`: the report of a run on the terminal, once or until the run has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from flows.cli.options import print_json, print_table, until_nobody_reads

if TYPE_CHECKING:
    from flows.reporting.run.writing import WrittenRun
    from refiner_core.report.run.document import RunReport


class Asked(NamedTuple):
    """How a report is to be made."""

    folder: Path
    watch: bool
    every_s: int
    as_json: bool


_MOST_INCIDENTS = 5
#: Tables of numbers that a terminal shows; the page has all.
_MOST_TABLES = 2


def show_run_report(make: Callable[[], WrittenRun], asked: Asked) -> None:
    """Print what the report of a run says; ``make`` writes it as it is now."""
    from flows.reporting.run.writing import values

    written = make()
    if asked.watch:
        written = _watched(make, written, asked.every_s)
    if asked.as_json:
        print_json({**values(written.report), "folder": str(written.folder)})
        return
    with until_nobody_reads():
        _show(written.report)
    click.echo(f"\nPage: {written.page}", err=True)
    click.echo("Beside it: report.md, report.json", err=True)
    click.echo("Next:", err=True)
    for command in written.report.next_commands:
        click.echo(f"  {command}", err=True)


def _watched(make: Callable[[], WrittenRun], written: WrittenRun, every_s: int) -> WrittenRun:
    """The last of the reports that are made until nobody works on the run. Ctrl-C ends the
    watching, not the run."""
    click.echo(f"Page: {written.page}", err=True)
    told = ""
    try:
        while written.report.state == "running":
            if written.report.state_text != told:
                told = written.report.state_text
                click.echo(told, err=True)
            time.sleep(every_s)
            written = make()
    except KeyboardInterrupt:
        click.echo("Watching has ended; the run has not.", err=True)
    return written


def _show(report: RunReport) -> None:
    from refiner_core.report.printing import moment, plain
    from refiner_core.report.run import words

    click.echo(f"{report.run}  ({report.state}; as of {moment(report.made_at)})")
    click.echo(plain(report.state_text))
    for text in report.warnings:
        click.echo(f"warning: {plain(text)}")
    click.echo()
    _table([words.stage_cells(row) for row in report.stages], words.STAGE_HEADER)
    for table in words.change_tables(report)[:_MOST_TABLES]:
        click.echo(f"\n{table.title}")
        _table(table.rows, table.header)
    if report.incidents:
        click.echo(f"\n{words.incidents_text(report).capitalize()}")
        for incident in report.incidents[-_MOST_INCIDENTS:]:
            over = "" if incident.resolved else " (open)"
            click.echo(f"  {moment(incident.at)} {incident.stage}: {plain(incident.text)}{over}")
    click.echo(f"\nCost: {words.cost_text(report)}")
    for one in report.published:
        click.echo(f"Published: {plain(one.target)}")


def _table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    from refiner_core.report.printing import plain

    print_table([[plain(cell) for cell in row] for row in rows], header)
