"""An alert as an event on the Prefect server: ``python -m flows.nightly.event < ALERT``.

In: an alert as JSON, the server in the environment. Out: exit code 0 when the server has taken it.
Imports Prefect.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from prefect.client.orchestration import get_client
from prefect.events import Event, Resource

from flows.nightly.channels import ALERT


def event_of(alert: dict[str, Any]) -> Event:
    """What the server is told; an automation may match name, resource and its labels."""
    labels = {
        "prefect.resource.id": f"refiner.nightly.{alert['nightly']}",
        "prefect.resource.name": str(alert["nightly"]),
        **{f"refiner.{k}": str(alert[k]) for k in ("kind", "cause", "checkpoint", "metric")},
    }
    return Event(event=ALERT, resource=Resource(labels), payload=alert)


async def tell(alert: dict[str, Any]) -> None:
    """Send it, and wait for the server's word: who only emits learns of no failure."""
    async with get_client() as client:
        body = [event_of(alert).model_dump(mode="json")]
        response = await client._client.post("/events", json=body)
        response.raise_for_status()


if __name__ == "__main__":
    asyncio.run(tell(json.load(sys.stdin)))
