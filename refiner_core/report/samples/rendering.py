"""The page of all samples of a run.

In: names and a count. Out: one HTML page, which loads the samples from the folder ``samples``
beside it (:mod:`flows.reporting.run.all_samples`) as scripts, since a page opened as a file cannot
fetch. Its script draws only the rows in sight, and texts only as text nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from refiner_core.report.pages import parts_of


@dataclass(frozen=True)
class SamplesPage:
    """Content of the page: the run, its recipe, and the number of samples."""

    run: str
    recipe: str
    samples: int
    made_at: str


def page(report: SamplesPage) -> str:
    """The page."""
    parts = dict(parts_of(__package__, charts=False, script="page.js"))
    parts["policy"] += " 'self' file:"
    text: str = parts["template"].render(
        parts=parts, report=report, views=(("summary", "Samples"),), counts={}, alarming=(),
        title=f"Samples of {report.run}", reload_s=0,
    )  # fmt: skip
    return text
