"""Docstrings of modules and functions, marks of configuration fields, and no `print`.

In: the source, the configuration's classes, and ``first_fields.txt``: the identity fields of the
first release. Out: findings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.marks import ABSENT, walk
from tests.lint.findings import Finding
from tests.lint.source import Module, modules

#: Modules that print for a user: commands, consoles, programs.
PRINTING = (
    *("flows/cli/", "flows/examples/", "flows/worker.py", "flows/running/console.py"),
    *("flows/running/calls.py", "infra/services/process.py"),
    "refiner_core/environments/desk/__main__.py",
)
#: Scripts whose text is in cells of markdown.
TEXTS = "flows/examples/"
_FIRST = Path(__file__).with_name("first_fields.txt")


def findings() -> Iterator[Finding]:
    """All that lacks a docstring, a mark or a description."""
    for module in modules():
        if ast.get_docstring(module.tree) is None and not module.where.startswith(TEXTS):
            yield Finding(module.where, "no docstring", "describe its input and its output")
        yield from _undocumented(module)
        if not module.where.startswith(PRINTING):
            yield from _prints(module)
    yield from _fields()


def _undocumented(module: Module) -> Iterator[Finding]:
    known = {name for name, _ in module.functions}
    for name, node in module.functions:
        last = node.decorator_list[-1:] and ast.unparse(node.decorator_list[-1])
        silent = any(part.startswith("_") for part in name.split(".")) or last == "overload"
        inner = _is_inner(name, known)
        if not silent and not inner and ast.get_docstring(node) is None:
            yield Finding(
                f"{module.where}:{node.lineno}",
                f"{name} has no docstring",
                "say what it does in one line, or begin its name with an underscore",
            )


def _is_inner(name: str, known: set[str]) -> bool:
    """Inside another function."""
    parts = name.split(".")
    return any(".".join(parts[:i]) in known for i in range(1, len(parts)))


def _prints(module: Module) -> Iterator[Finding]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield Finding(
                f"{module.where}:{node.lineno}",
                "prints",
                "log it, return it, or add the module to PRINTING of tests/lint/marks.py if it "
                "prints for a user",
            )


def _fields() -> Iterator[Finding]:
    """Fields of the configuration; ``walk`` itself refuses one without a mark."""
    first = set(_FIRST.read_text(encoding="utf-8").split())
    for path, info in walk(RecipeConfig):
        if not info.doc.strip():
            yield Finding(path, "a field without a description", "add `doc=`")
        if info.mark == "identity" and info.legacy_value is ABSENT and path not in first:
            yield Finding(
                path,
                "an identity field that older runs lack",
                "declare `legacy_value=`, the value of all older runs, so that their "
                "fingerprints stay valid",
            )
    known = {path for path, _ in walk(RecipeConfig)}
    for path in sorted(first - known):
        yield Finding(_FIRST.name, f"there is no field {path}", "remove the line")
