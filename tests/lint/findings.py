"""One finding of a check, and how it is shown."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A place in the source, what is wrong there, and how to fix it."""

    where: str
    """``path`` or ``path:line``."""
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n    {self.fix}"
