"""`refiner serve`, `deploy`, `nightly`, `server` and `notify`: Prefect and notifications."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import click

from flows.cli.aliases import former, former_option
from flows.cli.options import (
    F,
    argument,
    at_most_one,
    command_line,
    json_option,
    overrides_argument,
    print_line,
    print_next,
    show,
    split_overrides,
)
from refiner_core.contract.records import picked
from refiner_core.report.printing import short, table_lines

if TYPE_CHECKING:
    from refiner_core.nightly.page import HistoryView

files_argument = argument("files", nargs=-1, metavar="[RECIPE|SWEEP|NIGHTLY FILE]...")
workspace_option = click.option(
    "--workspace",
    metavar="DIR",
    help="proposed by the forms [default: runs]; for nights, instead of the files' own",
)


def _print_line(text: str) -> None:
    print_line(f"refiner: {text}")


@click.command("serve")
@files_argument
@workspace_option
def serve_command(files: tuple[str, ...], workspace: str | None) -> int:
    """Serve deployments: carry out runs launched from Prefect's UI, API, schedules and automations.

    Serves the deployments `pipeline/refiner` and `sweep/refiner`, and for each nightly file
    `nightly/NAME`, with its schedule. A given recipe or sweep is the default of the form. The
    server is that of PREFECT_API_URL, else the local one, which is started. Ctrl-C ends it: running
    stages save, and a night that begins meanwhile runs at the next start.
    """
    from flows.serving import serve

    return serve(files, workspace=workspace, tell=_print_line)


@click.command("deploy")
@files_argument
@workspace_option
@click.option("--pool", required=True, metavar="NAME", help="the work pool that runs them")
@json_option
def deploy_command(files: tuple[str, ...], workspace: str | None, pool: str, as_json: bool) -> int:
    """Create the deployments of `refiner serve` on a Prefect server, for a work pool.

    Workers (`prefect worker start --pool NAME`) need refiner, and the files and the workspace at
    the same paths.
    """
    from flows.serving import deploy

    made = deploy(files, workspace=workspace, pool=pool, tell=_print_line)
    show(
        as_json,
        lambda: {"version": 1, "deployments": made},
        lambda: [f"{one['name']}: {one['url']}" for one in made],
    )
    return 0


def _on_file(command: F) -> F:
    """Arguments of a command on a nightly file."""
    return argument("file", metavar="FILE")(overrides_argument(command))


@click.group("nightly", epilog="Start with: refiner nightly check tiny-nightly")
def nightly_command() -> None:
    """Evaluate checkpoints every night under the same protocols, and report changes.

    FILE is a YAML file or a shipped name (tiny-nightly). A canary, one frozen checkpoint, is
    evaluated again each night, to tell drift of the judge or of machines from a change of a model.
    Without Prefect, use cron: `0 3 * * * refiner nightly run FILE`.
    """


@nightly_command.command("check")
@_on_file
@json_option
def check_command(file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check FILE without changes."""
    from flows.nightly.night import check_nightly

    nightly, following, warnings = check_nightly(file, overrides)

    def lines() -> Iterator[str]:
        yield f"{nightly.name}: {nightly.schedule} ({nightly.timezone}), next {following}"
        for checkpoint in nightly.everybody:
            canary = " (canary)" if checkpoint == nightly.canary else ""
            yield f"  {checkpoint.name}{canary}: {checkpoint.source.text}"

    names = [c.name for c in nightly.everybody]
    value = {"version": 1, "nightly": nightly.name, "checkpoints": names}
    value |= {"next": following.isoformat(), "warnings": warnings}
    show(as_json, lambda: value, lines)
    if not as_json:
        for warning in warnings:
            print_line(f"note: {warning}")
        print_next(command_line("nightly", "run", file, *overrides))
    return 0


@nightly_command.command("run")
@_on_file
@click.option("--night", metavar="DATE", help="a night of the schedule; default: the newest")
@click.option("--take-over", is_flag=True, help="even if another host claims it")
@json_option
def run_command(
    file: str, overrides: tuple[str, ...], night: str | None, take_over: bool, as_json: bool
) -> int:
    """Run one night; finished work is kept, interrupted work resumes.

    Nights before the current one are not evaluated any more.
    """
    from flows.cli.run import stop_on_signals
    from flows.nightly.night import outcome_json, outcome_lines, run_nightly

    stop_on_signals()
    outcome = run_nightly(file, overrides, night=night, take_over=take_over, tell=_print_line)
    following = [command_line("nightly", "status", file, *overrides)]
    show(as_json, lambda: outcome_json(outcome), lambda: outcome_lines(outcome), following)
    return outcome.exit_code


