"""Means corrected by people's labels, as a table.

In: entries of ``people.json``: metrics of an evaluation with ``judged``, the judge's own mean. Out:
a section that the command, the Markdown and the page of a sweep share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.evaluation.metric_names import base_of
from refiner_core.report.printing import Section, number, with_interval


def corrected_section(rows: Sequence[Mapping[str, Any]], *extra: str) -> Section:
    """Corrected means beside the judge's; ``extra`` are keys of further first columns."""
    cells = tuple(
        (
            *(str(row[name]) for name in (*extra, "stage")),
            ", ".join(filter(None, (row["decoding"], row.get("under")))),
            base_of(row["metric"]),
            shown(row["judged"]),
            shown(row),
            str(row["n"]),
        )
        for row in rows
    )
    words = (
        "What people would give to all answers, by prediction-powered inference from the labelled "
        "ones, beside what the judge gave. Intervals (95 %) are over prompts.",
    )
    header = (*extra, "model", "decoding", "metric", "by the judge", "by people", "labelled")
    return Section("Means corrected by people's labels", words, header, cells)


def shown(found: Mapping[str, Any] | None, decimals: int = 3) -> str:
    """A recorded number with its interval."""
    if found is None or found["value"] is None:
        return number(None)
    return with_interval(found["value"], found["low"], found["high"], decimals)
