"""The JSON Schema of a recipe, for editors and for who checks recipes elsewhere.

In: the declarations of :class:`~refiner_core.contract.config.RecipeConfig`, read by pydantic. Out:
types, ranges, defaults and texts of all fields, and under ``x-mark`` whether one is identity or
execution. What a recipe file may have beside its fields is added: ``include``, interpolations in
place of values, and sections that are empty.
"""

from __future__ import annotations

from typing import Any

from refiner_core.contract.config import RecipeConfig

#: What ``refiner init`` writes beside a recipe, and the line of the recipe that names it.
SCHEMA_FILE = "recipe.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_ABOUT = ("title", "description", "default", "x-mark")


def recipe_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a recipe's YAML file."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(RecipeConfig).json_schema()
    for section in (schema, *schema["$defs"].values()):
        section["additionalProperties"] = False
        section["properties"] = {k: _value(v) for k, v in section["properties"].items()}
    names = {"type": "string"}
    schema["properties"]["include"] = {
        "description": "recipes that this one builds on: shipped names, or YAML files",
        "anyOf": [names, {"type": "array", "items": names}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "recipe"}


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """A field's value, or what stands for it in a file."""
    about = {k: v for k, v in field.items() if k in _ABOUT and k != "title"}
    value = {k: v for k, v in field.items() if k not in _ABOUT}
    if "$ref" in value:
        return {**about, "anyOf": [value, {"type": "null"}]}
    return {**about, "anyOf": [*value.get("anyOf", [value]), _INTERPOLATION]}