@nightly_command.command("status")
@_on_file
@json_option
def status_command(file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show the current night, the last numbers, and open alerts."""
    from flows.nightly.history import status_rows
    from flows.nightly.night import nightly_status

    status = nightly_status(file, overrides)

    def lines() -> Iterator[str]:
        yield f"{status['nightly']}: night of {status['night']} {status['state']}"
        yield f"next: {status['next']}"
        if status["series"]:
            header = ("checkpoint", "metric", "protocol", "value", "night", "nights", "weights")
            yield from table_lines(status_rows(status), header)
        for alert in status["open_alerts"]:
            yield f"alert of {alert['night']}: {alert['title']}"

    show(as_json, lambda: status, lines)
    for alert_id, failed in status["undelivered"].items() if not as_json else ():
        for channel, why in failed.items():
            print_line(f"not delivered: {alert_id} by {channel}: {why}")
    return 0


@nightly_command.command("history")
@_on_file
@json_option
@former_option("--csv", "`refiner nightly history --json` prints all numbers.", flag=True)
def history_command(file: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print the table of all nights."""
    from flows.nightly.history import history_json
    from flows.nightly.night import nightly_history

    reading = nightly_history(file, overrides).reading
    show(as_json, lambda: history_json(reading), lambda: _history_lines(reading))
    return 0


def _history_lines(reading: HistoryView) -> Iterator[str]:
    """One line per value of a watched metric."""
    shown = ("night", "checkpoint", "decoding", "metric", "value", "low", "high", "n", "protocol")
    rows = [
        [_cell(line.get(column)) for column in (*shown, "source")]
        for row in reading.rows
        for metric, number in row.numbers.items()
        if metric in reading.nightly.alerts.metrics
        for line in [{**vars(row), "metric": metric, **number}]
    ]
    yield from table_lines(rows, (*shown, "weights"))


@nightly_command.command("page")
@_on_file
@click.option("--out", metavar="FILE", help="output file; default: in the workspace")
def page_command(file: str, overrides: tuple[str, ...], out: str | None) -> int:
    """Write the page of trends: one HTML file that works offline."""
    from flows.nightly.night import nightly_page

    click.echo(str(nightly_page(file, overrides, out=out)))
    return 0


nightly_command.add_command(former(serve_command))
nightly_command.add_command(former(deploy_command))


def _cell(value: object) -> str:
    return short(value) if isinstance(value, float) else str("" if value is None else value)


@click.command("server")
@argument("what", type=click.Choice(["status", "stop"]), default="status")
@json_option
def server_command(what: Literal["status", "stop"], as_json: bool) -> None:
    """Show the local Prefect server (`status`) or stop it (`stop`).

    `refiner run` starts it when there is none, and leaves it running for the next run.
    """
    from infra.prefect_server import server_status, stop_server, terminal_link

    if what == "stop":
        stopped = stop_server()
        said = "stopped" if stopped else "there is no server of refiner to stop"
        show(as_json, lambda: {"version": 1, "stopped": stopped}, lambda: [said])
        return
    status = server_status()
    url = status.info.url if status.info else None

    def lines() -> Iterator[str]:
        yield f"Prefect server: {status.state}{f' at {url}' if url else ''}"
        if status.state == "running" and status.info:
            yield f"The page asks for a key, which is in {status.folder}/auth"
            link = terminal_link(status.info, "/dashboard", sys.stdout)
            if link.startswith(f"{url}/open"):
                yield f"Private link with the key: {link}"
        yield f"log: {status.log}"

    value = {"version": 1, "url": url, **picked(status, "state", "folder", "log")}
    show(as_json, lambda: value, lines)


@click.group("notify")
def notify_command() -> None:
    """Test notifications of runs and sweeps (section `notify` of a recipe)."""


@notify_command.command("test")
@argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@json_option
def notify_test(words: tuple[str, ...], as_json: bool) -> int:
    """Send a test message by each channel that RECIPE (default: tiny) names.

    The output of a channel's command goes to standard error. Exit code 0 if every channel has
    accepted the message, else 1.
    """
    from flows.notifying.notifiers import notify_settings, try_channels

    names, overrides = split_overrides(words)
    recipe = at_most_one(names, "recipe", " for tiny") or "tiny"
    config = notify_settings(recipe, overrides)
    tried = try_channels(config, started=lambda name: print_line(f"{name}: sending …"))
    worked = all(t["delivered"] for t in tried)
    rows = [(t["channel"], f"{t['seconds']:.1f} s", t["why"] or "accepted") for t in tried]
    show(
        as_json,
        lambda: {"version": 1, "recipe": config.recipe, "channels": tried},
        lambda: table_lines(rows, ("channel", "took", "result")),
    )
    following = ["run"] if worked else ["notify", "test"]
    print_next(command_line(*following, recipe, *overrides))
    return 0 if worked else 1
