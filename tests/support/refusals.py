"""Every refusal of the four packages, read out of their source: what, expected and fix.

In: the Python files of flows, infra, refiner_core and sweeps. Out: one :class:`Refusal` for each
place where a :class:`RefinerError` is built. Nothing is run: a message is put together from the
literals, constants and f-strings that build it, with ``{…}`` for what only a run knows.

``python -m tests.support.refusals`` prints them all, ``… refusals disk`` those whose module or text
has that word: to be read in one go by whoever writes the next one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "infra", "refiner_core", "sweeps")
#: What stands for a value that only a run knows.
UNKNOWN = "{…}"
_MOST_VARIANTS = 6
_CLICK = {"UsageError", "BadParameter", "ClickException", "BadArgumentUsage", "BadOptionUsage"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One place that builds an error for a user; each text in all its variants."""

    path: str
    line: int
    function: str
    kind: str
    what: tuple[str, ...]
    expected: tuple[str, ...]
    fix: tuple[str, ...]

    @property
    def where(self) -> str:
        """As editors take it."""
        return f"{self.path}:{self.line}"

    def texts(self) -> tuple[str, ...]:
        """All that a user may read of it."""
        return self.what + self.expected + self.fix


@dataclasses.dataclass
class _Module:
    path: str
    #: Every node with the innermost function that it stands in.
    nodes: list[tuple[ast.AST, Function | None]]
    constants: dict[str, ast.expr]


@functools.cache
def refusals() -> list[Refusal]:
    """All of them, by path and line."""
    modules = _modules()
    ours = _our_errors(modules)
    found = [r for module in modules for r in _refusals_of(module, ours)]
    return sorted(found, key=lambda r: (r.path, r.line))


def texts_of(paths: str = "") -> Iterator[tuple[str, str]]:
    """Every string literal below ``paths`` (docstrings too), with where it stands."""
    for module in _modules():
        if not module.path.startswith(paths):
            continue
        inner = {
            id(part)
            for node, _ in module.nodes
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
            if part is not node
        }
        for node, _ in module.nodes:
            if id(node) in inner:
                continue
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                for text in _Reader(module, None).read(node):
                    yield f"{module.path}:{node.lineno}", text


@functools.cache
def _modules() -> list[_Module]:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            constants = {
                target.id: statement.value
                for statement in tree.body
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value
                for target in (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                if isinstance(target, ast.Name)
            }
            path = file.relative_to(ROOT).as_posix()
            found.append(_Module(path, list(_nodes(tree, None)), constants))
    return found


def _our_errors(modules: list[_Module]) -> set[str]:
    bases = {
        node.name: {_name(base) for base in node.bases}
        for module in modules
        for node, _ in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    ours = {"RefinerError"}
    while more := {name for name, of in bases.items() if of & ours and name not in ours}:
        ours |= more
    return ours | {f"_{name}" for name in ours}


def _refusals_of(module: _Module, ours: set[str]) -> Iterator[Refusal]:
    for node, function in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        kind = _name(node.func)
        if kind not in ours and kind not in _CLICK:
            continue
        reader = _Reader(module, function)
        given = {k.arg: k.value for k in node.keywords}
        what = node.args[0] if node.args else given.get("what") or given.get("message")

        def said(name: str, given: dict = given, reader: _Reader = reader) -> tuple[str, ...]:
            if name in given:
                return reader.read(given[name])
            return (UNKNOWN,) if None in given else ("",)

        yield Refusal(
            path=module.path,
            line=node.lineno,
            function=function.name if function else "",
            kind=kind,
            what=reader.read(what) if what is not None else ("",),
            expected=said("expected"),
            fix=said("fix"),
        )


def _nodes(node: ast.AST, function: Function | None) -> Iterator[tuple[ast.AST, Function | None]]:
    todo = [(node, function)]
    while todo:
        node, function = todo.pop()
        yield node, function
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        todo += [(child, inner) for child in ast.iter_child_nodes(node)]


class _Reader:
    """Reads a message out of the expression that builds it, inside one function."""

    def __init__(self, module: _Module, function: Function | None) -> None:
        self._module, self._function = module, function
        self._seen: set[str] = set()

    def read(self, node: ast.expr) -> tuple[str, ...]:
        """The texts that it may be."""
        return tuple(dict.fromkeys(self._read(node)))[:_MOST_VARIANTS]

    def _read(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str) else [UNKNOWN]
        if isinstance(node, ast.JoinedStr):
            return self._joined([self._read(part) for part in node.values])
        if isinstance(node, ast.FormattedValue):
            return [text or UNKNOWN for text in self._read(node.value)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._joined([self._read(node.left), self._read(node.right)])
        if isinstance(node, ast.IfExp):
            return [*self._read(node.body), *self._read(node.orelse)]
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return [t for value in node.values for t in self._read(value) if t]
        if isinstance(node, ast.Name):
            return self._named(node.id)
        return [UNKNOWN]

    @staticmethod
    def _joined(parts: list[list[str]]) -> list[str]:
        made = itertools.islice(itertools.product(*parts), _MOST_VARIANTS)
        return ["".join(chosen) for chosen in made]

    def _named(self, name: str) -> list[str]:
        if name in self._seen:
            return [UNKNOWN]
        self._seen.add(name)
        try:
            if self._function is not None:
                if values := list(_assigned(self._function, name)):
                    return [text for value in values for text in self._read(value)]
                parameters = self._function.args
                by_position = [*parameters.posonlyargs, *parameters.args]
                defaults = dict(
                    zip(
                        [a.arg for a in reversed(by_position)],
                        reversed(parameters.defaults),
                        strict=False,
                    )
                )
                by_name = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
                defaults |= {a.arg: value for a, value in by_name if value is not None}
                if name in {a.arg for a in (*by_position, *parameters.kwonlyargs)}:
                    return [UNKNOWN, *(self._read(defaults[name]) if name in defaults else [])]
            if name in self._module.constants:
                return self._read(self._module.constants[name])
            return [UNKNOWN]
        finally:
            self._seen.discard(name)


def _assigned(function: Function, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    yield node.value
                elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, value in zip(target.elts, node.value.elts, strict=False):
                        if isinstance(one, ast.Name) and one.id == name:
                            yield value


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def main(words: list[str]) -> None:
    """Print those that have one of the words; all of them without any."""
    shown = 0
    for refusal in refusals():
        text = "\n".join((refusal.path, refusal.kind, *refusal.texts()))
        if words and not any(word in text for word in words):
            continue
        shown += 1
        print(f"{refusal.where} {refusal.function}() {refusal.kind}")
        for label, variants in (
            ("what", refusal.what),
            ("expected", refusal.expected),
            ("fix", refusal.fix),
        ):
            for text in variants:
                print(f"    {label:9} {text or '-'}")
    print(f"{shown} refusals")


if __name__ == "__main__":
    main(sys.argv[1:])
