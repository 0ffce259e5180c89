"""`refiner server`: the local Prefect server that runs share."""

from __future__ import annotations

import sys
from typing import Literal

import click

from flows.cli.options import json_option, print_json


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
        from infra.prefect_server.opening import terminal_link

        click.echo(f"The page asks for a key: it stands in {status.folder}/auth")
        if (link := terminal_link(status.info, "/dashboard", sys.stdout)).startswith(f"{url}/open"):
            click.echo(f"With the key, for you alone: {link}")
    click.echo(f"log: {status.log}")
