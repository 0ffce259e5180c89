"""Alerts: told once for each change, by every channel.

In: a history. Out: alerts recorded and sent. A channel that does not work never fails a night: what
it said is recorded, and is not sent again. A command finds the plain fields in
``REFINER_ALERT_TITLE``, ``_TEXT``, ``_KIND``, ``_CAUSE``, ``_NIGHT``, …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.nightly.reading import Reading
from flows.notifying.channels import ChannelFailed, send
from infra.store.nightly_records import NightlyRecords
from refiner_core.nightly.series import Series
from refiner_core.nightly.values import Nightly
from refiner_core.nightly.words import alert_of


def raise_alerts(reading: Reading, records: NightlyRecords) -> list[dict[str, Any]]:
    """Record what is new; those alerts.

    A line that comes late may move by a night when a change was sure: that is no other change.
    """
    known = list(records.alerts())
    raised = []
    for series in reading.series:
        for change in series.told:
            beside = _beside(series, change.nights[0], reading) if series.canary else []
            alert = alert_of(reading.nightly.name, series, change, beside)
            if any(_same(alert, other) for other in known):
                continue
            if records.raise_alert(change.id_in(series.key.text), alert):
                raised.append({**alert, "id": change.id_in(series.key.text)})
                known.append(alert)
    return raised


def deliver(
    nightly: Nightly, alerts: Sequence[Mapping[str, Any]], records: NightlyRecords
) -> dict[str, str]:
    """Send new alerts; ``ID by CHANNEL`` -> why it was not told."""
    failed: dict[str, str] = {}
    for alert in alerts:
        whys = {}
        for alarm in nightly.alerts.alarms:
            try:
                send(alarm, alert, prefix="REFINER_ALERT_")
            except ChannelFailed as error:
                whys[alarm.name] = str(error)
        if whys:
            records.note_not_told(alert["id"], whys)
        failed |= {f"{alert['id']} by {channel}": why for channel, why in whys.items()}
    return failed


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("series", "kind", "direction")
    return all(one[k] == other[k] for k in keys) and bool({*one["nights"]} & {*other["nights"]})


def _beside(canary: Series, since: str, reading: Reading) -> Sequence[str]:
    """Checkpoints that were measured since, under the same protocol."""
    names = [
        row.checkpoint
        for series in reading.series
        if series.key[1:] == canary.key[1:] and not series.canary
        for row in series.rows
        if row.measured_in >= since
    ]
    return list(dict.fromkeys(names))
