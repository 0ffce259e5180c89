"""What a history says now: its rows, its series, its alerts.

In: a nightly evaluation and its records. Out: one :class:`Reading` for the page, the terminal,
scripts and alerts. Reads, writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.store.nightly_records import NightlyRecords
from infra.store.workspace import Workspace
from refiner_core.contract.records import to_json
from refiner_core.nightly.compare import Values
from refiner_core.nightly.series import Series, series_of
from refiner_core.nightly.values import Nightly, Row

HISTORY_VERSION = 1


@dataclass(frozen=True)
class Reading:
    """A history as it stands.

    ``missed`` maps nights to checkpoints without a number and why.
    """

    nightly: Nightly
    rows: tuple[Row, ...]
    series: tuple[Series, ...]
    alerts: tuple[Mapping[str, Any], ...]
    missed: Mapping[str, Mapping[str, str]]
    nights: tuple[str, ...]


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
