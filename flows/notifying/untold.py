"""What was not told: messages of a run or sweep that a channel did not take.

In: a workspace and a call. Out: events of its log, and lines for `refiner status`. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flows.notifying.sender import NOT_TOLD
from infra.orchestrator.history import run_events
from infra.store.workspace import Workspace


def not_told(workspace: Workspace, call: str) -> list[dict[str, Any]]:
    """When, of which kind, its title, by which channel, and why not; oldest first."""
    keys = ("at", "kind", "title", "channel", "why")
    events = (e for e in run_events(workspace, call) if e.get("event") == NOT_TOLD)
    return [{key: str(event.get(key, "")) for key in keys} for event in events]


def not_told_lines(workspace: Workspace, call: str) -> Iterator[str]:
    """For people: by channel, with what finds out why."""
    found = not_told(workspace, call)
    for channel in dict.fromkeys(event["channel"] for event in found):
        of_it = [event for event in found if event["channel"] == channel]
        kinds = ", ".join(event["kind"] for event in of_it)
        yield (
            f"not told by {channel}: {kinds}: {of_it[-1]['why']} (`refiner notify test` tries the "
            "channel)"
        )
