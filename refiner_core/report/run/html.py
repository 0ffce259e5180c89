"""The page of a run: one HTML file that needs nothing but a browser, from any disk.

In: a :class:`~refiner_core.report.run.document.RunReport`. Out: the page's text. All that is shown
is in the HTML; its script only hides, leads and remembers (in the address, so that a page that
loads itself again stays where it was). No request ever leaves it, everything is escaped, and what
would make it too large to open is bounded: what is left out is said.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.report import drawing, printing
from refiner_core.report.pages import parts_of
from refiner_core.report.run import tables as words
from refiner_core.report.run.document import Example, MetricCurve, RunReport, Said
from refiner_core.report.transcripts import (
    MOST_IN_ALL,
    MOST_JUDGEMENTS,
    MOST_OF_PROMPT,
    Evidence,
    answer_markup,
    conversation,
    evidence_of,
    within,
)

MOST_EXAMPLES, MOST_SAID, MOST_PARTS = 60, 12, 40


def shown_examples(
    examples: Sequence[Example], pair: tuple[str, str] | None = None
) -> list[dict[str, Any]]:
    """Examples with as many answers as a page can hold: each has an equal share of the room. The
    models of a ``pair`` (before, after) stand side by side, in front of the others."""
    shown = examples[:MOST_EXAMPLES]
    share = MOST_IN_ALL // max(1, len(shown))
    made = []
    for place, example in enumerate(shown):
        said = list(example.said)
        if pair is not None and example.kind == "before and after":
            said.sort(key=lambda s: s.model not in pair)
        kept = within(said[:MOST_SAID], share - min(len(example.prompt), MOST_OF_PROMPT))
        evidence = evidence_of(example.prompt, (s.text for s in kept), f"e{place}")
        made.append(
            {
                "example": example,
                "evidence": evidence.markup,
                "said": [_shown(one, evidence) for one in kept],
                "left_out": len(said) - len(kept),
            }
        )
    return made


def _shown(said: Said, evidence: Evidence) -> dict[str, Any]:
    """An answer or an attempt as it is shown."""
    kept = said.judgements[:MOST_JUDGEMENTS]
    claims: dict[Any, dict[str, Any]] = {}
    rubrics: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for one in kept:
        kind = str(one.get("kind") or "")
        if kind.startswith("citation"):
            place = one.get("claim_index")
            found = claims.setdefault(place, {"place": place, "claim": one.get("claim"), "on": []})
            found["on"].append((kind.removeprefix("citation_"), one))
        else:
            (rubrics if kind in ("rubric", "") else others).append(one)
    counted, measured = drawing.shares(said.parts[:MOST_PARTS])
    return {
        "said": said,
        "text": answer_markup(said.text, evidence),
        "conversation": conversation(said.episode) if said.episode is not None else None,
        "shares": counted,
        "measured": measured,
        "rubrics": rubrics,
        "claims": list(claims.values()),
        "others": others,
        "judgements_left_out": len(said.judgements) - len(kept),
    }


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
        w=words,
        tables=words.tables(report),
        index=words.model_index(report),
        settings=list(report.settings.items())[:MOST_SETTINGS],
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
    found: dict[str, list[dict[str, Any]]] = {}
    for curve in shown:
        line = drawing.line_of(curve, name=curve.metric, curves=len(shown))
        found.setdefault(curve.stage, []).append(
            {
                "of": curve,
                "plot": drawing.plot_of_run(curve, line),
                "known": line.known,
                "missing": sum(printing.finite(v) is None for v in curve.values),
                "thinned": len(line.points) < len(curve.values),
            }
        )
    return found
