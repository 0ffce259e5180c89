"""Dead code: functions, methods, classes and constants that nothing refers to.

In: the source of packages and tests. Out: findings. Names are counted, not resolved: a definition
is in use if its name occurs anywhere else in the packages, as a name, an attribute, an import, a
keyword, or a word of a text (templates, ``getattr``, commands). So each finding is surely dead or
used by tests alone, and dead code that shares its name with living code may be missed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.lint.findings import Finding
from tests.lint.source import PACKAGES, ROOT, Function, Module, budget, modules

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUDGET = "tests/lint/budget.toml"
#: Its imports are for scripts and notebooks.
_API = "flows.api"
#: What a library calls by name: http.server, logging, torch.
_CALLED_BY_OTHERS = re.compile(r"__\w+__|do_[A-Z]+|log_message|emit|forward")


class Definition(NamedTuple):
    """One name and where it is given."""

    module: Module
    qualified: str
    line: int
    decorated: bool

    @property
    def name(self) -> str:
        """The last part."""
        return self.qualified.rpartition(".")[2]


def findings() -> Iterator[Finding]:
    """All that only tests use, or nothing."""
    ours = uses()
    tests = Counter(word for m in modules("tests") for word in _WORD.findall(m.text))
    allowed: dict[str, str] = dict(budget().get("unused", {}))
    for found in (d for m in modules() for d in definitions(m)):
        key = f"{found.module.where}:{found.qualified}"
        if found.decorated or ours[found.name] > _own(found):
            continue
        if allowed.pop(key, None) is not None:
            continue
        who = "only tests use" if tests[found.name] else "nothing uses"
        yield Finding(
            f"{found.module.where}:{found.line}",
            f"{who} {found.qualified}",
            f"delete it with its tests, or use it; if code outside calls it, add it to {_BUDGET}",
        )
    for key in allowed:
        yield Finding(_BUDGET, f"{key} is used or gone", "remove the entry")


def definitions(module: Module) -> Iterator[Definition]:
    """Functions, classes, methods and constants of a module; not what is local to a function."""
    yield from _defined(module, module.tree.body, "")


def _defined(module: Module, body: list[ast.stmt], prefix: str) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Function):
            yield from _one(module, prefix + node.name, node.lineno, _registers(node))
        elif isinstance(node, ast.ClassDef):
            yield from _one(module, prefix + node.name, node.lineno, bool(node.decorator_list[1:]))
            if not _answers_others(module, node):
                methods = [n for n in node.body if isinstance(n, Function)]
                yield from _defined(module, list(methods), f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not prefix:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)):
                yield from _one(module, target.id, node.lineno, False)


def _answers_others(module: Module, node: ast.ClassDef) -> bool:
    """Whether a library calls the methods of a class, or others fill them in."""
    roots = {ast.unparse(base).split("[")[0].split(".")[0] for base in node.bases}
    return bool(roots & _foreign_names(module)) or "Protocol" in roots


def _foreign_names(module: Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] not in PACKAGES:
            names |= {a.asname or a.name for a in node.names}
    return names - {"NamedTuple", "Generic", "ABC"}


def _one(module: Module, name: str, line: int, decorated: bool) -> Iterator[Definition]:
    found = Definition(module, name, line, decorated)
    if not _CALLED_BY_OTHERS.fullmatch(found.name):
        yield found


def _registers(node: Function) -> bool:
    """A decorator that registers the function (a command, a route), so that it is used."""
    plain = {"property", "cached_property", "staticmethod", "classmethod", "contextmanager"}
    plain |= {"cache", "lru_cache", "wraps", "contextlib.contextmanager", "functools.cache"}
    names = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
    return bool(names - plain)


def uses() -> Counter[str]:
    """How often each name occurs in the packages, definitions left out."""
    found: Counter[str] = Counter()
    for module in modules():
        found.update(_names(module.tree))
        if module.name == _API:
            imports = (n for n in ast.walk(module.tree) if isinstance(n, ast.ImportFrom))
            found.update(alias.name for node in imports for alias in node.names)
    for folder in PACKAGES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".jinja", ".js"):
                found.update(_WORD.findall(path.read_text(encoding="utf-8")))
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    documents: set[int] = set()
    for node in ast.walk(tree):  # parents come before what is in them
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (doc := _docstring(node)):
            documents.add(id(doc))
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.ImportFrom):
            # An import alone is no use; ruff reports imports that are not used.
            yield from (a.name for a in node.names if a.asname)
        elif isinstance(node, ast.Constant) and id(node) not in documents:
            yield from _WORD.findall(node.value) if isinstance(node.value, str) else ()


def _docstring(node: ast.Module | ast.ClassDef | Function) -> ast.Constant | None:
    if node.body and isinstance(node.body[0], ast.Expr):
        value = node.body[0].value
        return value if isinstance(value, ast.Constant) else None
    return None


def _own(found: Definition) -> int:
    """How often a definition names itself: recursion is no use."""
    for name, node in found.module.functions:
        if name == found.qualified:
            return sum(n == found.name for n in _names(node))
    return 0
