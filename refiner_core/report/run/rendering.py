"""Report of a run as tables and sentences, as short Markdown, and as a page: one HTML file that
needs only a browser, from any disk.

In: a :class:`~refiner_core.report.run.run_report.RunReport`. Out: cells and sentences shared by
terminal, page and Markdown; GitHub's Markdown, in which texts of people and policies are escaped;
the page's text. The HTML contains everything; its script only hides, navigates and remembers
(in the address, so that a page that reloads itself keeps its place). The page makes no requests,
everything is escaped, and its size is bounded, with omissions reported.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from refiner_core.evaluation.metrics import main_metrics
from refiner_core.report import printing
from refiner_core.report.drawing import Series, chart, scale_for, strip, summary
from refiner_core.report.pages import parts_of, template_of
from refiner_core.report.printing import MISSING, Section, counted, duration, estimate, hours
from refiner_core.report.run.run_report import UNDER_WAY, Row, RunReport, StageRow
from refiner_core.report.transcripts import example_html

#: States of a stage whose last attempt ended badly.
_ENDED_BADLY = ("killed", "hung", "failed")
STAGE_HEADER = ("stage", "state", "time", "attempts", "note")


def stage_cells(row: StageRow) -> tuple[str, ...]:
    """One row of a table of stages."""
    state = f"{row.state} before" if row.skipped else row.state
    attempts = str(len(row.attempts)) if row.attempts else ""
    return row.name, state, duration(row.seconds), attempts, _note(row)


def _note(row: StageRow) -> str:
    if row.skipped:
        return f"made by {row.made_by}" if row.made_by else "existed before this run"
    parts = []
    if row.state not in ("done", "waiting") and row.total and row.step is not None:
        parts.append(f"{row.step} of {row.total}")
    if row.reason:
        parts.append(row.reason)
    if row.made_by:
        parts.append(f"made by {row.made_by}")
    if row.queue_seconds:
        parts.append(f"queued {duration(row.queue_seconds)}")
    if row.lost_seconds >= 1:
        parts.append(f"{duration(row.lost_seconds)} lost")
    return ", ".join(parts)


# ---------------------------------------------------------------- numbers


def number_tables(report: RunReport) -> Iterator[Section]:
    """Per protocol and decoding: the main metrics of all models, and the change by training."""
    for table in tables(report):
        pair, models = table["pair"], table["models"]
        change = (f"{pair[1]} minus {pair[0]}",) if pair else ()
        rows = tuple(
            (
                line["metric"],
                *(_cell(line["cells"].get(m)) for m in models),
                *(_change(line["change"]) for _ in change),
            )
            for line in table["lines"][: table["main"]]
        )
        yield Section(f"{table['name']} (95 % interval)", (), ("", *models, *change), rows)


def _cell(row: Row | None) -> str:
    return MISSING if row is None else estimate(*(row[n] for n in ("value", "low", "high")))


def _change(row: Row | None) -> str:
    if row is None:
        return MISSING
    return estimate(row["difference"], row["low"], row["high"], signed=True)


# ---------------------------------------------------------------- sentences


def cost_text(report: RunReport) -> str:
    """``5 min 24 s of work, 0.09 core-hours; 3 steps (12 s) done twice.``"""
    cost = report.cost
    if cost["seconds"] is None:
        return "No work was done."
    parts = [f"{duration(cost['seconds'])} of work"]
    if cost["gpu_hours"]:
        parts.append(f"{hours(cost['gpu_hours'])} GPU-hours")
    elif cost["cpu_hours"] is not None:
        parts.append(f"{hours(cost['cpu_hours'])} core-hours")
    if cost["money"] is not None:
        parts.append(f"about {cost['money']:,.2f} {cost['currency']}")
    if asked := cost["judge"].get("asked"):
        parts.append(f"{counted(int(asked), 'judgement')}")
    text = ", ".join(parts)
    if cost["lost_steps"] or cost["lost_seconds"] >= 1:
        steps = f"{counted(cost['lost_steps'], 'step')}, " if cost["lost_steps"] else ""
        text += f"; done again: {steps}{duration(cost['lost_seconds'])}"
    return text + "."


def without_incident(report: RunReport) -> str:
    """Words for a run without a recorded incident: a worker that dies while no orchestrator
    runs leaves none, so this does not always mean "nothing went wrong"."""
    ended = [row.name for row in report.stages if row.state in _ENDED_BADLY]
    if ended:
        return f"none is recorded yet: {', '.join(ended)} ended while no orchestrator was running"
    if report.state == "done":
        return "nothing went wrong"
    return "nothing went wrong so far"


MOST_NUMBERS = 1_000


def model_index(report: RunReport) -> dict[str, int]:
    """A model's index, which decides its colour in every view."""
    return {m: i for i, m in enumerate(dict.fromkeys(n["model"] for n in report.numbers))}


