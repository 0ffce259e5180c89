"""`refiner status SWEEP`: the trials of a sweep, once or again and again."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from flows.cli.options import print_json, print_table
from infra.host.terminal import printable, raw

if TYPE_CHECKING:
    from collections.abc import Callable

    from flows.sweeping.status import SweepStatus
    from infra.store.workspace import Workspace

_REFRESH_S = 3.0
#: Rows of arms that a page shows while it is redrawn.
_ROWS = 40


def show_sweep(workspace: Workspace, name: str, *, watch: bool, as_json: bool) -> None:
    """Print how a sweep stands; with ``watch`` until nobody works on it any more."""
    from flows.api import watch_sweep
    from flows.sweeping.status import status_json

    watcher = watch_sweep(name, workspace.root)
    if as_json:
        print_json(status_json(watcher.look()))
        return
    if watch:
        try:
            _watch(watcher.look, workspace)
        except KeyboardInterrupt:
            click.echo("Watching has ended; the sweep has not.", err=True)
            return
    show_status(watcher.look(), workspace)


def show_status(status: SweepStatus, workspace: Workspace) -> None:
    """The table, then what it does not say."""
    from flows.sweeping.status import status_lines, table_of

    record = status.record
    version = f", version {record.number}" if record.number > 1 else ""
    click.echo(f"sweep {record.name} of {record.recipe}{version}; baseline {record.baseline}")
    header, rows = table_of(status)
    print_table(rows, header)
    click.echo("")
    for line in status_lines(status, workspace):
        click.echo(line)


def _watch(look: Callable[[], SweepStatus], workspace: Workspace) -> None:
    """Redraw on a terminal; elsewhere a line for each change."""
    if sys.stdout.isatty():
        _redraw(look, workspace)
        return
    said: dict[str, str] = {}
    while True:
        status = look()
        for trial in status.trials:
            if said.get(trial.name, "waiting") != trial.state:
                said[trial.name] = trial.state
                click.echo(": ".join(filter(None, [trial.name, trial.state, trial.reason])))
        if not status.orchestrator.works:
            return
        time.sleep(_REFRESH_S)


def _redraw(look: Callable[[], SweepStatus], workspace: Workspace) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from flows.sweeping.status import status_lines, table_of

    with Live(console=Console(file=raw(sys.stdout)), auto_refresh=False, transient=True) as live:
        while True:
            status = look()
            header, rows = table_of(status)
            table = Table(box=None, pad_edge=False)
            for title in header:
                table.add_column(title, overflow="ellipsis", no_wrap=True)
            for row in rows[:_ROWS]:
                table.add_row(*(Text(printable(cell)) for cell in row))
            more = f"and {len(rows) - _ROWS} more arms\n" if len(rows) > _ROWS else ""
            below = Text(printable(more + "\n".join(status_lines(status, workspace))))
            live.update(
                Group(Text(printable(status.record.name)), table, Text(), below), refresh=True
            )
            if not status.orchestrator.works:
                return
            time.sleep(_REFRESH_S)
