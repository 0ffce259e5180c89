"""What `refiner` does, as functions: the one door for scripts and notebooks.

Everything that a command does is a function here, with types and a docstring. It returns values and
prints nothing to stdout; what goes wrong raises a
:class:`~refiner_core.contract.errors.RefinerError` that says what was expected and what mends it.
``workspace`` is a folder (default: ``runs``), overrides are ``key=value`` as on the command line,
and runs are named as in `refiner status`: an id, or enough of its beginning or end.

>>> from flows import api
>>> plan = api.make_recipe_plan("tiny", ["seed=3"])
>>> [stage.name for stage in plan.stages][:3]
['data', 'sft', 'grpo']

Records as dataframes (``api.metrics_frame()`` and others) are :mod:`flows.frames`. Importing this
package imports nothing else: a name is looked up in its module when it is used.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any

_OURS = ("flows.", "infra.", "refiner_core.")

if TYPE_CHECKING:
    pass

#: Name -> its module, and what it is called there: as the imports above say to type checkers.
_MODULES = {
    alias.asname or alias.name: (node.module or "", alias.name)
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[__name__])))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS)
    for alias in node.names
}
#: Former names: their successors take the workspace by its name.
_FORMER = {"deploy_nightly": "deploy", "serve_nightly": "serve"}


def __getattr__(name: str) -> Any:
    """The function or type of that name, its module imported on first use."""
    if name in _FORMER:
        warnings.warn(f"{name} is {_FORMER[name]} now", DeprecationWarning, stacklevel=2)
        name = _FORMER[name]
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, called = _MODULES[name]
    found = getattr(importlib.import_module(module), called)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Names for completion and help."""
    return sorted([*globals(), *_MODULES])
