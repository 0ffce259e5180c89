"""A fault for the workers of a test: the state of the optimiser is lost on resume.

Python imports a module of this name by itself when its folder is on PYTHONPATH. It waits for the
module with the engine and removes the restore of the state, as a bug might.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_BROKEN = "refiner_core.training.engines.plain"


class _Breaker(importlib.abc.MetaPathFinder):
    """Finds that module as Python does, and breaks it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _BROKEN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_broken(module: Any) -> None:
            load(module)
            module.PlainEngine.set_states = lambda self, state_of: None

        spec.loader.exec_module = load_broken
        return spec


sys.meta_path.insert(0, _Breaker())
