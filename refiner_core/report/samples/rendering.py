"""The page of all samples of a run.

In: names and a count. Out: one HTML page, which loads the samples from the folder ``samples``
beside it (:mod:`flows.reporting.run.all_samples`) as scripts, since a page opened as a file cannot
fetch. Its script draws only the rows in sight, and texts only as text nodes.
"""

from __future__ import annotations

from refiner_core.report.pages import parts_of


def page(run: str, recipe: str, samples: int, made_at: str) -> str:
    """The page of a run with so many samples."""
    parts = dict(parts_of(__package__, charts=False, script="page.js"))
    parts["policy"] += " 'self' file:"
    report = {"run": run, "recipe": recipe, "samples": samples, "made_at": made_at}
    text: str = parts["template"].render(
        parts=parts, report=report, views=(("summary", "Samples"),), counts={}, alarming=(),
        title=f"Samples of {run}", reload_s=0,
    )  # fmt: skip
    return text
