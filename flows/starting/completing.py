"""Completion of command lines: commands, options, recipes, fields, runs, files.

In: a command line up to the cursor. Out: whole words that it may go on with, each with a few words
about it. click reads the line, and completes commands and options; what an argument may be is read
from what its help calls it (RECIPE, RUN, KEY=VALUE …), so that a command that is written later is
completed, too. Imports nothing heavy, and never fails: whatever cannot be found out is not offered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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

_MOST = 10_000
_YAML = (".yaml", ".yml")
#: Fields that name files or folders, besides those that a recipe may name beside itself.
_PATHS = re.compile(r"workspace|data_root|.*(?:_path|_dir|ledger|\.path|workdir|python)")
_OFFERED = {
    "environment.name": ["desk", "tau2"],
    "data.sft_path": ["builtin:synthetic"],
    "data.rl_path": ["builtin:synthetic"],
    "model.name_or_path": ["builtin:tiny", "builtin:tiny-tools"],
    "judge.model": ["lexical-1", "lexical-loose-1"],
}
_NO_BRACKETS = str.maketrans("", "", "[]")


class Candidate(NamedTuple):
    """A word that may stand there."""

    value: str
    about: str = ""


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
    # What the command's help calls it: `RECIPE`, `[RUN] [KEY=VALUE]...`.
    slots = (wanted.metavar or wanted.name or "").translate(_NO_BRACKETS).split()
    if wanted.name == "workspace":
        slots = ["DIR"]
    plain = [slot for slot in slots if "=" not in slot]
    last = plain[-1] if plain and plain[-1].endswith("...") else ""
    slot = plain[len(places)] if len(places) < len(plain) else last
    if "=" not in word:
        room = _workspace(named[-1] if named else RecipeConfig.workspace)
        command = context.command_path.split()[1]
        for name in re.findall(r"[A-Z]+|[a-z]+", slot):
            if name.islower():
                yield Candidate(name)
            elif name == "ANSWER":
                yield from map(Candidate, _answers(wanted, word))
            else:
                yield from map(Candidate, _named(name, command, places, room, word))
    if slot not in ("FIELD", "RECIPE"):  # before these are named, `key=value` means nothing
        for key in slots:
            yield from _of_key(key, word) if "=" in key else ()


# ---------------------------------------------------------------- fields and their values


def _of_key(slot: str, word: str) -> Iterator[Candidate]:
    """``KEY=VALUE`` is any field, ``disk.KEY=VALUE`` one of a section: ``grpo.beta=`` and
    ``grpo.health.``, one level at a time, with what they are."""
    key, sep, value = word.partition("=")
    if sep:
        yield from (Candidate(f"{key}={one}") for one in _values(key, value))
        return
    name = slot.partition("=")[0]
    if name == "workspace":
        yield Candidate("workspace=", "folder that holds records, outputs, checkpoints, logs")
    if not name.endswith("KEY"):
        return
    section, fields = key.rpartition(".")[0], dict(walk(RecipeConfig))
    found = [(f"{n}.", about) for n, about in sections().items() if n != TOP]
    found += [(f"{path}=", fields[path].doc) for path in fields_below(section or TOP)]
    for text, about in found:
        here = text[:-1].rpartition(".")[0] == section
        if here and text.startswith(name.removesuffix("KEY")):
            yield Candidate(text, about)


def _values(path: str, beginning: str) -> Iterator[str]:
    """Values that may stand behind ``path=``."""
    info = dict(walk(RecipeConfig)).get(path)
    if info is None:
        return
    offered = [str(v).lower() if isinstance(v, bool) else str(v) for v in choices_of(info.type)]
    suffixes: tuple[str, ...] = ()
    if path == "dispatch.profile":
        folder, suffixes = Path(str(resources.files("infra.profiles"))), _YAML
        offered = sorted(p.stem for p in folder.glob("*.yaml"))
    elif path == "reward.static_rubrics":
        offered, suffixes = _shipped("rubrics"), _YAML
    elif path == "evaluate.protocols":
        offered = _shipped("protocols")
    offered = offered or _OFFERED.get(path, [])
    if is_list(info.type):
        yield from (f"[{one}" for one in offered)
        return
    yield from offered
    if info.default is None:
        yield "null"
    if path in FILE_FIELDS or _PATHS.fullmatch(path):
        yield from files(beginning, suffixes)


# ---------------------------------------------------------------- what there is


def _named(
    slot: str, command: str, places: Sequence[str], room: Workspace | None, word: str
) -> Iterable[str]:
    """What the help of a command calls so; ``places`` are the words before it."""
    match slot:
        case "RECIPE":
            return (*shipped_recipes(), *files(word, _YAML))
        case "FIELD":
            return (*(name for name in sections() if name != TOP), *field_paths())
        case "FILE" | "PATH" | "DIR":
            return files(word)
        case "NAME" | "SET":
            return (*_shipped(command), *(files(word, _YAML) if slot == "SET" else ()))
        case "SWEEP":
            return _sweeps(command, room, word)
        case "RUN" | "A" | "B" if room is not None:
            return room.run_ids()[::-1]
        case "STAGE":
            return _stages(command, places, room)
    return ()


def _shipped(group: str) -> list[str]:
    """Names that come with refiner, which a group of commands is about."""
    if group in ("rubrics", "rescore"):
        from refiner_core.rubrics import shipped_rubric_sets

        return list(shipped_rubric_sets())
    known = {"protocols": shipped_protocols(), "environments": _OFFERED["environment.name"]}
    return list(known.get(group, ()))


def _answers(option: click.Parameter, word: str) -> Iterator[str]:
    """Of a flag of `refiner init`."""
    from flows.starting.flags import FLAGS

    yield from FLAGS[option.opts[0].removeprefix("--")].words
    yield from files(word)


def _sweeps(command: str, room: Workspace | None, word: str) -> Iterator[str]:
    from sweeps.definition import shipped_sweeps

    if room is not None:
        yield from sweep_names(room)
    if command == "sweep":
        yield from shipped_sweeps()
        yield from files(word, _YAML)


def _stages(command: str, places: Sequence[str], room: Workspace | None) -> Iterator[str]:
    """Those of the run that is named, or of the newest; `explain` is about any recipe."""
    if command == "explain":
        yield from KINDS
    if room is None:
        return
    if runs := room.run_ids():
        named = [run for run in runs if run in places]
        yield from room.read_run(named[0] if named else runs[-1]).stages
    if command == "disk":
        yield from room.stage_ids()


def files(beginning: str, suffixes: tuple[str, ...] = ()) -> Iterator[str]:
    """Files and folders that begin so; folders end in ``/``. Hidden ones where a dot is typed."""
    folder, _, name = beginning.rpartition("/")
    place = Path(folder or ("/" if beginning.startswith("/") else ".")).expanduser()
    if not place.is_dir():
        return
    before = f"{folder}/" if "/" in beginning else ""
    for path in sorted(place.iterdir())[:_MOST]:
        if not path.name.startswith(name) or (path.name.startswith(".") and not name):
            continue
        if path.is_dir():
            yield f"{before}{path.name}/"
        elif not suffixes or path.suffix in suffixes:
            yield f"{before}{path.name}"


def _workspace(folder: str) -> Workspace | None:
    from infra.store.workspace import Workspace

    root = Path(folder).expanduser()
    return Workspace.read_only(root) if root.is_dir() else None
