"""One finding of the check, and how it is shown."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something that is not as the house wants it."""

    where: str
    """``path`` or ``path:line``."""
    what: str
    mend: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n    {self.mend}"
