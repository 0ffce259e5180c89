"""`refiner nightly`: evaluate checkpoints every night, and tell change from noise."""

from __future__ import annotations

import sys

import click

from flows.cli.options import json_option, overrides_argument, print_json, print_table

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


@nightly_command.command("serve")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--workspace", metavar="DIR", help="in the place of the files' own")
def serve_command(files: tuple[str, ...], workspace: str | None) -> int:
    """Stay, and work on each night when it comes: one process, with a Prefect server's clock.

    Uses the server that PREFECT_API_URL names, else the local one, which it starts. Ctrl-C ends it;
    nights that come meanwhile are looked after when it is started again.
    """
    from flows.api import serve_nightly

    return serve_nightly(files, _in(workspace), tell=_say)


@nightly_command.command("deploy")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--workspace", metavar="DIR", help="in the place of the files' own")
@click.option("--pool", metavar="NAME", help="the work pool whose workers carry nights out")
@click.option("--automation", metavar="DEPLOYMENT", help="run it on the server for each alert")
@json_option
def deploy_command(
    files: tuple[str, ...],
    workspace: str | None,
    pool: str | None,
    automation: str | None,
    as_json: bool,
) -> int:
    """Put deployments with their schedules on a Prefect server, for workers of a pool."""
    from flows.api import deploy_nightly

    made = deploy_nightly(files, _in(workspace), pool=pool, automation=automation, tell=_say)
    if as_json:
        print_json({"version": 1, "deployments": made})
        return 0
    for one in made:
        click.echo(f"{one['name']}: {one['schedule']} ({one['timezone']}), {one['url']}")
        if one.get("automation"):
            click.echo(f"  automation {one['automation']}: runs {automation} for each alert")
    return 0


def _in(workspace: str | None) -> list[str]:
    return [f"workspace={workspace}"] if workspace else []


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _line(file: str, overrides: tuple[str, ...]) -> str:
    import shlex

    return shlex.join([file, *overrides])


def _say(text: str) -> None:
    click.echo(f"refiner: {text}", err=True)
