"""Files of recipes and protocols: found by name or path, read with their includes, and settled.

In: a shipped name or the path of a YAML file. Out: OmegaConf nodes in the order of merging. File
names in them are whole paths, valid in any job's folder; JSON fields are text, though written as
YAML; and protocols are the contents of their files (:mod:`refiner_core.contract.protocols`), so
that a recorded configuration does not depend on them.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.files import find_file, shipped_files, yaml_fields, yaml_node
from refiner_core.contract.marks import is_section
from refiner_core.contract.protocols import (
    PROTOCOL_FIELDS,
    ProtocolFile,
    parse_protocol,
    protocol_of,
)

#: Fields that name a file or folder, or something shipped. A relative path is searched in the
#: folder of its recipe, then (and for overrides only) in the current one; jobs get the whole path.
FILE_FIELDS = (
    "data.sft_path",
    "data.rl_path",
    "reward.static_rubrics",
    "judge.prompt",
    "publish.card_template",
    "environment.name",
    "environment.tasks",
    "dispatch.profile",
)
#: Row files among these: no shipped file has a bare word as its name, so a folder may.
ROWS_FIELDS = ("data.sft_path", "data.rl_path")
#: Fields of JSON text, which may be written as a mapping.
JSON_FIELDS = ("judge.extra_body",)


def settled_files(node: Any, folder: Path) -> Any:
    """``node`` with whole paths of files, and with JSON as text."""
    from omegaconf import OmegaConf

    for field in (*FILE_FIELDS, *JSON_FIELDS):
        section, _, key = field.rpartition(".")
        values = node.get(section)
        if not OmegaConf.is_dict(values) or key not in values:
            continue
        if OmegaConf.is_interpolation(values, key):
            continue
        value = values[key]
        if field in FILE_FIELDS:
            values[key] = settled_value(field, value, folder)
        elif OmegaConf.is_dict(value):
            values[key] = json.dumps(OmegaConf.to_container(value, resolve=False))
    return node


def settled_value(field: str, value: Any, folder: Path) -> Any:
    """The value of a field, as a whole path if it names an existing file or folder: in
    ``folder``, else in the current one."""
    if field not in FILE_FIELDS or not isinstance(value, str):
        return value
    return _where_it_lies(value, folder) if field in ROWS_FIELDS else whole_path(value, folder)


def whole_path(value: str, folder: Path) -> str:
    """The whole path of a file (with ``:NAME`` after it, for a Python file); the name of something
    shipped, or of nothing, is unchanged."""
    if ".py:" in value:
        file, _, name = value.rpartition(":")
        return f"{whole_path(file, folder)}:{name}"
    named = Path(value).expanduser()
    if "/" not in value and not named.suffix:
        return value
    return _where_it_lies(value, folder)


def _where_it_lies(value: str, folder: Path) -> str:
    named = Path(value).expanduser()
    found = (p for p in (folder / named, Path.cwd() / named) if p.exists())
    return str(next((p.resolve() for p in found), value))


#: Package folder that holds shipped protocols.
PROTOCOL_PACKAGE = "flows.protocols"


def shipped_protocols() -> dict[str, Path]:
    """Names and files of the protocols that come with refiner."""
    return shipped_files(PROTOCOL_PACKAGE)


def load_protocol(name: str, folder: Path | None = None) -> ProtocolFile:
    """A shipped protocol, or a YAML file (relative to ``folder``, else to the current one).

    Raises
    ------
    ConfigurationError
        There is none, it cannot be read, or its content is invalid.
    """
    return _read_protocol(find_protocol(name, folder))


def find_protocol(name: str, folder: Path | None = None) -> Path:
    """The file of a protocol given by shipped name or path; errors as in :func:`load_protocol`."""
    return find_file(name, "protocol", shipped_protocols(), folder).resolve()


def description_of(path: Path) -> str:
    """Description in a protocol file."""
    return " ".join(str(_fields(path).get("description") or "").split())


#: Files of rows, by their ends.
_LABELS = (".jsonl", ".csv", ".tsv", ".parquet")


def embedded(value: Any, folder: Path) -> str:
    """One element of a field with protocols as JSON text; ``value`` is a name, a path, or the
    content of such a file, as a mapping or as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return parse_protocol(value).text
    if isinstance(value, str) and value.endswith(_LABELS):
        raise ConfigurationError(
            f"{value} is a file of rows, not a protocol. Labels belong to the answers that people "
            "have read; a model in training writes new ones at each look.",
            expected="something that can score new answers: a protocol with a judge",
            fix="name a protocol file, such as held-out-judge-v1",
        )
    if isinstance(value, str):
        return load_protocol(value, folder).text
    if isinstance(value, dict):
        return _settled_protocol(value, folder, "").text
    raise ConfigurationError(
        f"{value!r} is no protocol.",
        expected="names of shipped protocols, or YAML files",
        fix="write e.g. evaluate.protocols='[held-out-greedy-v1]'",
    )