def tables(report: RunReport) -> list[dict[str, Any]]:
    """All numbers; sampled decoding first, since it shows the effect of training on a policy.

    A table has numbers measured in the same way: one protocol file and decoding. ``pair`` is before
    and after; the first ``main`` of the lines are the main metrics; ``protocols`` are the
    fingerprints of its numbers with descriptions. A line is a metric: the cells of its models, the
    drawing of all, the change by training.
    """
    index = model_index(report)
    by_way: dict[tuple[str, str], list[Row]] = {}
    for row in report.numbers[:MOST_NUMBERS]:
        by_way.setdefault((row["under"], row["decoding"]), []).append(row)
    ways = sorted(by_way, key=lambda way: way[1] != "sampled")
    return [_table(way, by_way[way], report, index) for way in ways]


def _table(
    way: tuple[str, str], rows: Sequence[Row], report: RunReport, index: Mapping[str, int]
) -> dict[str, Any]:
    under, decoding = way
    asked = f"protocol {under}" if under else f"held-out {'tasks' if report.agent else 'prompts'}"
    changes = tuple(c for c in report.changes if (c["under"], c["decoding"]) == way)
    pair = (changes[0]["before"], changes[0]["after"]) if changes else None
    by_metric: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_metric.setdefault(row["metric"], {})[row["model"]] = row
    of_pair = {c["metric"]: c for c in changes if (c["before"], c["after"]) == pair}
    main = main_metrics(r["metric"] for r in rows if not r["reference"])
    order = dict.fromkeys((*main, *by_metric))
    return {
        "name": f"{decoding} decoding, {asked}",
        "models": tuple(m for m in index if any(r["model"] == m for r in rows)),
        "pair": pair,
        "lines": [_metric_line(m, by_metric[m], of_pair.get(m), index) for m in order],
        "main": len(main),
        "protocols": tuple(dict.fromkeys((r["protocol"], r["protocol_name"]) for r in rows)),
        "changes": changes,
    }


def _metric_line(
    metric: str, cells: Mapping[str, Row], change: Row | None, index: Mapping[str, int]
) -> dict[str, Any]:
    ends = {m: [printing.finite(c[n]) for n in ("low", "high")] for m, c in cells.items()}
    widths = [high - low for low, high in ends.values() if low is not None and high is not None]
    known = {m: v for m, c in cells.items() if (v := printing.finite(c["value"])) is not None}
    widest = max((w for w in widths if w > 0), default=None)
    decimals = printing.decimals_for(widest, max(map(abs, known.values()), default=None))
    marks = {m: (i, known[m], *ends[m]) for m, i in index.items() if m in known}
    said = "; ".join(
        f"{m} {printing.with_interval(value, low, high, decimals)}"
        for m, (_, value, low, high) in marks.items()
    )
    scale = scale_for((end for _, *ends in marks.values() for end in ends), ticks=3)
    drawn = {"marks": list(marks.values()), "scale": scale, "label": f"{metric}: {said}"}
    found = {"metric": metric, "cells": cells, "decimals": decimals}
    return {**found, "drawing": drawn, "change": change}


def change_strip(change: Row) -> dict[str, Any] | None:
    """Strip of a change, with its interval, around 0."""
    scale = scale_for((0.0, change["difference"], change["low"], change["high"]), ticks=3)
    if scale is None:
        return None
    which = f"{change['metric']}, {change['after']} minus {change['before']}"
    label = f"{which}: {_change(change)}"
    ends = (change["low"], change["high"])
    return strip(scale, change["difference"], ends, verdict(change), label, zero=True)


def verdict(change: Row) -> str:
    """``better`` or ``worse`` if the interval excludes 0 and the metric has a direction; else
    ``changed`` or ``not clear``."""
    low, high = printing.finite(change["low"]), printing.finite(change["high"])
    if low is None or high is None or low <= 0 <= high:
        return "not clear"
    if change["higher_is_better"] is None:
        return "changed"
    return "better" if (change["difference"] > 0) == change["higher_is_better"] else "worse"


_MOST_INCIDENTS = 20


def markdown(report: RunReport) -> str:
    """The whole text; ends with one line feed."""
    text = template_of(__package__, "report.md.jinja").render(
        report=report,
        stage_header=STAGE_HEADER,
        stages=[stage_cells(row) for row in report.stages],
        numbers=number_tables(report),
        cost_text=cost_text(report),
        most_incidents=_MOST_INCIDENTS,
    )
    return text.rstrip() + "\n"


