"""`refiner recipes`: the recipes that come with refiner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flows.cli.listing import show_listing
from flows.cli.options import json_option, print_json, until_nobody_reads

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig


@click.command("recipes")
@json_option
def recipes_command(as_json: bool) -> None:
    """List the shipped recipes, with the GPUs that their largest stage asks for.

    A recipe of your own is a YAML file: `include: NAME`, and the fields that differ
    (`refiner init` writes one).
    """
    from flows.api import list_recipes

    found = list_recipes()
    with until_nobody_reads():
        if as_json:
            described = {name: config.description for name, config in found.items()}
            print_json({"version": 1, "recipes": described})
            return
        rows = [(name, _gpus(config), config.description) for name, config in found.items()]
        following = ("refiner plan tiny", "refiner init DIR --help", "refiner show SECTION RECIPE")
        show_listing(rows, ("name", "GPUs", "for"), following)


def _gpus(config: RecipeConfig) -> str:
    """Of the largest of its stages, over all its nodes."""
    stages = [getattr(config, name).resources for name in config.stages]
    return str(max((r.gpus * r.nodes for r in stages), default=0) or "none")
