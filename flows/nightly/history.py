"""The history of a nightly evaluation: its rows, series and alerts, and alerts that go out.

In: a nightly evaluation and its records. Out: one :class:`Reading` for the page, the terminal and
scripts; alerts, told once for each change, by every channel. A channel that does not work never
fails a night: what it said is recorded, and is not sent again. A command finds the plain fields in
``REFINER_ALERT_TITLE``, ``_TEXT``, ``_KIND``, ``_CAUSE``, ``_NIGHT``, …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.notifying.channels import ChannelFailed, send
from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.contract.records import to_json
from refiner_core.nightly.changes import Series, Values, alert_of, series_of
from refiner_core.nightly.definition import Nightly, Row
from refiner_core.nightly.page import Reading

HISTORY_VERSION = 1


def read_history(nightly: Nightly, workspace: Workspace) -> Reading:
    """Everything that is recorded of a nightly evaluation."""
    records = NightlyRecords(workspace, nightly.name)
    rows = records.rows()

    def values_of(row: Row, metric: str) -> Values | None:
        return records.values(row.stage, row.protocol, metric)

    nights = records.nights()
    missed = {night: records.missed(night) for night in nights}
    return Reading(
        nightly=nightly,
        rows=tuple(rows),
        series=tuple(series_of(rows, values_of, nightly.alerts)),
        alerts=tuple(records.alerts()),
        missed={night: found for night, found in missed.items() if found},
        nights=tuple(nights),
    )


def history_json(reading: Reading) -> dict[str, Any]:
    """A history for scripts."""
    return {
        "version": HISTORY_VERSION,
        "nightly": reading.nightly.name,
        "rows": [to_json(row) for row in reading.rows],
        "missed": {night: dict(found) for night, found in reading.missed.items()},
        "alerts": [dict(alert) for alert in reading.alerts],
    }


CSV_COLUMNS = (
    *("night", "checkpoint", "canary", "protocol_set", "decoding", "metric", "value", "low"),
    *("high", "n", "protocol", "digest", "source", "fresh", "late", "measured_in", "stage", "run"),
)


def history_lines(reading: Reading) -> list[dict[str, Any]]:
    """One line for each number."""
    found = []
    for row in reading.rows:
        whole = to_json(row)
        for metric, number in row.numbers.items():
            line = {**whole, "metric": metric, **number}
            found.append({column: line.get(column) for column in CSV_COLUMNS})
    return found


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