MOST_EXAMPLES, MOST_SAID = 40, 12


def examples_html(
    examples: Sequence[Row], pair: tuple[str, str] | None = None
) -> list[dict[str, Any]]:
    """Examples with as many answers as fit on a page. The models of a ``pair`` (before, after)
    come first, side by side."""
    shown = examples[:MOST_EXAMPLES]
    made = []
    for place, example in enumerate(shown):
        said = list(example["said"])
        if pair is not None and example["kind"] == "before and after":
            said.sort(key=lambda s: s["model"] not in pair)
        found = example_html(example["prompt"], said[:MOST_SAID], f"e{place}", len(shown))
        left_out = found["left_out"] + len(said[MOST_SAID:])
        made.append({"example": example, **found, "left_out": left_out})
    return made


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
MOST_SETTINGS = 200


def page(report: RunReport, *, reload_s: int = 0, samples: bool = False) -> str:
    """The page's text, without characters that UTF-8 cannot encode.

    Parameters
    ----------
    report
        The report.
    reload_s
        Interval at which the page of a running run reloads itself; 0: never. The page of a
        finished run does not reload.
    samples
        The page of all samples is beside it, to be linked to.
    """
    parts = parts_of(__package__, charts=bool(report.curves))
    lead = report.changes[0] if report.changes else None
    examples = examples_html(report.examples, (lead["before"], lead["after"]) if lead else None)
    text: str = parts["template"].render(
        report=report,
        samples=samples,
        parts=parts,
        views=VIEWS,
        reload_s=reload_s if report.state == "running" else 0,
        command=shlex.join(report.command),
        elapsed=_elapsed(report),
        plots=plots(report.curves),
        examples=examples,
        verdict=verdict,
        change_strip=change_strip,
        without_incident=without_incident(report),
        tables=tables(report),
        index=model_index(report),
        settings=list(report.settings.items())[:MOST_SETTINGS],
        kind_of=kind_of,
        most_curves=MOST_CURVES,
        most_numbers=MOST_NUMBERS,
    )
    return text


def _elapsed(report: RunReport) -> float | None:
    """Seconds from start to end, or to now."""
    try:
        began, ended = map(
            datetime.fromisoformat, (report.began_at, report.ended_at or report.made_at)
        )
        return (ended - began).total_seconds()
    except (ValueError, TypeError):
        return None


#: Outcomes that do not count against the stage itself.
_FROM_OUTSIDE = ("interrupted", "cancelled", "preempted", "time_limit", "node_failure")


def kind_of(attempt: Row) -> str:
    """Colour class of an attempt: ``stop`` (ended from outside), ``bad``, or none."""
    if attempt["outcome"] in ("", UNDER_WAY, "done", "none", "finished"):
        return ""
    return "stop" if attempt["outcome"] in _FROM_OUTSIDE else "bad"


# ---------------------------------------------------------------- curves


#: Beginning of the names of a monitor's metrics, and those that are part of another chart.
MONITOR = "monitor/"
_WITHIN = (f"{MONITOR}gold", f"{MONITOR}alarm")


def plots(curves: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Charts by stage, one per metric, with a summary in numbers. A monitor's proxy and gold share
    one, with the first alarm as its mark."""
    shown = curves[:MOST_CURVES]
    found: dict[str, list[dict[str, Any]]] = {}
    for curve in shown:
        if curve["metric"] in _WITHIN:
            continue
        one = Series(curve["metric"], curve["steps"], curve["values"])
        more, marks = [], curve["from_attempts"]
        if curve["metric"] == f"{MONITOR}proxy":
            same = {c["metric"]: c for c in shown if c["stage"] == curve["stage"]}
            gold, alarm = (same.get(name) for name in _WITHIN)
            more = [Series("monitor/gold", gold["steps"], gold["values"], place=2)] if gold else []
            marks = _alarms(alarm)[:1] if alarm else []
        drawn = chart([one, *more], of=len(shown), marks=marks)
        thinned = len(drawn["lines"][0]["x"]) < len(curve["steps"])
        extra = {"thinned": thinned, "with": [summary(s) for s in more], "marks": marks}
        found.setdefault(curve["stage"], []).append(
            {"of": curve, "chart": drawn, **extra, **summary(one)}
        )
    return found


def _alarms(curve: Row) -> list[int]:
    """The steps with an alarm."""
    return [step for step, value in zip(curve["steps"], curve["values"], strict=True) if value]
