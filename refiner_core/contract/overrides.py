"""Between values and ``key=value`` texts: what a file holds as typed fields, and back.

In: a mapping of fields as YAML has it, or a typed value. Out: dotted path -> typed value, or the
override that one would type on the command line for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import field_value
from refiner_core.contract.loading import leaves, parse_override
from refiner_core.contract.recipes.file_fields import (
    FILE_FIELDS,
    JSON_FIELDS,
    settled_value,
    whole_path,
)


def read_values(values: Mapping[str, Any], folder: Path, origin: str = "") -> dict[str, Any]:
    """Fields of a mapping, nested or with dotted keys, as overrides are read: dotted path -> value.

    Files that it names beside ``folder`` become whole paths. What is checked is each value's type.

    Raises
    ------
    ConfigurationError
        Unknown field, wrong type, or an interpolation, which nothing here could resolve.
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
    """``values`` with what is JSON, though it was written as a mapping, as text."""
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
    """The ``key=value`` that sets a field to ``value``: what one types behind `refiner run`."""
    return f"{path}={_yaml_text(value, _escaped)}"


def written_overrides(values: Mapping[str, Any], folder: Path) -> list[str]:
    """A mapping of fields, nested or with dotted keys, as ``key=value`` texts that say the same:
    interpolations are kept, and files that lie in ``folder`` are named by their whole paths."""
    found = leaves("", _json_fields_as_text(values))
    return [whole_paths(f"{p}={_yaml_text(v, lambda text: text)}", folder) for p, v in found]


def whole_paths(text: str, folder: Path) -> str:
    """A ``key=value`` that says the same from wherever it is typed: files that lie in ``folder`` by
    their whole paths. All others are left as they are."""
    from omegaconf import OmegaConf

    path = text.partition("=")[0]
    if path not in FILE_FIELDS and path != _PROTOCOLS:
        return text
    parse_override(text, folder)  # refuses what is no override
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


#: Names of protocol files, which a configuration holds as what they say.
_PROTOCOLS = "evaluate.protocols"


def _yaml_text(value: Any, prepare: Callable[[str], str]) -> str:
    """``value`` so that YAML reads it back as it is, texts as ``prepare`` makes them."""
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_yaml_text(v, prepare) for v in value) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    quoted = json.dumps(prepare(value), ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _escaped(text: str) -> str:
    """So that OmegaConf takes it for no interpolation."""
    return _INTERPOLATION.sub(r"\1\1\\${", text)


#: Text that OmegaConf takes for an interpolation, with the escapes before it.
_INTERPOLATION = re.compile(r"(\\*)\$\{")
#: Text that YAML takes for nothing else, wherever it stands; and what it does take for another.
_PLAIN_TEXT = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*")
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "inf", "nan")
