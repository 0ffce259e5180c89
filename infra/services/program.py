"""Whether the program that is to serve a model is there, as far as looking at files tells.

In: how a server is started (interpreter, shell lines before, container). Out: what is lacking, in
words, or nothing. Starts nothing: what `setup` brings, and what a container holds, is not known
here; ``refiner doctor`` tries it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from refiner_core.contract.config import RolloutServerConfig, ServeConfig


@dataclass(frozen=True)
class ServerProgram:
    """What is started. ``field`` is the section of the recipe that says so."""

    field: str
    engine: str
    python: str | None
    setup: tuple[str, ...]
    container: str | None

    @classmethod
    def of(
        cls, config: RolloutServerConfig | ServeConfig, field: str, engine: str
    ) -> ServerProgram:
        """From a recipe's section."""
        return cls(field, engine, config.python, config.setup, config.container)

    @property
    def lacking(self) -> str:
        """What is sure not to be there; empty if nothing is."""
        if words := shlex.split(self.container or ""):
            return "" if shutil.which(words[0]) or self.setup else f"there is no `{words[0]}`"
        if self.python is not None:
            return self._lacking_python(self.python)
        if self.setup or shutil.which(self.engine):
            return ""
        return f"there is no `{self.engine}` on PATH"

    def _lacking_python(self, python: str) -> str:
        if "/" not in python:
            found = self.setup or shutil.which(python)
            return "" if found else f"there is no `{python}` on PATH"
        if "$" in python or python.startswith("~"):
            return f"{python} is taken as it stands: neither ~ nor $NAME is replaced"
        path = Path(python)
        if not path.exists():
            return f"there is no {python}"
        if not path.is_file() or not os.access(path, os.X_OK):
            return f"{python} is no program"
        return ""
