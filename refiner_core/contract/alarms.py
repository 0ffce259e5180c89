"""Ways in which somebody is told of something: of an alert of a night, of how a run has ended.

Data only; what goes out by them is made by :mod:`flows.notifying`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from refiner_core.contract.steering_config import NotifyConfig

Channel = Literal["command", "webhook", "prefect"]
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Alarm:
    """One way in which a message goes out.

    ``what`` is a shell command, or the name of the environment variable that holds the webhook's
    address (an address is often a secret, and a file is not the place for one).
    """

    channel: Channel
    what: str = ""

    @property
    def name(self) -> str:
        """In records and messages."""
        return self.channel if self.channel != "webhook" else f"webhook-{self.what}"


def alarms_of(notify: NotifyConfig) -> tuple[Alarm, ...]:
    """The channels of a recipe; none where it is quiet."""
    found = []
    if notify.command is not None:
        found.append(Alarm("command", notify.command))
    if notify.webhook is not None:
        found.append(Alarm("webhook", notify.webhook))
    if notify.prefect:
        found.append(Alarm("prefect"))
    return tuple(found)
