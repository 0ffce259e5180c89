"""`refiner recipes`, `profiles` and `show`: what is shipped, and what a configuration field is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from flows.cli.options import (
    Listing,
    command_line,
    json_option,
    listing,
    print_json,
    show,
    show_listing,
    split_overrides,
)
from refiner_core.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from refiner_core.contract.config import RecipeConfig


@click.command("recipes")
@listing
def recipes_command() -> Listing:
    """List the shipped recipes, with the GPUs that their largest stage asks for.

    A recipe of your own is a YAML file: `include: NAME`, and the fields that differ
    (`refiner init` writes one).
    """
    from flows.plans import list_recipes

    found = list_recipes()
    rows = [(name, _gpus(config), config.description) for name, config in found.items()]
    following = ("refiner plan tiny", "refiner init DIR --help", "refiner show SECTION RECIPE")
    value = {"recipes": {name: config.description for name, config in found.items()}}
    return value, rows, ("name", "GPUs", "for"), following


def _gpus(config: RecipeConfig) -> str:
    """Of the largest of its stages, over all its nodes."""
    stages = [getattr(config, name).resources for name in config.stages]
    return str(max((r.gpus * r.nodes for r in stages), default=0) or "none")


@click.command("profiles")
@listing
def profiles_command() -> Listing:
    """List the shipped Slurm profiles with what each is for.

    A profile of your own is a YAML file: dispatch.executor=slurm dispatch.profile=FILE.
    """
    from infra.slurm.profiles import list_profiles

    found = list_profiles()
    following = ("refiner plan RECIPE dispatch.executor=slurm dispatch.profile=NAME",)
    return {"profiles": found}, list(found.items()), ("name", "for"), following


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
    from flows.starting.fields import explain_fields, field_json, field_lines, field_rows
    from refiner_core.contract.field_facts import fields_below, sections

    if schema:
        from refiner_core.contract.field_facts import recipe_schema

        print_json(recipe_schema())
        return
    names, overrides = split_overrides(words)
    # FIELD comes first, unless all or a search make it needless.
    field = "" if every or search or not names else names.pop(0)
    recipe = names.pop(0) if names else ""
    if names or (overrides and not recipe):
        raise ConfigurationError(
            f"`refiner show` was given {' '.join(words)}.",
            expected="a field or section, then a recipe, then key=value overrides of it",
            fix="write e.g. `refiner show grpo.beta tiny grpo.beta=0.01`",
        )
    facts, found = explain_fields(field, recipe, overrides, search=search)

    def again(name: str) -> str:
        return command_line("show", name, *[recipe] * bool(recipe), *overrides)

    if not (field or every or search):
        listed: list[dict[str, Any]] = [
            {"section": n, "doc": doc, "fields": fields_below(n)} for n, doc in sections().items()
        ]
        show_listing(
            as_json,
            lambda: {"version": 1, "sections": listed},
            [(s["section"], str(len(s["fields"])), s["doc"]) for s in listed],
            ("section", "fields", "what it is"),
            ("refiner show SECTION", "refiner show FIELD RECIPE", "refiner show --search WORD"),
        )
        return

    def value() -> dict[str, object]:
        return {"version": 1, "fields": [field_json(one, found) for one in facts]}

    if len(facts) > 1:
        with_value = ("value", "source") if found else ("default",)
        header = ("field", "mark", *with_value, "what it is")
        rows = field_rows([one.path for one in facts], found)
        show_listing(as_json, value, rows, header, [again(facts[0].path)])
        return
    path = facts[0].path
    section = path.rpartition(".")[0]
    following = [again(section)] if section else ["refiner show"]
    if not recipe:
        following = [command_line("show", path, "tiny"), *following]
    show(as_json, value, lambda: field_lines(facts[0], found), following, gap=True)
