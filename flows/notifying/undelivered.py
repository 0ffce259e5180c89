"""What has not gone out: messages of a run or sweep that a channel has not taken yet.

In: a workspace and a call. Out: values and lines for `refiner status`. Reads only.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from infra.store.layout import call_title
from infra.store.notices import Notices
from infra.store.workspace import Workspace


@dataclass(frozen=True)
class Undelivered:
    """One message that one channel has not taken; ``why`` by the last try, empty before it."""

    at: str
    kind: str
    title: str
    channel: str
    why: str


def undelivered(workspace: Workspace, call: str) -> list[Undelivered]:
    """All of them, oldest first."""
    notices = Notices(workspace.layout, workspace.layout.run(call).notices)
    found = []
    for message in notices.all():
        if message.get("quiet"):
            continue
        key, failures = message["id"], notices.failures(message["id"])
        found += [
            Undelivered(message["at"], message["kind"], message["title"], c, failures.get(c, ""))
            for c in message.get("channels", ())
            if not notices.delivered(key, c)
        ]
    return found


def undelivered_lines(workspace: Workspace, call: str) -> Iterator[str]:
    """For people: by channel, with what mends it."""
    found = undelivered(workspace, call)
    name = call_title(call).partition(" ")[2]
    resume = shlex.join(["refiner", "resume", name, f"workspace={workspace.root}"])
    for channel in dict.fromkeys(u.channel for u in found):
        of_it = [u for u in found if u.channel == channel]
        why = f": {of_it[-1].why}" if of_it[-1].why else ""
        kinds = ", ".join(u.kind for u in of_it)
        yield (
            f"not told by {channel}: {kinds}{why} (`refiner notify test` tries the channel; "
            f"what is left goes out with `{resume}`)"
        )
