"""Sizes of modules, functions and folders.

In: the source. Out: findings.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from tests.lint.findings import Finding
from tests.lint.source import Function, modules

MODULE_LINES = 700
#: Without the docstring.
FUNCTION_LINES = 60
FOLDER_MODULES = 22


def findings() -> Iterator[Finding]:
    """All that is too large."""
    lengths = {m.where: m.lines for m in modules()}
    yield from _over(lengths, MODULE_LINES, "lines", "split it")
    functions = {
        f"{m.where}:{name}": function_lines(node) for m in modules() for name, node in m.functions
    }
    yield from _over(functions, FUNCTION_LINES, "lines", "split it into functions with good names")
    shown = (m for m in modules() if not m.path.stem.startswith("_"))
    folders = Counter(m.where.rpartition("/")[0] for m in shown)
    yield from _over(folders, FOLDER_MODULES, "modules side by side", "group them into folders")


def function_lines(node: Function) -> int:
    """Lines of a function without decorators and docstring."""
    body = node.body
    doc = body[0] if body and ast.get_docstring(node, clean=False) is not None else None
    of_doc = 0 if doc is None else (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - of_doc


def _over(sizes: Mapping[str, int], limit: int, unit: str, fix: str) -> Iterator[Finding]:
    for where, size in sizes.items():
        if size > limit:
            yield Finding(where, f"{size} {unit}, at most {limit}", fix)
