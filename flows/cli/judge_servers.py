"""`refiner judge servers` and `refiner judge stop`: the servers of judges that refiner started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from flows.cli.options import json_option, print_json, print_table, split_workspace

if TYPE_CHECKING:
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
    from infra.services.registry import services_of
    from infra.store.workspace import Workspace
    from refiner_core.contract.records import to_json

    where, rest = split_workspace(words)
    found = services_of(Workspace.read_only(where), rest[0] if rest else None)
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
    from infra.services.registry import RUNNING, end_service, services_of
    from infra.store.workspace import Workspace

    where, rest = split_workspace(words)
    workspace = Workspace.read_only(where)
    found = services_of(workspace, rest[0] if rest else None)
    if rest and not found:
        raise _no_such(rest[0], services_of(workspace), where)
    wanted = [s for s in found if s.state in (*RUNNING, "killed")]
    if not rest:
        wanted = [s for s in wanted if not s.leases]
    ended: list[str] = []
    left: list[str] = []
    for service in wanted:
        for holder in service.leases:
            click.echo(f"{service.id} is needed by {holder}, which starts another one", err=True)
        reason = "`refiner judge stop`"
        over = end_service(workspace, service.id, reason, tell=lambda m: click.echo(m, err=True))
        (ended if over else left).append(service.id)
    if as_json:
        print_json({"version": 1, "ended": ended, "left": left})
    else:
        _say(ended, left, found)
    return 1 if left else 0


def _say(ended: list[str], left: list[str], found: Sequence[ServiceStatus]) -> None:
    for service_id in ended:
        click.echo(f"Ended: {service_id}.")
    for service_id in left:
        click.echo(f"Not ended yet: {service_id}.")
    if not ended and not left:
        busy = [s.id for s in found if s.leases]
        text = "No server runs that nobody needs."
        click.echo(f"{text} In use: {', '.join(busy)}." if busy else "No server runs.")


def _no_such(wanted: str, known: Sequence[ServiceStatus], where: str) -> Exception:
    from refiner_core.contract.errors import ConfigurationError
    from refiner_core.contract.loading import suggest

    names = [service.id for service in known]
    return ConfigurationError(
        f"{where} has no server {wanted!r}.{suggest(wanted, names)}",
        expected=f"one of: {', '.join(names) or '(none was ever started)'}",
        fix="see `refiner judge servers`",
    )
