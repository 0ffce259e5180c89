"""The Python API: commands go through it, and every function has types and documents its errors."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import click
import pytest

from flows import api
from flows.cli.main import cli

ROOT = Path(api.__file__).parents[1]


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
