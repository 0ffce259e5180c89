"""From text to configuration: YAML recipes, includes, ``key=value`` overrides, typed at the end.

    recipe file ─┐ include: [other.yaml]          (later wins, lists replace)
    overrides  ──┴─> OmegaConf (interpolation) ──> RecipeConfig (frozen, every field checked)

OmegaConf is used only here. Its output is checked against the dataclasses, so that a misspelt key
or a wrong type is refused with the name of the right one, whatever file it is in. Also the inverse:
the override that sets a value, the places that set a field, and the fields that depend on a field
by interpolation.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import field_value, nested, replace_fields, typed
from refiner_core.contract.protocols import PROTOCOL_FIELDS
from refiner_core.contract.recipes import (
    FILE_FIELDS,
    JSON_FIELDS,
    find_recipe,
    recipe_files,
    settled,
    settled_value,
    shipped_recipes,
    whole_path,
    without_empty_sections,
)

log = logging.getLogger(__name__)


def without_former(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a recipe, with former fields and words renamed."""
    name = "grpo.rollout_server.weight_transfer"
    if dict(leaves("", values)).get(name) in ("nccl", "ipc"):
        warn_former(name, "weights go through files in memory (grpo.rollout_server.weights_dir)")
    notify = values.get("notify")
    if not isinstance(notify, Mapping):
        return dict(values)
    kept = {k: v for k, v in notify.items() if k != "prefect"}
    if kept.keys() != notify.keys():
        warn_former("notify.prefect", "Prefect has the states of flow runs for automations")
    if kept.get("webhook") is not None:
        warn_former("notify.webhook", "notify.urls=[NAME] replaces it", "")
    if isinstance(on := kept.get("on"), list | tuple) and "resumed" in on:
        warn_former("`resumed` in notify.on", "`refiner status` shows running stages")
        kept["on"] = [word for word in on if word != "resumed"]
    return {**values, "notify": kept}


