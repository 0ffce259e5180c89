"""The page over all runs.

In: rows of runs, sweeps and nights as plain values. Out: one HTML page. The rows are data in the
page; its script filters, sorts and draws only the rows in sight, so that ten thousand runs paint at
once. A live page asks its own server for new rows and curves; one written as a file asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.report.pages import parts_of, template_of

VIEWS = (("summary", "Runs"), ("others", "Sweeps and nights"))


@dataclass(frozen=True)
class RunsPage:
    """Content of the page.

    Attributes
    ----------
    workspace, made_at
        The folder, and the time of reading.
    rows
        One mapping per run: ``run``, ``recipe``, ``started``, ``state``, ``changes``, ``metrics``
        (name -> value, low, high), ``cost``, ``note``, ``tags``, ``sweep``, ``link``, ``samples``.
    others
        Sweeps and nights: ``kind``, ``name``, ``state``, ``link``.
    metrics
        Names of metrics, the one shown first before the others.
    live
        Whether the page has a server.
    prefect
        Address of the Prefect page; empty if there is none.
    """

    workspace: str
    made_at: str
    rows: Sequence[Mapping[str, Any]]
    others: Sequence[Mapping[str, Any]]
    metrics: Sequence[str]
    live: bool
    prefect: str = ""


def page(report: RunsPage) -> str:
    """The page."""
    parts = dict(parts_of(__package__, charts=True, script="page.js"))
    if report.live:
        parts["policy"] += "; connect-src 'self'"
    data = {"rows": report.rows, "live": report.live, "where": f"workspace={report.workspace}"}
    counts = {"summary": len(report.rows), "others": len(report.others)}
    return template_of(__package__, "page.html.jinja").render(
        parts=parts, report=report, data=data, views=VIEWS, counts=counts, alarming=(),
        title=f"Runs of {report.workspace}", reload_s=0,
    )  # fmt: skip
