"""Fields of the configuration by dotted path: found, checked, replaced.

In: ``grpo.beta`` and a value. Out: the value as the field holds it, or an error with what would
fit and the nearest existing name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.errors import suggest as suggest
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.marks import STRICT, FieldInfo, is_section, unchecked, walk


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's validator of a section or of a field's type."""
    return TypeAdapter(kind, config=None if is_section(kind) else STRICT)


def replace_fields(config: RecipeConfig, changes: Mapping[str, Any]) -> RecipeConfig:
    """A copy with fields at dotted paths replaced and checked; cheap, for thousands of trials.

    Sections without a change stay the same objects.
    """
    for path, value in changes.items():
        config = _replace(config, path.split("."), field_value(path, value))
    return config


def field_info(path: str, origin: str = "") -> FieldInfo:
    """Facts of the field at a dotted path.

    Raises
    ------
    ConfigurationError
        There is none; suggests the nearest, and names ``origin``.
    """
    known = _fields()
    if path not in known:
        raise unknown_key(path, origin)
    return known[path]


def field_value(path: str, value: Any, origin: str = "") -> Any:
    """``value`` as the field at ``path`` holds it (an int as a float, a list as a tuple).

    Raises
    ------
    ConfigurationError
        Unknown field, or a value of another type.
    """
    return typed(field_info(path, origin).type, value, path)


@functools.cache
def _fields() -> dict[str, FieldInfo]:
    return dict(walk(RecipeConfig))


def _replace(node: Any, parts: Sequence[str], value: Any) -> Any:
    head, *rest = parts
    new = _replace(getattr(node, head), rest, value) if rest else value
    return unchecked(type(node), {**vars(node), head: new})


def refuse_fields(
    config: RecipeConfig, wrong: object, paths: str, expected: str, fix: str = ""
) -> None:
    """Refuse invalid values or combinations of values.

    Parameters
    ----------
    wrong
        Condition of the refusal.
    paths
        Dotted fields, separated by spaces: the message has their values.
    expected, fix
        As in :class:`~refiner_core.contract.errors.RefinerError`.

    Raises
    ------
    ConfigurationError
        ``wrong`` is true.
    """
    if not wrong:
        return
    *others, last = (f"`{p}` is {_shown(get_field(config, p))}" for p in paths.split())
    raise ConfigurationError(
        f"{', '.join(others)}{' and ' if others else ''}{last}.",
        expected=expected,
        fix=fix or f"change {'one of these' if others else paths}",
    )


def _shown(value: Any) -> str:
    """A value in the form of an override, shortened."""
    text = str(list(value)) if isinstance(value, tuple) else repr(value)
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(text, text if len(text) <= 80 else f"{text[:80]}…")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path as mappings of sections."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        *sections, leaf = path.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return found


def unknown_key(path: str, origin: str) -> ConfigurationError:
    """Error for an unknown key, with a suggestion."""
    known = list(_fields())
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


def typed(kind: Any, value: Any, path: str = "", origin: str = "") -> Any:
    """``value``, from YAML or a record, as a section or a field's type: whole numbers pass as
    floats, lists as tuples, nothing else is converted.

    Raises
    ------
    ConfigurationError
        Names the first field that does not fit, and all others.
    """
    text = json.dumps(value, default=lambda v: {type(v).__name__: str(v)})
    try:
        return adapter(kind).validate_json(text)
    except ValidationError as error:
        found = [_refusal(e, path, origin) for e in error.errors(include_url=False)]
    first, *others = sorted(found, key=lambda refusal: not refusal.what.startswith("There is no"))
    also = "".join(f" {e.what.rstrip('.')} (expected {e.expected})." for e in others)
    fix = f"{first.fix}. Other errors:{also}" if also else first.fix
    raise ConfigurationError(first.what, expected=first.expected, fix=fix)


def _refusal(error: Any, path: str, origin: str) -> ConfigurationError:
    """A pydantic error as a refusal."""
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    kind, value = error["type"], error["input"]
    if kind == "unexpected_keyword_argument":
        return unknown_key(_deepest(path, value), origin)
    if kind == "dataclass_type":
        what, fix = f"Section `{path}` is {value!r}.", f"write e.g. `{path}.FIELD=VALUE`"
        return ConfigurationError(what, expected="a mapping of fields", fix=fix)
    if kind == "tuple_type":
        return _wrong(path, value, "a list, e.g. [a, b]", fix=f"set {path}='[{value}]'")
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'|(\d+)", error["ctx"]["expected"])
        names = [text or number for text, number in choices]
        return _wrong(path, value, f"one of {', '.join(names)}", suggest(str(value), names))
    expected = _NAMES.get(kind, error["msg"])
    if kind == "string_type" and isinstance(value, int | float):
        note = " It reads as a value of another type; text that looks like one is quoted."
        text = str(value).lower() if isinstance(value, bool) else value
        fix = f"quote it, for YAML and for the shell: {path}='\"{text}\"'"
        return _wrong(path, value, expected, note, fix)
    may_be_empty = getattr(_fields().get(path), "default", 0) == ""
    empty = f"drop it, or write {path}='\"\"' for empty text" if may_be_empty else ""
    return _wrong(path, value, expected, fix=empty if value is None else "")


def _deepest(path: str, value: Any) -> str:
    """``grpoo.beta`` rather than ``grpoo``: what the user typed, not where the check failed."""
    while isinstance(value, Mapping) and len(value) == 1:
        ((key, value),) = value.items()
        path = f"{path}.{key}"
    return path


_NAMES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
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
    """The field's default as a hint, in the form of an override; else nothing."""
    info = _fields().get(path)
    if (
        info is None
        or not isinstance(info.default, bool | int | float | str)
        or not str(info.default)
    ):
        return ""
    value = str(info.default).lower() if isinstance(info.default, bool) else info.default
    return f", or drop it for the default, {value}"
