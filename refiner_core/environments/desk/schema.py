"""A small check of arguments against the JSON schemas of tools.

In: a schema of type object with properties of plain types, and arguments. Out: what is wrong, as
text, or empty. Schemas use ``type``, ``properties`` and ``required``, as ours do; what a schema
does not name is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
}


def fault(schema: Mapping[str, Any], arguments: object) -> str:
    """What a model is told where its arguments do not fit; empty where they do."""
    if not isinstance(arguments, Mapping):
        return "arguments are no object"
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"{name} is required"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no {str(name)[:24]}"
        if not _fits(value, properties[name]["type"]):
            return f"{name} is no {properties[name]['type']}"
    return ""


def _fits(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])
