"""How large things are: modules, functions, folders.

In: the source and ``budget.toml``. Out: findings. What is larger than the limits stands in the
budget with the size that it may not outgrow; whoever makes it smaller takes the entry out, and
nobody adds one without raising :data:`MOST_EXCEPTIONS`, which a reviewer sees.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from tests.lint.findings import Finding
from tests.lint.source import Function, budget, modules

MODULE_LINES = 700
#: Without the docstring.
FUNCTION_LINES = 60
FOLDER_MODULES = 22
#: How many entries the budget may have; it only goes down.
MOST_EXCEPTIONS = 5
_BUDGET = "tests/lint/budget.toml"


def findings() -> Iterator[Finding]:
    """All that is too large, and all exceptions that are no longer needed."""
    sizes = {m.where: m.lines for m in modules()}
    yield from _over("modules", sizes, MODULE_LINES, "lines", "split it along a seam")
    functions = {
        f"{m.where}:{name}": function_lines(node) for m in modules() for name, node in m.functions
    }
    yield from _over(
        "functions", functions, FUNCTION_LINES, "lines", "give its parts names of their own"
    )
    folders = Counter(
        m.where.rpartition("/")[0] for m in modules() if not m.path.stem.startswith("_")
    )
    yield from _over(
        "folders", folders, FOLDER_MODULES, "modules side by side", "group them into rooms"
    )
    allowed = sum(len(entries) for entries in budget().values())
    if allowed > MOST_EXCEPTIONS:
        yield Finding(
            _BUDGET,
            f"{allowed} exceptions, {MOST_EXCEPTIONS} are allowed",
            "mend what was added instead; the list only gets shorter",
        )
    elif allowed < MOST_EXCEPTIONS:
        yield Finding(
            _BUDGET,
            f"only {allowed} exceptions are left",
            f"good: set MOST_EXCEPTIONS of tests/lint/sizes.py to {allowed}",
        )


def function_lines(node: Function) -> int:
    """Lines of a function without decorators and docstring."""
    body = node.body
    doc = body[0] if body and ast.get_docstring(node, clean=False) is not None else None
    of_doc = 0 if doc is None else (doc.end_lineno or doc.lineno) - doc.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - of_doc


def _over(
    section: str, sizes: Mapping[str, int], limit: int, unit: str, mend: str
) -> Iterator[Finding]:
    allowed: Mapping[str, int] = budget().get(section, {})
    for where, size in sizes.items():
        most = allowed.get(where, limit)
        if size > most:
            yield Finding(where, f"{size} {unit}, at most {most}", mend)
        elif where in allowed and size <= limit:
            yield Finding(
                _BUDGET, f"{where} no longer needs its exception", "take the entry out; well done"
            )
    for where in allowed.keys() - sizes.keys():
        yield Finding(_BUDGET, f"there is no {where}", "take the entry out")
