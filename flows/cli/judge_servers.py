"""`refiner judge servers` and `refiner judge stop`: the servers of judges that refiner started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, print_table, split_workspace

if TYPE_CHECKING:
    from flows.api.judges import Stopped
    from infra.services.registry import ServiceStatus

_HEADER = ("server", "state", "model", "where", "needed by", "idle", "last word")


@click.command("servers")
@click.argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def servers_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the judges' servers of a workspace: how they are, where they answer, who needs them.

    A server is started by a run that needs it, shared by all runs of the workspace that would start
    the same one, and ends by itself when nobody has needed it for `judge.serve.idle_timeout_s`.
    """
    from flows.api import list_judge_servers
    from refiner_core.contract.records import to_json

    where, rest = split_workspace(words)
    found = list_judge_servers(rest[0] if rest else None, where)
    if as_json:
        print_json({"version": 1, "servers": [to_json(service) for service in found]})
    elif not found:
        click.echo(f"No judge's server was ever started in {where}.")
    else:
        print_table([_row(service) for service in found], _HEADER)
        for service in found:
            if service.log:
                click.echo(f"log of {service.id}: {service.log}")


def _row(service: ServiceStatus) -> Sequence[str]:
    from flows.running.console import duration

    place = " on ".join(part for part in (service.url, service.node) if part)
    return (
        service.id,
        service.state,
        service.model,
        place,
        ", ".join(service.leases),
        "" if service.idle_s is None else duration(service.idle_s),
        service.reason.partition("\n")[0][:80],
    )


@click.command("stop")
@click.argument("words", nargs=-1, metavar="[SERVICE] [workspace=DIR]")
@json_option
def stop_command(words: tuple[str, ...], as_json: bool) -> int:
    """End a judge's server, or all that nobody needs just now.

    SERVICE is an id that `refiner judge servers` shows, or its beginning. A run that still needs a
    server starts another one. Exit code: 0 when they have ended, 1 when one has not.
    """
    from flows.api import stop_judge_servers

    where, rest = split_workspace(words)
    stopped = stop_judge_servers(
        rest[0] if rest else None, where, tell=lambda m: click.echo(m, err=True)
    )
    if as_json:
        print_json({"version": 1, "ended": stopped.ended, "left": stopped.left})
    else:
        _say(stopped)
    return 1 if stopped.left else 0


def _say(stopped: Stopped) -> None:
    for service_id in stopped.ended:
        click.echo(f"Ended: {service_id}.")
    for service_id in stopped.left:
        click.echo(f"Not ended yet: {service_id}.")
    if not stopped.ended and not stopped.left:
        text = "No server runs that nobody needs."
        busy = stopped.busy
        click.echo(f"{text} In use: {', '.join(busy)}." if busy else "No server runs.")
