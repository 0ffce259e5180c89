"""The user's own device: what it does, and what its lamp shows. No tool of the agent reaches it.

In: the :class:`~.domain.Desk`, whose ``device`` holds ``id``, ``cable``, ``wireless``, ``fresh``
(restarted since the last change at the desk) and ``broken``.
Out: the lamp, what a message asks to do, and doing it.

======== ==================================================== ===========================
lamp     when (the first that holds)                          what helps
======== ==================================================== ===========================
dark     the cable is out                                     plug the cable
blue     wireless is off                                      turn wireless on
red      broken, locked at the desk, or not restarted since   the desk, then a restart
green    otherwise: it works                                  nothing is wrong
======== ==================================================== ===========================
"""

from __future__ import annotations

from collections.abc import Sequence

from refiner_core.environments.desk.domain import Desk

WORKING = "green"
#: What an agent can ask for, by the word that it is recognised by.
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "cable": ("cable",),
    "wireless": ("wireless", "wifi"),
    "restart": ("restart", "reboot"),
}


def lamp(desk: Desk) -> str:
    """The colour that the user sees."""
    device = desk.device
    if device["cable"] == "out":
        return "dark"
    if device["wireless"] == "off":
        return "blue"
    well = device["broken"] == "no" and device["fresh"] == "yes" and _state(desk) == "active"
    return WORKING if well else "red"


def _state(desk: Desk) -> str:
    return str(desk.tables["devices"][desk.device["id"]]["state"])


def instructions(heard: Sequence[str]) -> list[str]:
    """What a message asks the user to do."""
    return [name for name, known in INSTRUCTIONS.items() if any(word in heard for word in known)]


def do(desk: Desk, doing: str) -> bool:
    """The user does it; whether that is something new."""
    device, new = desk.device, doing not in desk.doings
    before = dict(device)
    if doing == "cable":
        device["cable"] = "in"
    elif doing == "wireless" and device["cable"] == "in":
        device["wireless"] = "on"
    elif doing == "restart" and device["cable"] == "in" and _state(desk) == "active":
        device["fresh"] = "yes"
    desk.doings.append(doing)
    return new or device != before
