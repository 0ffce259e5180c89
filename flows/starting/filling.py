"""Words that a shell may fill in: names of fields, their values, files.

In: the beginning of a word. Out: whole words; a name that goes on ends in ``.``, ``=`` or ``/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.field_facts import TOP, choices_of, fields_below, is_list, sections
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes.file_fields import FILE_FIELDS

_SHOWN = 200
#: Fields that name files or folders, besides those that a recipe may name beside itself.
_PATHS = re.compile(r"workspace|data_root|.*(?:_path|_dir|ledger|\.path|workdir|python)")

#: Of those, what is YAML.
_YAML = ("dispatch.profile", "reward.static_rubrics")


def field_keys(beginning: str) -> Iterator[tuple[str, str]]:
    """``grpo.beta=`` and ``grpo.health.`` with what they are, one level at a time."""
    section = beginning.rpartition(".")[0]
    known = sections()
    for name, about in known.items():
        if name != TOP and name.rpartition(".")[0] == section:
            yield f"{name}.", about
    fields = dict(walk(RecipeConfig))
    for path in fields_below(section or TOP):
        if path.rpartition(".")[0] == section:
            yield f"{path}=", fields[path].doc


def field_values(path: str, beginning: str) -> Iterator[str]:
    """What may stand behind ``path=``."""
    info = dict(walk(RecipeConfig)).get(path)
    if info is None:
        return
    named = _named(path)
    offered = [_text(one) for one in choices_of(info.type)] or named
    if is_list(info.type):
        yield from _elements(beginning, offered)
        return
    yield from offered
    if info.default is None:
        yield "null"
    if path in FILE_FIELDS or _PATHS.fullmatch(path):
        yield from yaml_files(beginning) if path in _YAML else files(beginning)


def _elements(beginning: str, offered: list[str]) -> Iterator[str]:
    """A list in brackets, its last element completed."""
    last = re.split(r"[\[,]", beginning)[-1]
    before = beginning.removesuffix(last) or "["
    there = set(re.findall(r"[^\[\],]+", before))
    yield from (f"{before}{one}" for one in offered if one not in there)
    if there:
        yield f"{before.rstrip(',')}]"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _named(path: str) -> list[str]:
    """What is shipped under a name."""
    if path == "dispatch.profile":
        from importlib import resources

        folder = Path(str(resources.files("infra.profiles")))
        return sorted(p.stem for p in folder.glob("*.yaml"))
    if path == "reward.static_rubrics":
        from refiner_core.rubrics.sets import shipped_rubric_sets

        return list(shipped_rubric_sets())
    if path == "evaluate.protocols":
        from refiner_core.contract.recipes.protocol_files import shipped_protocols

        return list(shipped_protocols())
    fixed = {
        "environment.name": ["desk", "tau2"],
        "data.sft_path": ["builtin:synthetic"],
        "data.rl_path": ["builtin:synthetic"],
        "model.name_or_path": ["builtin:tiny", "builtin:tiny-tools"],
        "judge.model": ["lexical-1", "lexical-loose-1"],
    }
    return fixed.get(path, [])


def files(beginning: str, suffixes: tuple[str, ...] = ()) -> Iterator[str]:
    """Files and folders that begin so; folders end in ``/``. Hidden ones where a dot is typed."""
    folder, _, name = beginning.rpartition("/")
    place = Path(folder or ("/" if beginning.startswith("/") else ".")).expanduser()
    if not place.is_dir():
        return
    before = f"{folder}/" if "/" in beginning else ""
    for path in sorted(place.iterdir())[: 50 * _SHOWN]:
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        if path.is_dir():
            yield f"{before}{path.name}/"
        elif not suffixes or path.suffix in suffixes:
            yield f"{before}{path.name}"


def yaml_files(beginning: str) -> Iterator[str]:
    """YAML files, and folders on the way to them."""
    yield from files(beginning, (".yaml", ".yml"))
