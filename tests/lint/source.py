"""The files of the packages as syntax trees, parsed once.

In: the checkout. Out: :class:`Module` values: a tree, a length, and imports, eager or lazy.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "sweeps", "infra", "refiner_core")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One import of a module of ours."""

    target: str
    """Dotted name of the module."""
    line: int
    lazy: bool
    """Inside a function, or for types alone: no arrow when the module is loaded."""


@dataclass(frozen=True)
class Module:
    """One file of Python."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Dotted name; a package's own file has the package's."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def where(self) -> str:
        """The path in messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def lines(self) -> int:
        """Its length."""
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """The whole file."""
        return ast.parse(self.text)

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Qualified names and functions, methods and inner functions among them."""
        return list(_functions(self.tree, ""))

    @cached_property
    def imports(self) -> list[Import]:
        """Imports of our modules; ``from a import b`` is ``a.b`` where that is a module."""
        return list(_imports(self.tree, lazy=False))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, Function):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] in PACKAGES:
                    yield Import(alias.name, child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            if child.module and child.module.split(".")[0] in PACKAGES:
                for target in sorted({_target(child.module, a.name) for a in child.names}):
                    yield Import(target, child.lineno, lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(child, lazy=True)
        else:
            yield from _imports(child, lazy=lazy or isinstance(child, Function | ast.Lambda))


@cache
def _target(package: str, name: str) -> str:
    below = ROOT.joinpath(*package.split("."), name)
    return f"{package}.{name}" if below.is_dir() or below.with_suffix(".py").is_file() else package


@cache
def modules(*folders: str) -> tuple[Module, ...]:
    """All files below some folders (default: the packages), in order of their names."""
    found = [p for folder in folders or PACKAGES for p in (ROOT / folder).rglob("*.py")]
    return tuple(_module(p) for p in sorted(found))


@cache
def _module(path: Path) -> Module:
    return Module(path, path.read_text("utf-8"))


@cache
def budget() -> dict[str, Any]:
    """Exceptions with their reasons (``budget.toml``)."""
    return tomllib.loads(Path(__file__).with_name("budget.toml").read_text("utf-8"))
