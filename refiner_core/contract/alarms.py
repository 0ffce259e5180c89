"""Ways in which somebody is told of something: of an alert of a night, of how a run has ended.

Data only; what goes out by them is made by :mod:`flows.notifying`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from refiner_core.contract.steering_config import NotifyConfig

Channel = Literal["command", "url"]
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def is_place(name: str) -> bool:
    """Whether this names a variable or, from the root or home, a file: addresses are often secrets,
    and stand in no recipe."""
    return bool(VARIABLE.fullmatch(name)) or (name.startswith(("/", "~/")) and "://" not in name)


@dataclass(frozen=True)
class Alarm:
    """One way in which a message goes out.

    ``what`` is a shell command, or the name of the environment variable or the path of the file
    that holds addresses.
    """

    channel: Channel
    what: str

    @property
    def name(self) -> str:
        """In records and messages."""
        return self.channel if self.channel == "command" else self.what


def alarms_of(notify: NotifyConfig) -> tuple[Alarm, ...]:
    """The channels of a recipe; none where it is quiet."""
    command = [Alarm("command", notify.command)] if notify.command is not None else []
    names = [*notify.urls, *([notify.webhook] if notify.webhook is not None else [])]
    return (*command, *(Alarm("url", name) for name in dict.fromkeys(names)))
