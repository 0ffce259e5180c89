"""Facts about configuration fields that need no recipe: in words, and as a JSON Schema.

In: a dotted path such as ``grpo.beta``, a section, or a word to search for. Out:
:class:`FieldFacts` with its type, choices, mark, default, and the kinds of stages whose
fingerprints it affects; or the schema of all fields, for editors and external checks.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fields import adapter, field_info, suggest
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.kinds.evaluate import ONLY_OF_EPISODES
from refiner_core.contract.marks import ABSENT, LIMITS, Mark, is_section, walk
from refiner_core.contract.planned import (
    HEALTH_CHECKS_OF,
    NAMED_BY_SOURCE,
    NOT_IN_A_STAGE,
    ONLY_OF_A_SERVED_JUDGE,
    ONLY_OF_THE_BEST,
    SHIPPED_OR_FILE,
)

#: Heading of the fields outside of sections.
TOP = "(top)"
_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class FieldFacts:
    """One field.

    Attributes
    ----------
    path
        Dotted, as in an override.
    type
        In words: ``number``, ``list of text``, ``text or null``, ``one of``.
    choices
        The allowed values, if they are few.
    legacy
        The value in effect before the field existed; ``ABSENT`` if it always has.
    kinds
        Kinds of stages whose fingerprint includes it; later stages follow.
    notes
        Further conditions on that.
    range
        The range of a number, in words; empty without limits.
    """

    path: str
    type: str
    choices: tuple[Any, ...]
    mark: Mark
    default: Any
    legacy: Any
    doc: str
    kinds: tuple[str, ...]
    notes: tuple[str, ...]
    range: str

    @property
    def always_there(self) -> bool:
        """Tell whether the field has existed since the first release."""
        return self.legacy is ABSENT


def facts_of(path: str) -> FieldFacts:
    """Facts of the field at a dotted path.

    Raises
    ------
    ConfigurationError
        There is none; suggests the nearest.
    """
    info = field_info(path)
    return FieldFacts(
        path=path,
        type=_type_words(info.type),
        choices=choices_of(info.type),
        mark=info.mark,
        default=info.default,
        legacy=info.legacy_value,
        doc=info.doc,
        range=info.range.words,
        kinds=_kinds(path) if info.mark == "identity" else (),
        notes=_notes(path) if info.mark == "identity" else (),
    )


@functools.cache
def field_paths() -> tuple[str, ...]:
    """Every field, in the order of the classes."""
    return tuple(path for path, _ in walk(RecipeConfig))


@functools.cache
def sections() -> dict[str, str]:
    """Every section, nested ones included, with its documentation; :data:`TOP` first."""
    return {TOP: "fields outside of sections", **dict(_sections(RecipeConfig, ""))}


def _sections(kind: type, prefix: str) -> Iterable[tuple[str, str]]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if is_section(hints[field.name]):
            path = f"{prefix}{field.name}"
            yield path, field.metadata["refiner"]["doc"]
            yield from _sections(hints[field.name], f"{path}.")


def fields_below(section: str) -> list[str]:
    """Fields of a section and its subsections."""
    if section == TOP:
        return [path for path in field_paths() if "." not in path]
    return [path for path in field_paths() if path.startswith(f"{section}.")]


def fields_called(word: str) -> list[str]:
    """Fields named by ``word``: a field, a section, or a last part.

    Raises
    ------
    ConfigurationError
        There is none; suggests the nearest.
    """
    if word in field_paths():
        return [word]
    found = fields_below(word) if word in sections() else []
    found = found or [path for path in field_paths() if path.endswith(f".{word}")]
    if found:
        return found
    leaves = {path.rsplit(".", 1)[-1] for path in field_paths()}
    near = suggest(word, [*field_paths(), *sections()]) or suggest(word, leaves)
    raise ConfigurationError(
        f"There is no field or section {word!r}.{near}",
        expected="a field such as grpo.beta, its last part, or a section: "
        + ", ".join(name for name in sections() if "." not in name and name != TOP),
        fix=f"see `refiner show`, or look for a word with `refiner show --search {word}`",
    )


def fields_about(word: str) -> list[str]:
    """Fields whose name, documentation or choices contain ``word``.

    Raises
    ------
    ConfigurationError
        There is none.
    """
    wanted = word.casefold().split()
    known = dict(walk(RecipeConfig))
    texts = {
        path: f"{path} {info.doc} {' '.join(map(str, choices_of(info.type)))}".casefold()
        for path, info in known.items()
    }
    found = [path for path, text in texts.items() if wanted and all(w in text for w in wanted)]
    if not found:
        raise ConfigurationError(
            f"No field mentions {word!r}.",
            expected="a word of a field's name or explanation",
            fix="try a shorter word, or see all of them with `refiner show --all`",
        )
    return found


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Allowed values of a type or its elements, if they are few; else empty."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return args
    if kind is bool:
        return (True, False)
    if origin in (typing.Union, types.UnionType, tuple):
        return next((found for found in map(choices_of, args) if found), ())
    return ()


def is_list(kind: Any) -> bool:
    """Tell whether a field of that type is a list."""
    return typing.get_origin(kind) is tuple


def _type_words(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return f"{_type_words(next(a for a in args if a is not types.NoneType))} or null"
    if origin is tuple:
        return "list" if choices_of(args[0]) else f"list of {_type_words(args[0])}"
    if origin is Literal:
        return "one of"
    return _NAMES[kind]


def _kinds(path: str) -> tuple[str, ...]:
    if path in NOT_IN_A_STAGE:
        return ()
    if path in ONLY_OF_THE_BEST:
        return ("publish",)
    found = [k.name for k in KINDS.values() if _is_below(path, k.fields)]
    if _is_of_episodes(path) and "evaluate" not in found:
        found.append("evaluate")
    return tuple(found)


def _is_below(path: str, prefixes: Iterable[str]) -> bool:
    return any(path == p or path.startswith(f"{p}.") for p in prefixes)


def _notes(path: str) -> tuple[str, ...]:
    """Notes from the tables that :mod:`refiner_core.contract.plan_builder` uses."""
    section, _, leaf = path.rpartition(".")
    checks = " or ".join(f"{section}.{name}" for name in HEALTH_CHECKS_OF.get(leaf, (leaf,)))
    of_episodes, of_agents = _is_of_episodes(path), path.startswith("environment.")
    notes = {
        "it determines which stages exist, not their identity": path in NOT_IN_A_STAGE,
        "of the stage `publish-best` only": path in ONLY_OF_THE_BEST,
        "only the content that it names counts, not its place": path in NAMED_BY_SOURCE,
        "of a file, only its content counts, not its place": path in SHIPPED_OR_FILE,
        "with judge.kind=openai only": path in ONLY_OF_A_SERVED_JUDGE,
        f"only where {checks} is `skip`: nothing else changes what is trained": section.endswith(
            ".health"
        ),
        "only with monitor.action=stop: nothing else changes what is trained": section == "monitor",
        "in an evaluation only if it is of episodes, with environment.name": of_episodes,
        "only where environment.name is set": of_agents
        and not of_episodes
        and path != "environment.name",
        "not where environment.name is set, unless environment.nl_assertions=judge": section
        in ("reward", "judge"),
    }
    return tuple(note for note, holds in notes.items() if holds)


def _is_of_episodes(path: str) -> bool:
    return path in ONLY_OF_EPISODES or path.startswith("environment.user.")


#: Schema that ``refiner init`` writes beside a recipe, and the recipe's line that names it.
SCHEMA_FILE = "recipe.schema.json"
EDITOR_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_ABOUT = ["title", "description", "default", "x-mark", *LIMITS.values()]


def recipe_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a recipe's YAML file."""
    schema = adapter(RecipeConfig).json_schema()
    for section in (schema, *schema["$defs"].values()):
        section["additionalProperties"] = False
        section["properties"] = {k: _value(v) for k, v in section["properties"].items()}
    # A mapping is read as JSON text (see JSON_FIELDS of refiner_core.contract.recipes).
    schema["$defs"]["JudgeConfig"]["properties"]["extra_body"]["anyOf"].append({"type": "object"})
    names = {"type": "string"}
    schema["properties"]["include"] = {
        "description": "recipes that this one builds on: shipped names, or YAML files",
        "anyOf": [names, {"type": "array", "items": names}],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "recipe"}


def _value(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field's value in a file."""
    about = {k: v for k, v in field.items() if k in _ABOUT and k != "title"}
    value = {k: v for k, v in field.items() if k not in _ABOUT}
    if "$ref" in value:
        return {**about, "anyOf": [value, {"type": "null"}]}
    return {**about, "anyOf": [*value.get("anyOf", [value]), _INTERPOLATION]}
