"""`refiner recipes`, `profiles` and `show`: what is shipped, and what a configuration field is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from flows.cli.options import json_option, print_json, show_listing, until_nobody_reads

if TYPE_CHECKING:
    from flows.starting.fields import InRecipe
    from refiner_core.contract.config import RecipeConfig
    from refiner_core.contract.field_facts import FieldFacts


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


class _AskedFields(NamedTuple):
    """Words of the call, sorted out."""

    field: str
    recipe: str
    overrides: tuple[str, ...]
    every: bool
    search: str


@click.command("show")
@click.argument("words", nargs=-1, metavar="[FIELD] [RECIPE] [KEY=VALUE]...")
@click.option("--all", "every", is_flag=True, help="every field, with a line each")
@click.option("--search", metavar="WORD", default="", help="fields that speak of WORD")
@click.option("--schema", is_flag=True, help="the JSON Schema of a recipe file, for editors")
@json_option
def show_command(
    words: tuple[str, ...], every: bool, search: str, schema: bool, as_json: bool
) -> None:
    """Explain FIELD: `grpo.beta`, a last part such as `beta`, or a section such as `grpo`.

    Its type, default and mark: an identity field decides what is computed (with another value
    stages run again), an execution field only where and how. With RECIPE, its value there, and the
    file and line, or the override, that has set it. Without FIELD, list the sections.
    """
    if schema:
        from refiner_core.contract.field_facts import recipe_schema

        print_json(recipe_schema())
        return
    asked = _sorted_out(words, every, search)
    from flows.api import explain_fields

    facts, found = explain_fields(asked.field, asked.recipe, asked.overrides, search=asked.search)
    with until_nobody_reads():
        if not (asked.field or every or search):
            _show_sections(found, as_json)
        else:
            _show_fields(asked, facts, found, as_json)


def _sorted_out(words: Sequence[str], every: bool, search: str) -> _AskedFields:
    """FIELD comes first, unless all or a search make it needless."""
    from refiner_core.contract.errors import ConfigurationError

    names = [word for word in words if "=" not in word]
    overrides = tuple(word for word in words if "=" in word)
    field = "" if every or search or not names else names.pop(0)
    recipe = names.pop(0) if names else ""
    if names or (overrides and not recipe):
        raise ConfigurationError(
            f"`refiner show` was given {' '.join(words)}.",
            expected="a field or section, then a recipe, then key=value overrides of it",
            fix="write e.g. `refiner show grpo.beta tiny grpo.beta=0.01`",
        )
    return _AskedFields(field, recipe, overrides, every, search)


def _show_fields(
    asked: _AskedFields, facts: Sequence[FieldFacts], found: InRecipe | None, as_json: bool
) -> None:
    from flows.starting.fields import field_json, field_lines, field_rows

    paths = [one.path for one in facts]
    if as_json:
        print_json({"version": 1, "fields": [field_json(one, found) for one in facts]})
        return
    if len(paths) > 1:
        with_value = ("value", "source") if found else ("default",)
        header = ("field", "mark", *with_value, "what it is")
        show_listing(field_rows(paths, found), header, [_again(asked, paths[0])])
        return
    click.echo("\n".join(field_lines(facts[0], found)))
    section = paths[0].rpartition(".")[0]
    following = [_again(asked, section)] if section else ["refiner show"]
    if not asked.recipe:
        following = [shlex.join(["refiner", "show", paths[0], "tiny"]), *following]
    click.echo("\nNext:\n  " + "\n  ".join(following), err=True)


def _again(asked: _AskedFields, field: str) -> str:
    words = ["refiner", "show", field, *([asked.recipe] if asked.recipe else []), *asked.overrides]
    return shlex.join(words)


def _show_sections(found: InRecipe | None, as_json: bool) -> None:
    from refiner_core.contract.field_facts import fields_below, sections

    known = sections()
    if as_json:
        listed = [
            {"section": name, "doc": doc, "fields": fields_below(name)}
            for name, doc in known.items()
        ]
        print_json({"version": 1, "sections": listed})
        return
    rows = [(name, str(len(fields_below(name))), doc) for name, doc in known.items()]
    following = ["refiner show SECTION", "refiner show FIELD RECIPE", "refiner show --search WORD"]
    show_listing(rows, ("section", "fields", "what it is"), following)
