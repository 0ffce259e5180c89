"""`refiner nightly`: evaluate checkpoints every night, and tell change from noise."""

from __future__ import annotations

import copy
import sys

import click

from flows.cli.options import json_option, overrides_argument, print_json, print_table
from flows.cli.serve import deploy_command, serve_command

file_argument = click.argument("file", metavar="FILE")
known_argument = click.argument("file", metavar="FILE|NAME")


@click.group("nightly", epilog="Start with: refiner nightly check tiny-nightly")
def nightly_command() -> None:
    """Evaluate checkpoints every night under the same protocols, and say what has changed.

    FILE is a YAML file or a shipped name (tiny-nightly). A canary, one frozen checkpoint, is
    evaluated afresh in each night, so that drift of the judge or of machines is told from a change
    of a model. Without Prefect, cron does as well: `0 3 * * * refiner nightly run FILE`.
    """


@nightly_command.command("check")
@file_argument
@overrides_argument
@json_option
def check_command(file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Say whether FILE can be carried out; changes nothing."""
    from flows.api import check_nightly

    nightly, following, warnings = check_nightly(file, overrides)
    if as_json:
        names = [c.name for c in nightly.everybody]
        value = {"version": 1, "nightly": nightly.name, "checkpoints": names}
        print_json({**value, "next": following.isoformat(), "warnings": warnings})
        return 0
    click.echo(f"{nightly.name}: {nightly.schedule} ({nightly.timezone}), next {following}")
    for checkpoint in nightly.everybody:
        canary = " (canary)" if checkpoint == nightly.canary else ""
        click.echo(f"  {checkpoint.name}{canary}: {checkpoint.source.text}")
    for warning in warnings:
        click.echo(f"note: {warning}", err=True)
    click.echo(f"Next:\n  refiner nightly run {_line(file, overrides)}", err=True)
    return 0


@nightly_command.command("run")
@file_argument
@overrides_argument
@click.option("--night", metavar="DATE", help="a night of the schedule; default: the newest")
@click.option("--take-over", is_flag=True, help="though another host says that it works on it")
@json_option
def run_command(
    file: str, overrides: tuple[str, ...], night: str | None, take_over: bool, as_json: bool
) -> int:
    """Work on a night, once: what is done is kept, what was left is gone on with.

    Nights before that nobody has worked on are looked after, as far as `catch_up` reaches.
    """
    from flows.api import run_nightly
    from flows.cli.run import stop_on_signals
    from flows.nightly.showing import outcome_json, outcome_lines

    stop_on_signals()
    outcome = run_nightly(file, overrides, night=night, take_over=take_over, tell=_say)
    if as_json:
        print_json(outcome_json(outcome))
    else:
        for line in outcome_lines(outcome):
            click.echo(line)
        click.echo(f"Next:\n  refiner nightly status {_line(file, overrides)}", err=True)
    sys.stdout.flush()
    return outcome.exit_code


@nightly_command.command("status")
@known_argument
@overrides_argument
@json_option
def status_command(file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show how it stands: tonight, last numbers, alerts that have not recovered."""
    from flows.api import nightly_status
    from flows.nightly.showing import status_rows

    status = nightly_status(file, overrides)
    if as_json:
        print_json(status)
        return 0
    click.echo(f"{status['nightly']}: night of {status['night']} {status['state']}")
    click.echo(f"next: {status['next']}")
    if status["series"]:
        header = ("checkpoint", "metric", "protocol", "value", "night", "nights", "weights")
        print_table(status_rows(status), header)
    for alert in status["open_alerts"]:
        click.echo(f"alert of {alert['night']}: {alert['title']}")
    for alert_id, failed in status["undelivered"].items():
        for channel, why in failed.items():
            click.echo(f"not delivered: {alert_id} by {channel}: {why}", err=True)
    return 0


@nightly_command.command("history")
@known_argument
@overrides_argument
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="print CSV on stdout, one line a number")
def history_command(file: str, overrides: tuple[str, ...], as_json: bool, as_csv: bool) -> int:
    """Print the table of all nights."""
    from flows.api import nightly_history
    from flows.nightly.reading import CSV_COLUMNS, history_json, history_lines

    reading = nightly_history(file, overrides).reading
    if as_json:
        print_json(history_json(reading))
    elif as_csv:
        import csv

        writer = csv.DictWriter(sys.stdout, CSV_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(history_lines(reading))
    else:
        watched = reading.nightly.alerts.metrics
        lines = [line for line in history_lines(reading) if line["metric"] in watched]
        shown = ("night", "checkpoint", "decoding", "metric", "value", "low", "high", "n")
        rows = [[_cell(line[c]) for c in (*shown, "protocol", "source")] for line in lines]
        print_table(rows, (*shown, "protocol", "weights"))
    return 0


@nightly_command.command("page")
@known_argument
@overrides_argument
@click.option("--out", metavar="FILE", help="write it there; default: into the workspace")
def page_command(file: str, overrides: tuple[str, ...], out: str | None) -> int:
    """Write the trend page: one HTML file that needs nothing but a browser."""
    from flows.api import nightly_page

    click.echo(str(nightly_page(file, overrides, out=out)))
    return 0


def _former(command: click.Command) -> click.Command:
    """A command that has its place elsewhere now, with a warning that says where."""
    former = copy.copy(command)
    former.deprecated = f"It is `refiner {command.name}` now."
    return former


nightly_command.add_command(_former(serve_command))
nightly_command.add_command(_former(deploy_command))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _line(file: str, overrides: tuple[str, ...]) -> str:
    import shlex

    return shlex.join([file, *overrides])


def _say(text: str) -> None:
    click.echo(f"refiner: {text}", err=True)
