"""The page over all runs.

In: rows of runs, sweeps and nights as plain values. Out: one HTML page. The rows are data in the
page; its script filters, sorts and draws only the rows in sight, so that ten thousand runs paint at
once. A live page asks its own server for new rows and curves; one written as a file asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.report.pages import parts_of, template_of

VIEWS = (("summary", "Runs"), ("others", "Sweeps and nights"))


def page(
    workspace: str,
    made_at: str,
    rows: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    metrics: Sequence[str],
    *,
    live: bool,
    prefect: str = "",
) -> str:
    """The page.

    Parameters
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
    parts = dict(parts_of(__package__, charts=True, script="page.js"))
    if live:
        parts["policy"] += "; connect-src 'self'"
    return template_of(__package__, "page.html.jinja").render(
        parts=parts,
        report={
            **{"workspace": workspace, "made_at": made_at, "live": live, "prefect": prefect},
            **{"rows": rows, "others": others, "metrics": metrics},
        },
        data={"rows": rows, "live": live, "where": f"workspace={workspace}"},
        views=VIEWS,
        counts={"summary": len(rows), "others": len(others)},
        alarming=(),
        title=f"Runs of {workspace}",
        reload_s=0,
    )
