"""`refiner profiles`: the Slurm profiles that recipes can name."""

from __future__ import annotations

import click

from flows.cli.options import json_option, print_json


@click.command("profiles")
@json_option
def profiles_command(as_json: bool) -> None:
    """List the shipped Slurm profiles with what each is for.

    A profile of your own is a YAML file: dispatch.executor=slurm dispatch.profile=FILE.
    """
    from infra.slurm.profiles import list_profiles

    found = list_profiles()
    if as_json:
        print_json({"version": 1, "profiles": found})
        return
    for name, description in found.items():
        click.echo(name)
        click.echo(f"  {description}\n")
    click.echo(
        "Next:\n  refiner plan RECIPE dispatch.executor=slurm dispatch.profile=NAME", err=True
    )
