"""`refiner profiles`: the Slurm profiles that recipes can name."""

from __future__ import annotations

import click

from flows.cli.listing import show_listing
from flows.cli.options import json_option, print_json, until_nobody_reads


@click.command("profiles")
@json_option
def profiles_command(as_json: bool) -> None:
    """List the shipped Slurm profiles with what each is for.

    A profile of your own is a YAML file: dispatch.executor=slurm dispatch.profile=FILE.
    """
    from flows.api import list_slurm_profiles

    found = list_slurm_profiles()
    with until_nobody_reads():
        if as_json:
            print_json({"version": 1, "profiles": found})
            return
        following = ("refiner plan RECIPE dispatch.executor=slurm dispatch.profile=NAME",)
        show_listing(list(found.items()), ("name", "for"), following)
