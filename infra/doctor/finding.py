"""What a check has found. Values.

>>> Finding("workspace", "room", "ok", "12 GiB free").ok
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``ok``: works. ``missing``: not there, and nothing that was asked for needs it. ``warning``:
#: works, but will surprise. ``broken``: what was asked for needs it, and it does not work.
State = Literal["ok", "missing", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """One check of ``refiner doctor``.

    Attributes
    ----------
    area, name
        What was looked at: area ``recipe``, ``python``, ``machine``, ``gpu``, ``workspace``,
        ``slurm``, ``node`` (from a compute node), ``prefect``, ``hub``, ``wandb``, ``judge``,
        ``vllm``, ``network``; name in words.
    what
        What was found, in a line, with the numbers.
    mend
        The one command (or line of a file) that mends it; empty where nothing is to be mended.
    why
        What it is needed for, where it is missing or broken.
    seconds
        How long it took to look.
    """

    area: str
    name: str
    state: State
    what: str
    mend: str = ""
    why: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing that was asked for suffers from it."""
        return self.state != "broken"
