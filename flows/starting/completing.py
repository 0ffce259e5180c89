"""Completion of command lines: commands, options, recipes, fields, runs, files.

In: a command line up to the cursor. Out: whole words that it may go on with, each with a few words
about it. click reads the line, and completes commands and options; what an argument may be is read
from what its help calls it (RECIPE, RUN, KEY=VALUE …), so that a command that is written later is
completed, too. Imports nothing heavy, and never fails: whatever cannot be found out is not offered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
from click.shell_completion import _resolve_context, _resolve_incomplete, split_arg_string

from infra.store.sweep_records import sweep_names
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.field_facts import (
    TOP,
    choices_of,
    field_paths,
    fields_below,
    is_list,
    sections,
)
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes import FILE_FIELDS, shipped_protocols, shipped_recipes

if TYPE_CHECKING:
    from infra.store.workspace import Workspace

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
    """Values that may stand behind ``path=``."""
    info = dict(walk(RecipeConfig)).get(path)
    if info is None:
        return
    named = _named(path)
    offered = [_text(one) for one in choices_of(info.type)] or named
    if is_list(info.type):
        yield from (f"[{one}" for one in offered)
        return
    yield from offered
    if info.default is None:
        yield "null"
    if path in FILE_FIELDS or _PATHS.fullmatch(path):
        yield from yaml_files(beginning) if path in _YAML else files(beginning)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_OFFERED = {
    "environment.name": ["desk", "tau2"],
    "data.sft_path": ["builtin:synthetic"],
    "data.rl_path": ["builtin:synthetic"],
    "model.name_or_path": ["builtin:tiny", "builtin:tiny-tools"],
    "judge.model": ["lexical-1", "lexical-loose-1"],
}


def _named(path: str) -> list[str]:
    """Names of what is shipped, for a field."""
    if path == "dispatch.profile":
        return sorted(p.stem for p in Path(str(resources.files("infra.profiles"))).glob("*.yaml"))
    if path == "reward.static_rubrics":
        return _shipped("rubrics")
    return _shipped("protocols") if path == "evaluate.protocols" else _OFFERED.get(path, [])


def _shipped(group: str) -> list[str]:
    """Names that come with refiner, which a group of commands is about."""
    if group == "rubrics":
        from refiner_core.rubrics import shipped_rubric_sets

        return list(shipped_rubric_sets())
    if group == "protocols":
        return list(shipped_protocols())
    return ["desk", "tau2"] if group == "environments" else []


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


class Candidate(NamedTuple):
    """A word that may stand there."""

    value: str
    about: str = ""


class _Typed(NamedTuple):
    """The words before the one that is completed: names of the command and its subcommands, those
    of its argument that are no ``key=value``, and the workspace."""

    path: list[str]
    places: list[str]
    workspace: Workspace | None


def candidates(cli: click.Command, line: str) -> list[Candidate]:
    """The words that the last word of ``line`` may become, for the command ``cli``. It raises
    nothing."""
    words = split_arg_string(line)
    incomplete = words.pop() if words and not line[-1:].isspace() else ""
    try:
        context = _resolve_context(cli, {}, "refiner", words[1:])
        wanted, rest = _resolve_incomplete(context, words[1:], incomplete)
        known = [Candidate(i.value, i.help or "") for i in wanted.shell_complete(context, rest)]
        if isinstance(wanted, click.Parameter):
            known = [one for one in known if one.value != rest]  # `files here`, to a shell
            known += _found(context, wanted, incomplete)
    except (RefinerError, OSError):
        return []
    return [one for one in dict.fromkeys(known) if one.value.startswith(incomplete)]


def _found(context: click.Context, wanted: click.Parameter, word: str) -> Iterator[Candidate]:
    given = [w for value in context.params.values() if isinstance(value, tuple) for w in value]
    named = [w.removeprefix("workspace=") for w in given if str(w).startswith("workspace=")]
    own = context.params.get(wanted.name or "") if wanted.nargs == -1 else None
    places = [w for w in own or () if "=" not in w]
    path = context.command_path.split()[1:]
    typed = _Typed(path, places, _workspace(named[-1] if named else RecipeConfig.workspace))
    # What the command's help calls it: `RECIPE`, `[RUN] [KEY=VALUE]...`.
    slots = (wanted.metavar or wanted.name or "").translate(_NO_BRACKETS).split()
    if wanted.name == "workspace":
        slots = ["DIR"]
    plain = [slot for slot in slots if "=" not in slot]
    last = plain[-1] if plain and plain[-1].endswith("...") else ""
    slot = plain[len(places)] if len(places) < len(plain) else last
    if "=" not in word:
        yield from _of_slot(typed, slot, word)
        yield from map(Candidate, _answers(wanted, word) if slot == "ANSWER" else ())
    if slot not in _FIRST:
        for key in slots:
            yield from _of_key(key, word) if "=" in key else ()


def _of_key(slot: str, incomplete: str) -> Iterator[Candidate]:
    """``KEY=VALUE`` is any field, ``disk.KEY=VALUE`` one of a section."""
    key, sep, value = incomplete.partition("=")
    if sep:
        yield from (Candidate(f"{key}={one}") for one in field_values(key, value))
        return
    name = slot.partition("=")[0]
    prefix = name.removesuffix("KEY")
    if name == "workspace":
        yield Candidate("workspace=", "folder that holds records, outputs, checkpoints, logs")
    elif name.endswith("KEY"):
        yield from (Candidate(*one) for one in field_keys(incomplete) if one[0].startswith(prefix))


def _of_slot(typed: _Typed, slot: str, incomplete: str) -> Iterator[Candidate]:
    for name in re.findall(r"[A-Z]+|[a-z]+", slot):
        if name.islower():
            yield Candidate(name)
        elif name == "NAME" and typed.path:
            yield from map(Candidate, _shipped(typed.path[0]))
        elif name in _SOURCES:
            yield from map(Candidate, _SOURCES[name](typed, incomplete))


def _answers(option: click.Parameter, incomplete: str) -> Iterator[str]:
    """Of a flag of `refiner init`."""
    from flows.starting.flags import FLAGS

    yield from FLAGS[option.opts[0].removeprefix("--")].words
    yield from files(incomplete)


# ---------------------------------------------------------------- what there is


def _workspace(folder: str) -> Workspace | None:
    from infra.store.workspace import Workspace

    root = Path(folder).expanduser()
    return Workspace.read_only(root) if root.is_dir() else None


def _sweeps(typed: _Typed, incomplete: str) -> Iterator[str]:
    from sweeps.definition import shipped_sweeps

    if typed.workspace is not None:
        yield from sweep_names(typed.workspace)
    if typed.path == ["sweep"]:
        yield from shipped_sweeps()
        yield from yaml_files(incomplete)


def _runs(typed: _Typed, incomplete: str) -> Sequence[str]:
    return [] if typed.workspace is None else typed.workspace.run_ids()[::-1]


def _stages(typed: _Typed, incomplete: str) -> Iterator[str]:
    """Those of the newest run; `explain` is about any recipe."""
    if typed.path == ["explain"]:
        yield from KINDS
    if (workspace := typed.workspace) is None:
        return
    if runs := workspace.run_ids():
        named = [run for run in runs if run in typed.places]
        yield from workspace.read_run(named[0] if named else runs[-1]).stages
    if typed.path == ["disk"]:
        yield from workspace.stage_ids()


def _services(typed: _Typed, incomplete: str) -> Iterator[str]:
    if typed.workspace and (folder := typed.workspace.root / "services").is_dir():
        yield from sorted(p.name for p in folder.iterdir())


_NO_BRACKETS = str.maketrans("", "", "[]")
#: Before these are named, `key=value` means nothing.
_FIRST = ("FIELD", "RECIPE")
_SOURCES: dict[str, Callable[[_Typed, str], Iterable[str]]] = {
    "RECIPE": lambda typed, word: (*shipped_recipes(), *yaml_files(word)),
    "SWEEP": _sweeps,
    "RUN": _runs,
    "A": _runs,
    "B": _runs,
    "STAGE": _stages,
    "SERVICE": _services,
    "FIELD": lambda typed, word: (*(n for n in sections() if n != TOP), *field_paths()),
    "SET": lambda typed, word: (*_shipped("rubrics"), *yaml_files(word)),
    **dict.fromkeys(("FILE", "PATH", "DIR"), lambda typed, word: files(word)),
}
