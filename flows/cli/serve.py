"""`refiner serve` and `refiner deploy`: runs, sweeps and nights that a Prefect server starts."""

from __future__ import annotations

import click

from flows.cli.options import json_option, print_json

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
