"""The files of a recipe: found by name or path, read with what they include, and settled.

In: a shipped recipe's name or the path of a YAML file. Out: OmegaConf nodes in the order in which
they are merged, with the files that they name as whole paths.
"""

from __future__ import annotations

import typing
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import hints, suggest
from refiner_core.contract.marks import is_section
from refiner_core.contract.recipes.file_fields import settled_files
from refiner_core.contract.recipes.protocol_files import embedded
from refiner_core.contract.yaml_words import yaml_reason

#: Package folders that hold shipped recipes.
RECIPE_PACKAGE = "flows.recipes"


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes that come with refiner."""
    folder = Path(str(resources.files(RECIPE_PACKAGE)))
    return {p.stem: p for p in sorted(folder.glob("*.yaml")) if not p.stem.startswith("_")}


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by shipped name or path."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    path = Path(recipe).expanduser()
    if path.is_file():
        return path
    if path.is_dir() and recipe:
        there = ", ".join(sorted(p.name for p in path.glob("*.y*ml"))[:8])
        raise ConfigurationError(
            f"{recipe} is a folder, not a recipe." + (f" It holds {there}." if there else ""),
            expected="the path of a YAML file, or a shipped name: " + ", ".join(shipped),
            fix="name a file in it, or a shipped recipe",
        )
    if "=" in recipe and "/" not in recipe.partition("=")[0]:
        raise ConfigurationError(
            f"{recipe!r} stands where the recipe should.",
            expected="the recipe first, then key=value overrides",
            fix=f"write e.g. `refiner plan tiny {recipe}`",
        )
    looks_like_path = "/" in recipe or recipe.endswith((".yaml", ".yml"))
    if looks_like_path:
        raise ConfigurationError(
            f"There is no recipe file {recipe}.",
            expected="the path of a YAML file, or a shipped name: " + ", ".join(shipped),
            fix="check the path (it is taken from the current folder)",
        )
    raise ConfigurationError(
        f"There is no recipe {recipe!r}.{suggest(recipe, shipped)}",
        expected="a shipped name (" + ", ".join(shipped) + ") or the path of a YAML file",
        fix="name one of these",
    )


# ---------------------------------------------------------------- reading


class RecipeFile(NamedTuple):
    """One of the files that a recipe is merged from; ``chain`` are those that lead to it by their
    `include`, the named one first."""

    path: Path
    chain: tuple[Path, ...]
    node: Any


def recipe_files(path: Path, chain: tuple[Path, ...] = ()) -> list[RecipeFile]:
    """The files to merge for a recipe's file, what it includes first.

    Raises
    ------
    ConfigurationError
        One cannot be read, is no mapping, or includes itself.
    """
    path = path.resolve()
    if path in chain:
        raise ConfigurationError(
            f"Recipe {path.name} includes itself by way of {chain[-1].name}.",
            expected="includes without a circle",
            fix="remove one of the `include:` entries",
        )
    node = _read(path)
    files: list[RecipeFile] = []
    for name in _includes(node.pop("include", None), path):
        nested = path.parent / name
        found = nested if nested.is_file() else _included(name, path)
        files += recipe_files(found, (*chain, path))
    settled(without_empty_sections(node), path.parent)
    return [*files, RecipeFile(path, chain, node)]


def _includes(value: Any, path: Path) -> list[str]:
    named = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(named, typing.Iterable) or not all(isinstance(n, str) for n in named):
        raise ConfigurationError(
            f"`include` of {path} is {value!r}.",
            expected="a recipe's name or file, or a list of such",
            fix="write e.g. `include: tiny`",
        )
    return list(named)


def _included(name: str, path: Path) -> Path:
    try:
        return find_recipe(name)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error.what} `include` of {path} names it.",
            expected=f"a file beside {path.name}, or a shipped recipe: "
            + ", ".join(shipped_recipes()),
            fix=f"correct `include` in {path}",
        ) from error


def _read(path: Path) -> Any:
    from omegaconf import DictConfig, OmegaConf

    try:
        node = OmegaConf.load(path)
    except OSError as error:
        raise ConfigurationError(
            f"Recipe {path} cannot be read: {error.strerror or error}.",
            expected="a file that you may read, with a mapping of fields in YAML",
            fix="correct its permissions, or write `key: value` lines into it",
        ) from error
    except Exception as error:  # yaml raises its own family, omegaconf another
        raise ConfigurationError(
            f"Recipe {path} cannot be read: {yaml_reason(error, path)}.",
            expected="a YAML file in UTF-8",
            fix="correct the place named above",
        ) from error
    if not isinstance(node, DictConfig):
        raise ConfigurationError(
            f"Recipe {path} holds a list, not a mapping of fields.",
            expected="`key: value` lines such as `seed: 42`",
            fix="see a shipped recipe for the form",
        )
    if not node:
        raise ConfigurationError(
            f"Recipe {path} is empty.",
            expected="`key: value` lines such as `include: tiny`",
            fix="see a shipped recipe for the form",
        )
    return node


# ---------------------------------------------------------------- settling


def without_empty_sections(node: Any, section: type = RecipeConfig) -> Any:
    """``node`` without sections that say nothing, so that they do not wipe what is included.

    ``grpo:`` with all its fields commented out is null to YAML, and null would replace.
    """
    from omegaconf import OmegaConf

    for name, kind in hints(section).items():
        if not is_section(kind) or name not in node:
            continue
        if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
            continue
        if node[name] is None:
            del node[name]
        elif OmegaConf.is_dict(node[name]):
            without_empty_sections(node[name], kind)
    return node


def settled(node: Any, folder: Path) -> Any:
    """``node`` with the files that it names as whole paths (a job works in another folder), with
    what is JSON as text, though it was written as YAML, and with what protocol files say."""
    settled_files(node, folder)
    _embed_protocols(node.get("evaluate"), folder)
    return node


def _embed_protocols(evaluate: Any, folder: Path) -> None:
    """What protocol files say, in the place of their names."""
    from omegaconf import OmegaConf

    if not OmegaConf.is_dict(evaluate) or OmegaConf.is_interpolation(evaluate, "protocols"):
        return
    named = evaluate.get("protocols")
    if OmegaConf.is_list(named):
        values: Any = OmegaConf.to_container(named, resolve=False)
        evaluate["protocols"] = [embedded(value, folder) for value in values]
