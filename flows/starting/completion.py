"""Completion of arguments; click parses the line, and completes commands, options and choices.

In: an argument and the partial word. Out: candidates, by the argument's metavar in the help
(RECIPE, RUN, KEY=VALUE …), so that a new command is completed as well. Imports nothing heavy and
never fails: on an error there are no candidates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import BashComplete, CompletionItem, split_arg_string

from infra.store.sweep_records import sweep_names
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.field_facts import TOP, choices_of, field_paths, is_list, sections
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.marks import FieldInfo, walk
from refiner_core.contract.recipes import FILE_FIELDS, shipped_protocols, shipped_recipes

if TYPE_CHECKING:
    from infra.store.workspace import Workspace

#: A candidate: ``value``, ``help``.
Candidate = CompletionItem
#: Marker for the shell's own file completion. It comes first: bash drops candidates before it. zsh
#: would drop an empty value.
FILE = CompletionItem("FILE", type="file")
#: Fields that name files or folders, besides those that may be relative to the recipe.
_PATHS = re.compile(r"workspace|data_root|.*(?:_path|_dir|ledger|\.path|workdir|python)")
_OFFERED = {
    "environment.name": ["desk", "tau2"],
    "data.sft_path": ["builtin:synthetic"],
    "data.rl_path": ["builtin:synthetic"],
    "model.name_or_path": ["builtin:tiny", "builtin:tiny-tools"],
    "judge.model": ["lexical-1", "lexical-loose-1"],
}
_NO_BRACKETS = str.maketrans("", "", "[]")


def candidates(cli: click.Command, line: str) -> list[Candidate]:
    """Candidates for the last word of ``line``, for the command ``cli``. Raises nothing."""
    words = split_arg_string(line)
    incomplete = words.pop() if words and not line[-1:].isspace() else ""
    return BashComplete(cli, {}, "refiner", "").get_completions(words[1:], incomplete)


def complete(context: click.Context, argument: click.Parameter, word: str) -> list[CompletionItem]:
    """Candidates for an argument; called by click."""
    try:
        found = list(_found(context, argument, word))
    except (RefinerError, OSError):
        return []
    return [one for one in found if one.type == "file" or str(one.value).startswith(word)]


def complete_answer(
    _context: click.Context, option: click.Parameter, word: str
) -> list[CompletionItem]:
    """Candidates for a flag of `refiner init`."""
    from flows.starting.flags import FLAGS

    words = FLAGS[option.opts[0].removeprefix("--")].words
    return [CompletionItem(one) for one in words if one.startswith(word)] or [FILE]


def _found(
    context: click.Context, argument: click.Parameter, word: str
) -> Iterator[CompletionItem]:
    given = [str(w) for v in context.params.values() for w in (v if isinstance(v, tuple) else ())]
    named = [w.removeprefix("workspace=") for w in given if w.startswith("workspace=")]
    own = context.params.get(argument.name or "") if argument.nargs == -1 else None
    own = [str(w) for w in own or ()]
    if own[-1:] == ["="]:  # bash splits words at the sign
        yield from _values(own[-2] if own[1:] else "")
        return
    places = [w for w in own if "=" not in w]
    # The argument's metavar: `RECIPE`, `[RUN] [KEY=VALUE]...`.
    slots = (argument.metavar or argument.name or "").translate(_NO_BRACKETS).split()
    plain = [slot for slot in slots if "=" not in slot]
    last = plain[-1] if plain and plain[-1].endswith("...") else ""
    slot = plain[len(places)] if len(places) < len(plain) else last
    if "=" not in word:
        ws = _workspace(named[-1] if named else RecipeConfig.workspace)
        command = context.command_path.split()[1]
        for name in re.findall(r"[A-Z]+|[a-z]+", slot):
            offered = [name] if name.islower() else _named(name, command, places, ws)
            yield from (one if isinstance(one, CompletionItem) else CompletionItem(one)
                        for one in offered)  # fmt: skip
    if slot not in ("FIELD", "RECIPE"):  # `key=value` needs one of these first
        for key in slots:
            yield from _of_key(key, word) if "=" in key else ()


def _of_key(slot: str, word: str) -> Iterator[CompletionItem]:
    """Candidates for ``KEY=VALUE`` (any field) and ``disk.KEY=VALUE`` (fields of a section). A
    single remaining field yields its values, or its default."""
    key, sep, _ = word.partition("=")
    name = slot.partition("=")[0]
    fields = dict(walk(RecipeConfig))
    if not name.endswith("KEY"):
        fields = {name: fields[name]}
    below = key if sep else max(key, name.removesuffix("KEY"), key=len)
    found = {p: i for p, i in fields.items() if p == below or (not sep and p.startswith(below))}
    if len(found) > 1:
        yield from (CompletionItem(path, help=info.doc) for path, info in found.items())
        return
    for path, info in found.items():
        values = [str(v.value) for v in _values(path) if v.type != "file"] or _default(info)
        yield from (CompletionItem(f"{path}={one}", help=info.doc) for one in values)


def _default(info: FieldInfo) -> list[str]:
    plain = isinstance(info.default, int | float | str)
    return [str(info.default)] if plain else [""]


def _values(path: str) -> Iterator[CompletionItem]:
    """Values for ``path=``."""
    info = dict(walk(RecipeConfig)).get(path)
    if info is None:
        return
    offered = [str(v).lower() if isinstance(v, bool) else str(v) for v in choices_of(info.type)]
    if path == "dispatch.profile":
        folder = Path(str(resources.files("infra.profiles")))
        offered = sorted(p.stem for p in folder.glob("*.yaml"))
    elif path in ("reward.static_rubrics", "evaluate.protocols"):
        offered = _shipped("rubrics" if path.startswith("reward") else "protocols")
    offered = offered or _OFFERED.get(path, [])
    if info.default is None:
        offered = [*offered, "null"]
    if path in FILE_FIELDS or _PATHS.fullmatch(path):
        yield FILE
    yield from (CompletionItem(f"[{v}]" if is_list(info.type) else v) for v in offered)


def _named(
    slot: str, command: str, places: Sequence[str], ws: Workspace | None
) -> Iterable[str | CompletionItem]:
    """Candidates by the metavar of an argument; ``places`` are the words before it."""
    match slot:
        case "RECIPE":
            return (FILE, *shipped_recipes())
        case "FIELD":
            return (*(name for name in sections() if name != TOP), *field_paths())
        case "FILE" | "PATH" | "DIR":
            return (FILE,)
        case "NAME" | "SET":
            return _shipped(command)
        case "SWEEP":
            return _sweeps(command, ws)
        case "RUN" | "A" | "B" if ws is not None:
            return ws.run_ids()[::-1]
        case "STAGE":
            return _stages(command, places, ws)
    return ()


def _shipped(group: str) -> list[str]:
    """Shipped names for a group of commands."""
    if group in ("rubrics", "rescore"):
        from refiner_core.rubrics import shipped_rubric_sets

        return list(shipped_rubric_sets())
    known = {"protocols": shipped_protocols(), "environments": _OFFERED["environment.name"]}
    return list(known.get(group, ()))


def _sweeps(command: str, ws: Workspace | None) -> Iterator[str | CompletionItem]:
    from sweeps.definition import shipped_sweeps

    if command == "sweep":
        yield FILE
        yield from shipped_sweeps()
    if ws is not None:
        yield from sweep_names(ws)


def _stages(command: str, places: Sequence[str], ws: Workspace | None) -> Iterator[str]:
    """Stages of the given run, or of the newest; `explain` takes those of any recipe."""
    if command == "explain":
        yield from KINDS
    if ws is not None and (runs := ws.run_ids()):
        named = [run for run in runs if run in places]
        yield from ws.read_run(named[0] if named else runs[-1]).stages
        if command == "disk":
            yield from ws.stage_ids()


def _workspace(folder: str) -> Workspace | None:
    from infra.store.workspace import Workspace

    root = Path(folder).expanduser()
    return Workspace.read_only(root) if root.is_dir() else None
