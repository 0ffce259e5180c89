"""An event on the Prefect server: ``python -m flows.notifying.event < EVENT``.

In: ``event``, ``labels`` and ``payload`` as JSON, the server in the environment. Out: exit code 0
when the server has taken it. Imports Prefect.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from prefect.client.orchestration import get_client
from prefect.events import Event, Resource


def event_of(told: dict[str, Any]) -> Event:
    """What the server is told; an automation may match name, resource and its labels."""
    return Event(
        event=told["event"], resource=Resource(told["labels"]), payload=dict(told["payload"])
    )


async def tell(told: dict[str, Any]) -> None:
    """Send it, and wait for the server's word: who only emits learns of no failure."""
    async with get_client() as client:
        body = [event_of(told).model_dump(mode="json")]
        response = await client._client.post("/events", json=body)
        response.raise_for_status()


if __name__ == "__main__":
    asyncio.run(tell(json.load(sys.stdin)))
