"""Functions written twice: equal bodies but for the names of what is local.

In: the source. Out: a finding for every pair with five statements or more. Docstrings and
annotations do not count.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.lint.findings import Finding
from tests.lint.source import Function, modules

STATEMENTS = 5


def findings() -> Iterator[Finding]:
    """All functions that are there twice."""
    alike: dict[tuple[str, ...], list[tuple[str, Function]]] = defaultdict(list)
    for module in modules():
        for name, node in module.functions:
            inside = (n for part in _body(node) for n in ast.walk(part))
            kinds = tuple(type(n).__name__ for n in inside if isinstance(n, ast.stmt))
            if len(kinds) >= STATEMENTS:
                alike[kinds].append((f"{module.where}:{name}", node))
    bodies: dict[str, list[str]] = defaultdict(list)
    for group in alike.values():
        for where, node in group if len(group) > 1 else ():
            bodies[shape(node)].append(where)
    for places in bodies.values():
        if len(places) > 1:
            fix = "keep one of them, in the lowest layer that all callers share"
            yield Finding(places[0], f"is repeated as {', '.join(places[1:])}", fix)


def shape(node: Function) -> str:
    """A function's body with its arguments and local names numbered in order of appearance."""
    local = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    local |= {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    numbers = dict.fromkeys(local, "")
    return " ".join(word for statement in _body(node) for word in _words(statement, numbers))


def _body(node: Function) -> list[ast.stmt]:
    """Without the docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _words(node: ast.AST, numbers: dict[str, str]) -> Iterator[str]:
    yield type(node).__name__
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "ctx", "type_comment"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _words(part, numbers)
            elif isinstance(node, ast.Name) and part in numbers:
                numbers[part] = numbers[part] or f"#{sum(map(bool, numbers.values()))}"
                yield numbers[part]
            else:
                yield repr(part)
        yield ";"
