"""From text to configuration: YAML recipes, includes, ``key=value`` overrides, typed at the end.

    recipe file ─┐ include: [other.yaml]          (later wins, lists replace)
    overrides  ──┴─> OmegaConf (interpolation) ──> RecipeConfig (frozen, every field checked)

OmegaConf stays at this edge. Everything it yields is checked against the dataclasses here, so that
a misspelt key or a wrong type is refused with the name of the right one, whatever file it is in.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from refiner_core.contract.checks.former import without_former
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.marks import FieldInfo, is_section, walk
from refiner_core.contract.recipe_files import FILE_FIELDS as FILE_FIELDS
from refiner_core.contract.recipe_files import JSON_FIELDS as JSON_FIELDS
from refiner_core.contract.recipe_files import find_recipe as find_recipe
from refiner_core.contract.recipe_files import hints, recipe_files, without_empty_sections
from refiner_core.contract.recipe_files import settled as settled
from refiner_core.contract.recipe_files import settled_value as settled_value
from refiner_core.contract.recipe_files import shipped_recipes as shipped_recipes
from refiner_core.contract.recipe_files import suggest as suggest
from refiner_core.contract.recipe_files import whole_path as whole_path


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


def replace_fields(config: RecipeConfig, changes: Mapping[str, Any]) -> RecipeConfig:
    """A copy with fields at dotted paths replaced and checked; cheap, for thousands of trials.

    Sections without a change stay the same objects.
    """
    for path, value in changes.items():
        config = _replace(config, path.split("."), field_value(path, value))
    return config


def field_info(path: str, origin: str = "") -> FieldInfo:
    """What is known of the field at a dotted path.

    Raises
    ------
    ConfigurationError
        There is none; says which was meant, and that it stands in ``origin``.
    """
    known = _fields()
    if path not in known:
        raise _unknown_key(path, known, origin)
    return known[path]


def field_value(path: str, value: Any, origin: str = "") -> Any:
    """``value`` as the field at ``path`` holds it (an int as a float, a list as a tuple).

    Raises
    ------
    ConfigurationError
        Unknown field, or a value of another type.
    """
    return _typed(field_info(path, origin).type, value, path)


@functools.cache
def _fields() -> dict[str, FieldInfo]:
    return dict(walk(RecipeConfig))


def _replace(node: Any, parts: Sequence[str], value: Any) -> Any:
    head, *rest = parts
    return dataclasses.replace(
        node, **{head: _replace(getattr(node, head), rest, value) if rest else value}
    )


def _unknown_key(path: str, known: typing.Iterable[str], origin: str) -> ConfigurationError:
    known = list(known)
    if path in known:
        raise ConfigurationError(
            f"The key `{path}` is written with dots{f' in {origin}' if origin else ''}.",
            expected="sections as nested mappings in a file; dots are for overrides",
            fix="write `" + ": {".join(path.split(".")) + ": …" + "}" * path.count(".") + "`",
        )
    leaf = path.rsplit(".", 1)[-1]
    near = suggest(path, known)
    if not near:
        same = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
        near = f" Did you mean {same[0]!r}?" if same else suggest(leaf, known)
    where = f" in {origin}" if origin else ""
    return ConfigurationError(
        f"There is no field {path!r}{where}.{near}",
        expected="a field of the configuration",
        fix="correct the key; `refiner show` lists every field",
    )


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
            raise _unknown_key(_deepest(path, value), _paths(), origin)
        if is_section(known[key]):
            built[key] = _section(known[key], {} if value is None else value, f"{path}.", origin)
        else:
            built[key] = _typed(known[key], value, path)
    return kind(**built)


def _deepest(path: str, value: Any) -> str:
    """``grpoo.beta`` rather than ``grpoo``: what the user typed, not where it was noticed."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((key, value),) = value.items()
        path = f"{path}.{key}"
    return path


def _paths() -> list[str]:
    return [path for path, _ in walk(RecipeConfig)]


def _typed(kind: Any, value: Any, path: str) -> Any:
    """``value`` as ``kind``; ints pass as floats, lists as tuples, nothing else is converted."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _typed(next(a for a in args if a is not type(None)), value, path)
    if origin is Literal:
        if value is False and "off" in args:  # what YAML makes of the bare word
            return "off"
        if value in args and type(value) in {type(a) for a in args}:
            return value
        near = suggest(str(value), [str(a) for a in args])
        raise _wrong(path, value, "one of " + ", ".join(map(str, args)), near)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, "a list, e.g. [a, b]", fix=f"set {path}='[{value}]'")
        return tuple(_typed(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        if kind is str and isinstance(value, int | float):
            note = " It reads as a value of another type; text that looks like one is quoted."
            text = str(value).lower() if isinstance(value, bool) else value
            fix = f"quote it, for YAML and for the shell: {path}='\"{text}\"'"
            raise _wrong(path, value, _NAMES[kind], note, fix)
        may_be_empty = kind is str and getattr(_fields().get(path), "default", 0) == ""
        empty = f"drop it, or write {path}='\"\"' for empty text" if may_be_empty else ""
        raise _wrong(path, value, _NAMES.get(kind, str(kind)), fix=empty if value is None else "")
    return value


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _wrong(
    path: str, value: Any, expected: str, note: str = "", fix: str = ""
) -> ConfigurationError:
    return ConfigurationError(
        f"`{path}` is {'empty' if value is None else repr(value)}.{note}",
        expected=expected,
        fix=fix or f"set {path}=… to such a value{_default_of(path)}",
    )


def _default_of(path: str) -> str:
    """`` (it is 0.01 where nothing sets it)``, in the form of an override; else nothing."""
    info = _fields().get(path)
    if (
        info is None
        or not isinstance(info.default, bool | int | float | str)
        or not str(info.default)
    ):
        return ""
    value = str(info.default).lower() if isinstance(info.default, bool) else info.default
    return f", or drop it for the default, {value}"
