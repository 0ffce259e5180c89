"""Whether a command of refiner that a card tells its readers to give can be given.

In: the words after ``refiner``. Out: what is wrong with them. They are parsed by the command line's
own parser and loader; nothing is carried out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.fields import suggest
from refiner_core.contract.loading import load_recipe
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import shipped_recipes

_ANSWERED_AT_ONCE = {"--help", "-h", "--version"}
#: A key of a recipe file that is no field of the configuration.
_INCLUDE = "include"
#: Bytes of a recipe; YAML is slow to read.
_LARGEST = 100_000
_ANCHOR = re.compile(r"(?:^|[\s,\[{:=-])&\w")


def command_problem(
    words: Sequence[str], folder: Path | None = None, *, whole: bool = False
) -> str | None:
    """What is wrong with a command; None where nothing is, or nobody can tell.

    Parameters
    ----------
    words
        After ``refiner``, as a shell would split them.
    folder
        Where the card lies: a recipe file is looked for there.
    whole
        The folder has all that belongs to the card, so that a recipe file that is not in it is
        missing.
    """
    from flows.cli.main import COMMANDS, cli

    if not words or words[0].startswith("-") or _ANSWERED_AT_ONCE & set(words):
        return None
    name = words[0]
    if name not in COMMANDS:
        return f"there is no command {name!r}.{suggest(name, COMMANDS)}"
    group = click.Context(cli, info_name="refiner")
    command = cli.get_command(group, name)
    if command is None or isinstance(command, click.Group):
        return None
    try:
        parsed = command.make_context(name, list(words[1:]), parent=group)
    except click.ClickException as error:
        return error.format_message()
    recipe = parsed.params.get("recipe")
    overrides = parsed.params.get("overrides")
    if not isinstance(recipe, str) or overrides is None or recipe.isupper():
        return None
    return _recipe_problem(recipe, list(overrides), folder, whole=whole)


def _recipe_problem(
    recipe: str, overrides: Sequence[str], folder: Path | None, *, whole: bool
) -> str | None:
    is_file = "/" in recipe or recipe.endswith((".yaml", ".yml"))
    if recipe not in shipped_recipes() and not is_file:
        return f"there is no recipe {recipe!r}.{suggest(recipe, shipped_recipes())}"
    unknown = _unknown_fields(overrides)
    if unknown is not None or _asks_back([*overrides]):
        return unknown
    if recipe in shipped_recipes():
        return _refusal(recipe, overrides)
    beside = folder / recipe if folder is not None and "/" not in recipe else None
    if beside is None or not beside.is_file():
        return f"there is no {recipe} beside the card" if whole else None
    if beside.stat().st_size > _LARGEST or _asks_back([beside.read_text("utf-8", "replace")]):
        return None
    return _refusal(str(beside), overrides)


def _asks_back(texts: Sequence[str]) -> bool:
    """Whether a text asks for something that is filled in here: other files, the environment of
    whoever checks the card, which a finding must not show, or gigabytes (YAML's aliases)."""
    return any("${" in t or "include:" in t or _ANCHOR.search(t) for t in texts)


def _refusal(recipe: str, overrides: Sequence[str]) -> str | None:
    try:
        load_recipe(recipe, overrides)
    except RefinerError as error:
        return error.what
    except RecursionError:
        return "it is nested too deeply"
    return None


def _sections(path: str) -> list[str]:
    """``grpo`` and ``grpo.resources`` of ``grpo.resources.gpus``."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _unknown_fields(overrides: Sequence[str]) -> str | None:
    """Of a recipe that is not here, the names of its fields can be checked all the same."""
    known = [path for path, _ in walk(RecipeConfig)]
    sections = {section for path in known for section in _sections(path)} | {_INCLUDE}
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            return f"override {override!r} is not of the form key=value."
        inside = any(key.startswith(f"{path}.") for path in known)  # of a field with names in it
        if key not in known and key not in sections and not inside:
            return f"there is no field {key!r}.{suggest(key, known)}"
    return None