def _read_protocol(path: Path) -> ProtocolFile:
    protocol, shipped = (
        _settled_protocol(_fields(path), path.parent, path.name),
        shipped_protocols(),
    )
    known = shipped.get(protocol.name)
    if known is not None and known != path and _read_protocol(known).text != protocol.text:
        raise ConfigurationError(
            f"Protocol {path} has the name {protocol.name}, of a shipped one that differs.",
            expected="a name of its own: tables and cards show it",
            fix=f"change `name:`, e.g. to {protocol.name}-mine",
        )
    return protocol


def _fields(path: Path) -> dict[str, Any]:
    return yaml_fields(path, f"Protocol {path}", "name: held-out-mine-v1")


def _settled_protocol(values: dict[str, Any], folder: Path, origin: str) -> ProtocolFile:
    """The protocol with whole paths of files beside its own."""
    from omegaconf import OmegaConf

    node = OmegaConf.create(values, flags={"allow_objects": True})
    plain = OmegaConf.to_container(settled_files(node, folder), resolve=False)
    assert isinstance(plain, dict)
    return protocol_of({str(k): v for k, v in plain.items()}, origin)


#: Package folders that hold shipped recipes.
RECIPE_PACKAGE = "flows.recipes"


def shipped_recipes() -> dict[str, Path]:
    """Names and files of the recipes that come with refiner."""
    return shipped_files(RECIPE_PACKAGE)


def find_recipe(recipe: str) -> Path:
    """The file of a recipe given by shipped name or path."""
    shipped, path = shipped_recipes(), Path(recipe).expanduser()
    if recipe and recipe not in shipped and path.is_dir():
        there = ", ".join(sorted(p.name for p in path.glob("*.y*ml"))[:8])
        raise ConfigurationError(
            f"{recipe} is a folder, not a recipe." + (f" It holds {there}." if there else ""),
            expected="the path of a YAML file, or a shipped name: " + ", ".join(shipped),
            fix="name a file in it, or a shipped recipe",
        )
    if "=" in recipe and "/" not in recipe.partition("=")[0] and not path.is_file():
        raise ConfigurationError(
            f"{recipe!r} stands where the recipe should.",
            expected="the recipe first, then key=value overrides",
            fix=f"write e.g. `refiner plan tiny {recipe}`",
        )
    return find_file(recipe, "recipe", shipped)


# ---------------------------------------------------------------- reading


class _RecipeFile(NamedTuple):
    """One of the files that a recipe is merged from; ``chain`` are the files that include it, the
    named one first."""

    path: Path
    chain: tuple[Path, ...]
    node: Any


def recipe_files(path: Path, chain: tuple[Path, ...] = ()) -> list[_RecipeFile]:
    """The files to merge for a recipe's file, included ones first.

    Raises
    ------
    ConfigurationError
        One cannot be read, is not a mapping, or includes itself.
    """
    path = path.resolve()
    if path in chain:
        raise ConfigurationError(
            f"Recipe {path.name} includes itself through {chain[-1].name}.",
            expected="includes without a circle",
            fix="remove one of the `include:` entries",
        )
    node = yaml_node(path, f"Recipe {path}", "include: tiny")
    files: list[_RecipeFile] = []
    for name in _includes(node.pop("include", None), path):
        nested = path.parent / name
        found = nested if nested.is_file() else _included(name, path)
        files += recipe_files(found, (*chain, path))
    settled(without_empty_sections(node), path.parent)
    return [*files, _RecipeFile(path, chain, node)]


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


# ---------------------------------------------------------------- settling


def without_empty_sections(node: Any, section: type = RecipeConfig) -> Any:
    """``node`` without empty sections, so that they do not erase included ones.

    ``grpo:`` with all its fields commented out is null in YAML, and null would replace.
    """
    from omegaconf import OmegaConf

    for name, kind in typing.get_type_hints(section).items():
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
    """``node`` with whole paths of files (a job works in another folder), with JSON fields as text,
    and with the contents of protocol files."""
    settled_files(node, folder)
    for field in PROTOCOL_FIELDS:
        _embed_protocols(node, field, folder)
    return node


def _embed_protocols(node: Any, field: str, folder: Path) -> None:
    """Replace names of protocol files by their contents."""
    from omegaconf import OmegaConf

    name, _, leaf = field.rpartition(".")
    section = node.get(name)
    if not OmegaConf.is_dict(section) or OmegaConf.is_interpolation(section, leaf):
        return
    named = section.get(leaf)
    if OmegaConf.is_list(named):
        values: Any = OmegaConf.to_container(named, resolve=False)
        section[leaf] = [embedded(value, folder) for value in values]
