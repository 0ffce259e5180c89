"""What Slurm's controller says of itself: its settings and its clock, asked once.

In: a look. Out: :class:`SlurmSettings`, shared by the checks of that look.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from infra.doctor.look import Answer, Look, ask

#: How long a command of Slurm may take. `scontrol` itself tries for much longer.
SLURM_S = 8.0
_LINE = re.compile(r"^\s*(?P<name>[A-Za-z]\w*)\s*=\s*(?P<value>.*?)\s*$")
_AT = re.compile(r"Configuration data as of (\S+)")


@dataclass(frozen=True)
class SlurmSettings:
    """``values`` by name as `scontrol show config` prints them; ``at`` the controller's clock,
    seconds since 1970; ``answer`` what it said where it gave none."""

    values: Mapping[str, str]
    at: float | None
    answer: Answer

    def get(self, name: str) -> str:
        """A value; empty where it is not set."""
        value = self.values.get(name, "")
        return "" if value in ("(null)", "N/A") else value


def slurm_settings(look: Look) -> SlurmSettings:
    """The controller's settings, asked by whoever needs them first."""
    with look.one:
        if "slurm" not in look.kept:
            look.kept["slurm"] = _settings()
        settings: SlurmSettings = look.kept["slurm"]
        return settings


def _settings() -> SlurmSettings:
    answer = ask(["scontrol", "show", "config"], SLURM_S)
    found = (_LINE.match(line) for line in answer.out.splitlines())
    values = {m["name"]: m["value"] for m in found if m}
    stamp = _AT.search(answer.out)
    at = None
    if stamp is not None:
        try:
            at = datetime.fromisoformat(stamp[1]).astimezone().timestamp()
        except ValueError:
            at = None  # another version's way of writing times
    return SlurmSettings(values, at, answer)
