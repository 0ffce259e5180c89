"""What ranks and their agents tell the worker besides what they print.

In: an event, as one marked line among all that a process prints. Out: the event again. The mark is
a random word of each launch, so that no output is taken for an event. Ranks have nothing else that
reaches the worker from every node, in order, and with a full disk.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from infra.ranks.errors import encode

#: Setting of agents and ranks: the mark.
MARK = "REFINER_RANKS_MARK"
#: Lines are cut by who reads them (:mod:`infra.foreign.process`): an event is shorter.
_LIMIT = 60_000


def event_line(mark: str, value: dict[str, Any]) -> str:
    """The line that carries an event."""
    text = json.dumps(value)
    if len(text) > _LIMIT:
        text = json.dumps(_without_length(value))
    return f"{mark} {text}"


def read_event(mark: str, line: str) -> dict[str, Any] | None:
    """The event that a line carries; None for any other line."""
    if not line.startswith(f"{mark} "):
        return None
    try:
        value = json.loads(line.removeprefix(f"{mark} "))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def tell(value: dict[str, Any]) -> None:
    """Tell the worker. Where nobody listens, nothing happens."""
    if mark := os.environ.get(MARK):
        sys.stdout.flush()
        sys.stderr.flush()
        # One write: other threads print, too.
        os.write(1, f"\n{event_line(mark, value)}\n".encode())


def tell_error(rank: int, error: BaseException) -> None:
    """Tell why this rank ends."""
    tell({"event": "error", "rank": rank, "error": encode(error)})


def _without_length(value: dict[str, Any]) -> dict[str, Any]:
    """The same error in fewer words: without its causes, its traceback cut."""
    error = {k: v for k, v in value.get("error", {}).items() if k != "cause"}
    error["text"], error["traceback"] = error["text"][:4000], error["traceback"][-12_000:]
    error.pop("parts", None) if len(json.dumps(error)) > _LIMIT else None
    return {**value, "error": error}
