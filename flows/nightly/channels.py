"""An alert of a night as it goes out; by which ways is common to all that is told
(:mod:`flows.notifying.channels`).

In: an alert as JSON. Out: nothing, or ``ChannelFailed``. A command finds the plain fields in
``REFINER_ALERT_TITLE``, ``_TEXT``, ``_KIND``, ``_CAUSE``, ``_NIGHT``, ``_ID``; the event in Prefect
is ``refiner.nightly.alert`` on ``refiner.nightly.NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.notifying.channels import Parcel
from flows.notifying.channels import send as send_parcel
from refiner_core.nightly.values import Alarm

#: Name of the event in Prefect.
ALERT = "refiner.nightly.alert"
_VARIABLES = ("title", "text", "kind", "cause", "night", "id")
_LABELS = ("kind", "cause", "checkpoint", "metric")


def send(alarm: Alarm, alert: Mapping[str, Any]) -> None:
    """Send an alert by one channel.

    Raises
    ------
    ChannelFailed
        It did not get through.
    """
    send_parcel(alarm, parcel_of(alert))


def parcel_of(alert: Mapping[str, Any]) -> Parcel:
    """The alert, its fields for a command, and its event: an automation may match all labels."""
    return Parcel(
        body=alert,
        variables={f"REFINER_ALERT_{n.upper()}": str(alert.get(n, "")) for n in _VARIABLES},
        event=ALERT,
        labels={
            "prefect.resource.id": f"refiner.nightly.{alert.get('nightly', '')}",
            "prefect.resource.name": str(alert.get("nightly", "")),
            **{f"refiner.{k}": str(alert.get(k, "")) for k in _LABELS},
        },
    )