@functools.cache
def warn_former(what: str, instead: str, effect: str = "has no effect any more, and ") -> None:
    """Warn once about something deprecated."""
    log.warning("%s %swill be refused by the next version: %s.", what, effect, instead)


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
        Unknown recipe, key or value; the message suggests what would fit.
    """
    path = find_recipe(recipe)
    return parse_config(_merge(path, overrides), name=path.stem, origin=str(recipe))


# ---------------------------------------------------------------- reading and merging


def apply_overrides(config: RecipeConfig, overrides: Sequence[str]) -> RecipeConfig:
    """A configuration (one from a record, for one) with ``key=value`` overrides applied.

    Raises
    ------
    ConfigurationError
        Unknown key or value; the message suggests what would fit.
    """
    from omegaconf import OmegaConf

    for text in overrides:
        values = OmegaConf.to_container(parse_override(text), resolve=True)
        config = replace_fields(config, dict(leaves("", values)))
    return config


def leaves(prefix: str, values: Any) -> typing.Iterator[tuple[str, Any]]:
    """Leaves below a mapping, by dotted path."""
    if not isinstance(values, Mapping):
        yield prefix, values
        return
    for key, value in values.items():
        yield from leaves(f"{prefix}.{key}" if prefix else str(key), value)


def merged(path: Path, overrides: Sequence[str]) -> Any:
    """A recipe's file with its includes and overrides, as an OmegaConf node with unresolved
    interpolations."""
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
    """One ``key=value`` as an OmegaConf node; relative files are searched in ``folder`` (default:
    the current one)."""
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
            fix=f"quote text with YAML syntax in it, for YAML and for the shell: {key}='\"…\"'",
        ) from error


# ---------------------------------------------------------------- typing


def parse_config(values: Mapping[str, Any], *, name: str = "", origin: str = "") -> RecipeConfig:
    """A mapping from YAML or a record, checked and typed.

    Raises
    ------
    ConfigurationError
        Names the dotted field, its value, and what was expected.
    """
    values = dict(values)
    values.setdefault("recipe", name or "unnamed")
    return typing.cast(RecipeConfig, typed(RecipeConfig, without_former(values), origin=origin))


def read_values(values: Mapping[str, Any], folder: Path, origin: str = "") -> dict[str, Any]:
    """Fields of a mapping, nested or with dotted keys, read like overrides: dotted path -> value.

    Names of files in ``folder`` become whole paths. Only each value's type is checked.

    Raises
    ------
    ConfigurationError
        Unknown field, wrong type, or an interpolation, which cannot be resolved here.
    """
    found = {}
    for path, value in leaves("", _json_fields_as_text(values)):
        value = settled_value(path, value, folder)
        found[path] = field_value(path, _plain(path, value), origin)
    return found


def read_overrides(texts: Sequence[str], folder: Path, origin: str = "") -> dict[str, Any]:
    """Fields of ``key=value`` texts: dotted path -> value; see :func:`read_values`."""
    from omegaconf import OmegaConf

    found: dict[str, Any] = {}
    for text in texts:
        values = OmegaConf.to_container(parse_override(text, folder), resolve=False)
        found |= read_values(dict(leaves("", values)), folder, origin)
    return found


def _json_fields_as_text(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``values`` with JSON fields as text, also those written as a mapping."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            is_json = path in JSON_FIELDS
            value = json.dumps(value) if is_json else _json_fields_as_text(value, f"{path}.")
        found[str(key)] = value
    return found


def _plain(path: str, value: Any) -> Any:
    """``value`` without OmegaConf's escapes."""
    if isinstance(value, list):
        return [_plain(path, v) for v in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if any(len(found[1]) % 2 == 0 for found in _INTERPOLATION.finditer(value)):
        raise ConfigurationError(
            f"`{path}` is {value!r}, which takes its value from another field.",
            expected="a value",
            fix="write the value (`\\${` for a literal `${`), or put it into the recipe or "
            "`overrides`",
        )
    return _INTERPOLATION.sub(lambda found: f"{found[1][: len(found[1]) // 2]}${{", value)


def override_text(path: str, value: Any) -> str:
    """The ``key=value`` that sets a field to ``value``, as typed after `refiner run`."""
    return f"{path}={_yaml_text(value, _escaped)}"


def written_overrides(values: Mapping[str, Any], folder: Path) -> list[str]:
    """A mapping of fields, nested or with dotted keys, as equivalent ``key=value`` texts:
    interpolations are kept, and files in ``folder`` are named by their whole paths."""
    found = leaves("", _json_fields_as_text(values))
    return [whole_paths(f"{p}={_yaml_text(v, lambda text: text)}", folder) for p, v in found]


def whole_paths(text: str, folder: Path) -> str:
    """An equivalent ``key=value`` that works in any folder: files in ``folder`` become whole
    paths. All other texts are unchanged."""
    from omegaconf import OmegaConf

    path = text.partition("=")[0]
    if path not in FILE_FIELDS and path not in PROTOCOL_FIELDS:
        return text
    parse_override(text, folder)  # refuses an invalid override
    section, _, leaf = path.rpartition(".")
    value = OmegaConf.to_container(OmegaConf.from_dotlist([text])[section], resolve=False)
    found = value[leaf] if isinstance(value, dict) else None
    if isinstance(found, str):
        whole: Any = settled_value(path, found, folder)
    elif isinstance(found, list):
        whole = [whole_path(v, folder) if isinstance(v, str) else v for v in found]
    else:
        return text
    return text if whole == found else f"{path}={_yaml_text(whole, lambda text: text)}"


def _yaml_text(value: Any, prepare: Callable[[str], str]) -> str:
    """``value`` as YAML that is read back unchanged; ``prepare`` is applied to texts."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_yaml_text(v, prepare) for v in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    quoted = json.dumps(prepare(value), ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _escaped(value: Any) -> Any:
    """A value escaped so that OmegaConf reads no interpolation."""
    if isinstance(value, tuple | list):
        return [_escaped(v) for v in value]
    return _INTERPOLATION.sub(r"\1\1\\${", value) if isinstance(value, str) else value


#: Text that OmegaConf reads as an interpolation, with the escapes before it.
_INTERPOLATION = re.compile(r"(\\*)\$\{")
#: Text that YAML always reads as text; the exceptions follow.
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "inf", "nan")


Follow = Callable[[Mapping[str, Any]], dict[str, Any]]
_BEGINS_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_WORD = re.compile(r"\w+")


def what_follows(recipe: str, overrides: Sequence[str], changed: Iterable[str]) -> Follow | None:
    """A function for the fields that take their values from others, after changes.

    Parameters
    ----------
    changed
        Dotted fields that are going to be changed. The result is None if no interpolation can
        depend on one of them.
    """
    from omegaconf import OmegaConf

    node = merged(find_recipe(recipe), overrides)
    texts = {
        path: str(value)
        for path, value in leaves("", OmegaConf.to_container(node, resolve=False))
        if _BEGINS_INTERPOLATION.search(str(value))
    }
    words = {word for text in texts.values() for word in _WORD.findall(text)}
    if not any(words.intersection(path.split(".")) for path in changed):
        return None

    def follow(changes: Mapping[str, Any]) -> dict[str, Any]:
        now = OmegaConf.merge(node, nested({p: _escaped(v) for p, v in changes.items()}))
        return {
            path: field_value(path, _resolved(OmegaConf.select(now, path)))
            for path in texts
            if path not in changes
        }

    return follow


def _resolved(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@dataclass(frozen=True)
class FieldSetting:
    """One place that sets a field.

    Attributes
    ----------
    place
        ``tiny.yaml:17`` of a shipped recipe, the path and line of any other file, or ``override``.
    text
        The value as written there, with interpolations.
    included_by
        The files between the named recipe and this one, outermost first.
    """

    place: str
    text: str
    included_by: tuple[str, ...] = ()

    @property
    def interpolated(self) -> bool:
        """Whether the value is interpolated from other fields."""
        return "${" in self.text.replace("\\${", "")


def settings(recipe: str, overrides: Sequence[str]) -> dict[str, list[FieldSetting]]:
    """Every place that sets a field, by dotted path.

    Raises
    ------
    ConfigurationError
        A file or an override cannot be read.
    """
    import yaml
    from omegaconf import OmegaConf

    found: dict[str, list[FieldSetting]] = {}
    home = {path.parent.resolve() for path in shipped_recipes().values()}
    for path, chain, _ in recipe_files(find_recipe(recipe)):
        name = path.name if path.parent in home else str(path)
        by, text = tuple(p.name for p in chain), path.read_text(encoding="utf-8")
        root = yaml.compose(text, yaml.SafeLoader)
        for field, (line, written) in dict(_scalars(root, "", text)).items():
            found.setdefault(field, []).append(FieldSetting(f"{name}:{line}", written, by))
    for text in overrides:
        values = OmegaConf.to_container(parse_override(text), resolve=False)
        for field, _ in leaves("", values):
            found.setdefault(field, []).append(FieldSetting("override", text.partition("=")[2]))
    return found


def _scalars(node: Any, prefix: str, text: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Fields below a mapping node, each with its line and text; those merged by ``<<`` come
    first."""
    import yaml

    for key, value in sorted(node.value, key=lambda pair: pair[0].value != "<<"):
        if key.value == "<<":
            for taken in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _scalars(taken, prefix, text)
            continue
        if isinstance(value, yaml.MappingNode):
            yield from _scalars(value, f"{prefix}{key.value}.", text)
            # and a mapping of a field with JSON text is the field itself
        written = text[value.start_mark.index : value.end_mark.index]
        yield f"{prefix}{key.value}", (key.start_mark.line + 1, " ".join(written.split()))
