"""The trend page of a nightly evaluation, written into the workspace.

In: a reading of the history. Out: ``WORKSPACE/nightly/NAME/page.html``, one file that needs nothing
else.
"""

from __future__ import annotations

from pathlib import Path

from flows.nightly.reading import Reading
from infra.store.nightly_records import NightlyRecords
from infra.store.record_files import now_text
from refiner_core.nightly.page import Trends, trend_page


def page_text(reading: Reading) -> str:
    """The page as HTML."""
    nightly = reading.nightly
    return trend_page(
        Trends(
            name=nightly.name,
            schedule=f"{nightly.schedule} ({nightly.timezone})",
            series=reading.series,
            alerts=reading.alerts,
            missed=reading.missed,
            made_at=now_text(),
        )
    )


def write_page(reading: Reading, records: NightlyRecords) -> Path:
    """Write the page; where it lies."""
    return records.write_page(page_text(reading))
