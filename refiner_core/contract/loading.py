"""From text to configuration: YAML recipes, includes, ``key=value`` overrides, typed at the end.

    recipe file ─┐ include: [other.yaml]          (later wins, lists replace)
    overrides  ──┴─> OmegaConf (interpolation) ──> RecipeConfig (frozen, every field checked)

OmegaConf stays at this edge. Everything it yields is checked against the dataclasses here, so that
a misspelt key or a wrong type is refused with the name of the right one, whatever file it is in.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.checks.former import without_former
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import hints, replace_fields, typed, unknown_key
from refiner_core.contract.marks import is_section, walk
from refiner_core.contract.recipes.recipe_files import (
    find_recipe,
    recipe_files,
    settled,
    without_empty_sections,
)


def load_recipe(recipe: str, overrides: Sequence[str] = ()) -> RecipeConfig:
    """The configuration of a shipped recipe (by name) or a YAML file, with overrides applied.

    Parameters
    ----------
    recipe
        A shipped name such as ``tiny``, or the path of a YAML file.
    overrides
        ``key=value`` strings; values are read as YAML.

    Raises
    ------
    ConfigurationError
        Unknown recipe, key or value; the message says what would fit.
    """
    path = find_recipe(recipe)
    return parse_config(_merge(path, overrides), name=path.stem, origin=str(recipe))


# ---------------------------------------------------------------- reading and merging


def apply_overrides(config: RecipeConfig, overrides: Sequence[str]) -> RecipeConfig:
    """A configuration (one from a record, for one) with ``key=value`` overrides applied.

    Raises
    ------
    ConfigurationError
        Unknown key or value; the message says what would fit.
    """
    from omegaconf import OmegaConf

    for text in overrides:
        values = OmegaConf.to_container(parse_override(text), resolve=True)
        config = replace_fields(config, dict(leaves("", values)))
    return config


def leaves(prefix: str, values: Any) -> typing.Iterator[tuple[str, Any]]:
    """What is no mapping, below a mapping, by dotted path."""
    if not isinstance(values, Mapping):
        yield prefix, values
        return
    for key, value in values.items():
        yield from leaves(f"{prefix}.{key}" if prefix else str(key), value)


def merged(path: Path, overrides: Sequence[str]) -> Any:
    """A recipe's file with what it includes and with overrides, as an OmegaConf node whose
    interpolations are not resolved."""
    from omegaconf import OmegaConf

    nodes = [file.node for file in recipe_files(path)]
    return OmegaConf.merge(*nodes, *map(parse_override, overrides))


def _merge(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(merged(path, overrides), resolve=True)
    except ConfigurationError:
        raise
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigurationError(
            f"Recipe {path.name} with overrides {list(overrides)} cannot be resolved: "
            f"{str(error).splitlines()[0]}",
            expected="`key=value` overrides and interpolations that name existing keys",
            fix="correct the key named above (write `\\${` for a literal `${`)",
        ) from error
    return typing.cast(dict[str, Any], values)


def parse_override(text: str, folder: Path | None = None) -> Any:
    """One ``key=value`` as an OmegaConf node; files are looked for in ``folder`` (default: the
    current one)."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    key, sep, _ = text.partition("=")
    if not sep or not key.strip():
        raise ConfigurationError(
            f"Override {text!r} is not of the form key=value.",
            expected="e.g. grpo.beta=0.01",
            fix="write the field, an equals sign and the value, without spaces around it",
        )
    try:
        return settled(without_empty_sections(OmegaConf.from_dotlist([text])), folder or Path.cwd())
    except YAMLError as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(
            f"The value of override {text!r} is not YAML: {reason}.",
            expected="a number, true or false, text, or a list such as [a, b]",
            fix=f"quote text with signs of YAML in it, for YAML and for the shell: {key}='\"…\"'",
        ) from error


# ---------------------------------------------------------------- typing


def parse_config(values: Mapping[str, Any], *, name: str = "", origin: str = "") -> RecipeConfig:
    """A mapping as it stands in YAML or in a record, checked and typed.

    Raises
    ------
    ConfigurationError
        Names the dotted field, what it is, what was expected.
    """
    values = dict(values)
    values.setdefault("recipe", name or "unnamed")
    values = without_former(values)
    return typing.cast(RecipeConfig, _section(RecipeConfig, values, "", origin))


def _section(kind: type, values: Any, prefix: str, origin: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"Section `{prefix[:-1]}` is {values!r}.",
            expected="a mapping of fields",
            fix=f"write e.g. `{prefix}FIELD=VALUE`",
        )
    known = hints(kind)
    built: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in known:
            raise unknown_key(_deepest(path, value), _paths(), origin)
        if is_section(known[key]):
            built[key] = _section(known[key], {} if value is None else value, f"{path}.", origin)
        else:
            built[key] = typed(known[key], value, path)
    return kind(**built)


def _deepest(path: str, value: Any) -> str:
    """``grpoo.beta`` rather than ``grpoo``: what the user typed, not where it was noticed."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((key, value),) = value.items()
        path = f"{path}.{key}"
    return path


def _paths() -> list[str]:
    return [path for path, _ in walk(RecipeConfig)]
