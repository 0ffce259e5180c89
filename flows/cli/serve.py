"""`refiner serve`, `deploy`, `nightly`, `server` and `notify`: what Prefect starts, who is told."""

from __future__ import annotations

import copy
import shlex
import sys
from dataclasses import asdict
from typing import Literal

import click

from flows.cli.options import json_option, overrides_argument, print_json, print_table

files_argument = click.argument("files", nargs=-1, metavar="[RECIPE|SWEEP|NIGHTLY FILE]...")
workspace_option = click.option(
    "--workspace",
    metavar="DIR",
    help="that the forms propose [default: runs], and of nights instead of their files' own",
)


def _say(text: str) -> None:
    click.echo(f"refiner: {text}", err=True)


@click.command("serve")
@files_argument
@workspace_option
def serve_command(files: tuple[str, ...], workspace: str | None) -> int:
    """Stay, and carry out what is launched from Prefect's UI, API, schedules and automations.

    Serves the deployments `pipeline/refiner` and `sweep/refiner`, and for each nightly file
    `nightly/NAME`, with its schedule. A recipe or sweep that is given is what the form proposes.
    Uses the server that PREFECT_API_URL names, else the local one, which it starts. Ctrl-C ends it:
    what runs then saves, and nights that come meanwhile are looked after at the next start.
    """
    from flows.api import serve

    return serve(files, workspace=workspace, tell=_say)


@click.command("deploy")
@files_argument
@workspace_option
@click.option("--pool", required=True, metavar="NAME", help="the work pool that carries them out")
@json_option
def deploy_command(files: tuple[str, ...], workspace: str | None, pool: str, as_json: bool) -> int:
    """Put the deployments of `refiner serve` on a Prefect server, for workers of a work pool.

    Workers (`prefect worker start --pool NAME`) need refiner, and files and workspace at the same
    paths.
    """
    from flows.api import deploy

    made = deploy(files, workspace=workspace, pool=pool, tell=_say)
    if as_json:
        print_json({"version": 1, "deployments": made})
        return 0
    for one in made:
        click.echo(f"{one['name']}: {one['url']}")
    return 0


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
    from flows.nightly.night import outcome_json, outcome_lines

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
    from flows.nightly.night import status_rows

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
    from flows.nightly.history import CSV_COLUMNS, history_json, history_lines

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


@click.command("server")
@click.argument("what", type=click.Choice(["status", "stop"]), default="status")
@json_option
def server_command(what: Literal["status", "stop"], as_json: bool) -> None:
    """Show the local Prefect server (`status`) or stop it (`stop`).

    `refiner run` starts it when there is none, and leaves it running for the next run.
    """
    from flows.api import prefect_server_status, stop_prefect_server

    if what == "stop":
        stopped = stop_prefect_server()
        if as_json:
            print_json({"version": 1, "stopped": stopped})
        else:
            click.echo("stopped" if stopped else "there is no server of ours to stop")
        return
    status = prefect_server_status()
    url = status.info.url if status.info else None
    if as_json:
        print_json(
            {
                "version": 1,
                "state": status.state,
                "url": url,
                "folder": status.folder,
                "log": status.log,
            }
        )
        return
    click.echo(f"Prefect server: {status.state}{f' at {url}' if url else ''}")
    if status.state == "running" and status.info:
        from infra.prefect_server import terminal_link

        click.echo(f"The page asks for a key: it stands in {status.folder}/auth")
        if (link := terminal_link(status.info, "/dashboard", sys.stdout)).startswith(f"{url}/open"):
            click.echo(f"With the key, for you alone: {link}")
    click.echo(f"log: {status.log}")


@click.group("notify")
def notify_command() -> None:
    """Try how somebody is told of runs and sweeps (section `notify` of a recipe)."""


@notify_command.command("test")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@json_option
def notify_test(words: tuple[str, ...], as_json: bool) -> int:
    """Send a test message by each channel that RECIPE (default: tiny) names, and say what came of
    it.

    What a command prints is shown on standard error. Exit code 0 when every channel has taken the
    message, else 1.
    """
    from flows.notifying.delivery import notify_settings, try_channels
    from refiner_core.contract.errors import ConfigurationError

    names = [w for w in words if "=" not in w]
    if len(names) > 1:
        raise ConfigurationError(
            f"notify test was given {len(names)} recipes: {' '.join(names)}.",
            expected="one recipe, or none",
            fix="try them one by one",
        )
    recipe, overrides = (names or ["tiny"])[0], [w for w in words if "=" in w]
    config = notify_settings(recipe, overrides)
    tried = try_channels(config, started=lambda name: click.echo(f"{name}: sending …", err=True))
    worked = not any(t.why for t in tried)
    if as_json:
        channels = [{**asdict(t), "delivered": not t.why} for t in tried]
        print_json({"version": 1, "recipe": config.recipe, "channels": channels})
    else:
        rows = [(t.channel, f"{t.seconds:.1f} s", t.why or "has taken it") for t in tried]
        print_table(rows, ("channel", "took", "what came of it"))
    following = ["run"] if worked else ["notify", "test"]
    click.echo(f"Next:\n  {shlex.join(['refiner', *following, recipe, *overrides])}", err=True)
    return 0 if worked else 1
