"""The page of a run: one HTML file that needs nothing but a browser, from any disk.

In: a :class:`~refiner_core.report.run.document.RunReport`. Out: the page's text. All that is shown
is in the HTML; its script only hides, leads and remembers (in the address, so that a page that
loads itself again stays where it was). No request ever leaves it, everything is escaped, and what
would make it too large to open is bounded: what is left out is said.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from refiner_core.report import printing
from refiner_core.report.drawing import dot
from refiner_core.report.pages import leaf, parts_of, tree
from refiner_core.report.run import drawing, words
from refiner_core.report.run.document import MetricCurve, RunReport
from refiner_core.report.run.examples import shown_examples
from refiner_core.report.run.numbers import model_index, tables

VIEWS = (
    ("summary", "Summary"),
    ("stages", "Stages"),
    ("curves", "Curves"),
    ("examples", "Examples"),
    ("numbers", "Numbers"),
    ("incidents", "Incidents"),
    ("cost", "Disk and cost"),
    ("settings", "Settings and provenance"),
)
MOST_CURVES = 120
#: Points of all curves, and of one.
MOST_POINTS, MOST_OF_CURVE = 30_000, 600
MOST_INCIDENTS, MOST_ATTEMPTS, MOST_SETTINGS, MOST_WARNINGS = 400, 100, 500, 50
#: Incidents and numbers of the summary.
FEW_INCIDENTS, FEW_NUMBERS = 5, 10


def page(report: RunReport, *, reload_s: int = 0) -> str:
    """The page's text, free of what UTF-8 cannot hold.

    Parameters
    ----------
    report
        What is shown.
    reload_s
        Seconds after which the page of a run that goes on loads itself again; 0: never. A run that
        is over has a page that stays.
    """
    parts = parts_of(__package__)
    lead = report.changes[0] if report.changes else None
    examples = shown_examples(report.examples, (lead.before, lead.after) if lead else None)
    return parts.template.render(
        report=report,
        parts=parts,
        views=VIEWS,
        reload_s=reload_s if report.state == "running" else 0,
        command=shlex.join(report.command),
        timeline=drawing.timeline(report.stages, report.began_at, report.made_at),
        plots=plots(report.curves),
        examples=examples,
        kinds=list(dict.fromkeys(e.example.kind for e in examples)),
        whys=list(dict.fromkeys(e.example.why for e in examples if e.example.why)),
        tables=tables(report),
        without_incident=words.without_incident(report),
        index=model_index(report),
        settings=[(leaf(k), tree(v)) for k, v in list(report.settings.items())[:MOST_SETTINGS]],
        dot=dot,
        bytes_text=bytes_text,
        kind_of=drawing.kind_of,
        most={
            "incidents": MOST_INCIDENTS,
            "attempts": MOST_ATTEMPTS,
            "numbers": FEW_NUMBERS,
            "few_incidents": FEW_INCIDENTS,
            "curves": MOST_CURVES,
            "warnings": MOST_WARNINGS,
        },
    )


# ---------------------------------------------------------------- curves


def plots(curves: Sequence[MetricCurve]) -> dict[str, list[dict[str, Any]]]:
    """Drawings by stage."""
    shown = curves[:MOST_CURVES]
    each = min(MOST_OF_CURVE, MOST_POINTS // max(1, len(shown)))
    found: dict[str, list[dict[str, Any]]] = {}
    for curve in shown:
        known = [i for i, v in enumerate(curve.values) if printing.finite(v) is not None]
        found.setdefault(curve.stage, []).append(
            {
                "metric": curve.metric,
                "svg": drawing.curve(curve, each),
                "first": _point(curve, known[0]) if known else None,
                "last": _point(curve, known[-1]) if known else None,
                "missing": len(curve.values) - len(known),
                "thinned": len(curve.steps) > each,
                "from_attempts": curve.from_attempts,
            }
        )
    return found


def _point(curve: MetricCurve, at: int) -> tuple[int, str]:
    return curve.steps[at], f"{curve.values[at]:.4g}".replace("-", printing.MINUS)


# ---------------------------------------------------------------- small things


def bytes_text(size: int | None) -> str:
    """``12.3 MB``: by thousands."""
    if size is None:
        return printing.MISSING
    for unit, above in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= above:
            return f"{size / above:.3g} {unit}"
    return f"{size} B"
