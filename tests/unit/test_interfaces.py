"""Errors name what was expected and the fix; the API and the goldens of what scripts read.

The messages are read from the source: no test could raise them all.
"""

import ast
import functools
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from flows import api
from flows.cli.main import cli
from refiner_core.contract import errors
from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import walk
from tests.support import goldens

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "infra", "refiner_core", "sweeps")
#: These refuse no value, so they need no ``expected``.
NOTHING_REFUSED = {"Interrupted", "AttemptClosed", "KilledError"}
#: (file, beginning of the message): errors that no user reads.
INCOMPLETE = [
    ("infra/ranks/bridge.py", "Rank 0 ended before"),
    ("refiner_core/rubrics/lint.py", ""),
]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Path and syntax tree of each module."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return {f.relative_to(ROOT).as_posix(): ast.parse(f.read_text("utf-8")) for f in files}


def text_of(node: ast.AST) -> str | None:
    """The text of a string or f-string; each value in it becomes ``{…}``."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{…}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def texts_in(node: ast.AST) -> Iterator[str]:
    """All strings below a node; parts of an f-string only as the whole."""
    text = text_of(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


@functools.cache
def refusals() -> list[tuple[str, str, ast.Call]]:
    """Place, class and call of each error that is built for a user."""
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RefinerError)
    }
    return [
        (f"{path}:{node.lineno}", node.func.id, node)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
    ]


@pytest.mark.slow
def test_every_error_names_what_was_expected_and_the_fix() -> None:
    """Without its fix, a message leaves a user to read the source."""
    lacking = []
    for where, kind, call in refusals():
        given = {keyword.arg for keyword in call.keywords}
        what = text_of(call.args[0]) or "" if call.args else ""
        excused = any(where.startswith(p) and what.startswith(w) for p, w in INCOMPLETE)
        wanted = {"fix"} if kind in NOTHING_REFUSED else {"expected", "fix"}
        if None not in given and not excused and wanted - given:
            lacking.append(f"{where} {kind} {what!r}: no {wanted - given}")
    assert len(refusals()) > 300
    assert not lacking, "\n".join(lacking)


def wrong_command(text: str) -> str | None:
    """The error in a command line, or None. Words in capitals and braces stand for any value."""
    try:
        words = shlex.split(text)[1:]
    except ValueError:
        return None  # cut from a longer text
    command: click.Command | None = cli
    context = click.Context(cli, info_name="refiner")
    while words and isinstance(command, click.Group):
        if not re.fullmatch(r"[a-z][a-z-]*", words[0]):
            return None if words[0].startswith("-") or not words[0][0].islower() else words[0]
        found = command.get_command(context, words[0])
        if found is None:
            return f"there is no `{words[0]}` below `{command.name}`"
        command, words = found, words[1:]
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    choices = [p.type.choices for p in arguments if isinstance(p.type, click.Choice)]
    if choices and words and re.fullmatch(r"[a-z-]+", words[0]) and words[0] not in choices[0]:
        return f"`{command.name}` does not know {words[0]}"
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    for word in words:
        option = word.split("=")[0].rstrip(".,;…")
        if option.startswith("--") and option not in options | {"--help", "--debug"}:
            return f"`{command.name}` has no option {option}"
    return None


@functools.cache
def fields() -> tuple[set[str], set[str]]:
    """Dotted fields of the configuration, and their sections."""
    known = {path for path, _ in walk(RecipeConfig)}
    return known, {".".join(p.split(".")[:n]) for p in known for n in range(1, p.count(".") + 1)}


def wrong_fields(text: str) -> list[str]:
    """Words such as grpo.betta that begin with a section of the configuration and name no field."""
    known, sections = fields()
    files = {"json", "yaml", "py", "md", "jsonl", "parquet", "csv"}
    words = re.findall(r"(?<![\w./{}…-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w(/{-])", text)
    return [
        word
        for word in words
        if word.split(".")[0] in sections and word.rsplit(".", 1)[1] not in files
        if word not in known | sections
    ]


def test_commands_and_fields_that_texts_name_exist() -> None:
    """Docstrings count: `--help` prints them."""
    wrong = [
        f"{path}: `{line}`: {why}"
        for path, tree in modules().items()
        for text in texts_in(tree)
        for line in re.findall(r"`(refiner [^`]*)`", text)
        if (why := wrong_command(line))
    ]
    wrong += [
        f"{where}: {word}: {text!r}"
        for where, _, call in refusals()
        for text in texts_in(call)
        for word in wrong_fields(text)
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- the API


def commands() -> dict[str, click.Command]:
    """Every command that does something, by the words that call it."""
    found: dict[str, click.Command] = {}
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if isinstance(command, click.Group):
            for sub in command.list_commands(context):
                one = command.get_command(context, sub)
                found[f"{name} {sub}"] = one
        else:
            found[name] = command
    return found


def functions() -> dict[str, object]:
    """The public functions of the API."""
    found = {name: getattr(api, name) for name in api._MODULES}
    return {name: f for name, f in found.items() if inspect.isfunction(f)}


def test_every_command_does_its_work_through_the_api() -> None:
    aside = [
        name
        for name, command in commands().items()
        if not name.endswith(" list") and not _imports(command.callback.__module__) - {""}
    ]
    assert not aside, f"these commands call no function of flows.api: {aside}"


#: Module and name of a function there -> its name in the API.
_NAMES = {home: name for name, home in api._MODULES.items()}


@functools.cache
def _imports(module: str) -> frozenset[str]:
    """API functions that a module of the command line imports, itself or through its neighbours."""
    tree = ast.parse(Path(importlib.import_module(module).__file__ or "").read_text())
    taken = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    found = {_NAMES.get((node.module, alias.name), "") for node in taken for alias in node.names}
    beside = {n.module for n in taken if n.module.startswith("flows.cli.") and n.level == 0}
    return frozenset(found).union(*(_imports(m) for m in beside - {module, "flows.cli.main"}))


@pytest.mark.parametrize("name", sorted(functions()))
def test_a_function_has_types_and_documents_parameters_and_errors(name: str) -> None:
    function = functions()[name]
    signature = inspect.signature(function)
    untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert not untyped, f"{name}: no types of {untyped}"
    assert signature.return_annotation is not signature.empty, f"{name}: no type of its result"
    doc = inspect.getdoc(function) or ""
    said = "Raises\n------" in doc or "raises nothing" in " ".join(doc.lower().split())
    assert said or name in _PURE, f"{name}: nothing on what it raises"
    assert [p for p in signature.parameters if p not in doc] == []


#: Values in, values out.
_PURE = {"plan_json"}


def test_importing_the_api_imports_nothing_heavy() -> None:
    code = (
        "import sys, flows.api, flows.frames.columns; from flows.api import rollouts_frame; "
        "print(sorted({'torch', 'prefect', 'pandas', 'pyarrow', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# ---------------------------------------------------------------- goldens


@pytest.mark.parametrize("name", goldens.MADE)
def test_goldens_are_unchanged(name: str) -> None:
    """If the change is meant (a stage version was raised, a flag added), write the goldens again
    (``python -m tests.support.goldens``) and say in the commit what users have to know."""
    made = json.loads(json.dumps(goldens.MADE[name]()))
    assert made == goldens.read(name)
