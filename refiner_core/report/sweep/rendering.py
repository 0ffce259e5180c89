"""Report of a sweep as Markdown, as CSV tables, as JSON, and as a page: one HTML file that needs
only a browser, from any disk.

In: a :class:`~refiner_core.report.sweep.sweep_report.SweepReport`. Out: GitHub's Markdown for
cards, issues and pull requests; rows (for W&B) and CSV with full precision, where an empty cell is
a missing number; JSON; the page's text. Texts of people and policies are escaped: they cannot start
a table, a link, an HTML tag or a mention, nor a spreadsheet formula.

The HTML contains everything; its script only hides, sorts and remembers (in the address, so that a
page that reloads itself keeps its place). The page makes no requests: a content security policy
forbids them and allows only the page's own scripts, by hash. Large parts are bounded (answers,
prompts, curves' points, rows) with omissions reported; the JSON beside the page is complete.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from refiner_core.evaluation.metric_names import FAILURE_WORDS
from refiner_core.report import drawing, printing
from refiner_core.report.drawing import Series, chart, summary
from refiner_core.report.pages import leaf, parts_of, template_of
from refiner_core.report.people import corrected_section
from refiner_core.report.printing import Section, finite, plain
from refiner_core.report.sweep import phrases
from refiner_core.report.sweep.phrases import arm_row, column_of, comparison_notes
from refiner_core.report.sweep.sweep_report import Comparison, Row, RunsReport, SweepReport, leading
from refiner_core.report.transcripts import attempts_of, attempts_tables, example_html

#: Comparisons printed in full besides the primary one, and rows of long tables.
MOST_COMPARISONS = 8
MOST_ARMS = 40
#: Rows of a text on runs, and characters of a setting in it.
MOST_NUMBERS, _MOST_OF_VALUE = 30, 60


def markdown(report: SweepReport) -> str:
    """The whole text; ends with one line feed."""
    if isinstance(report, RunsReport):
        found = template_of(__package__, "runs.md.jinja").render(
            report=report, w=phrases, tables=runs_tables(report)
        )
        return found.rstrip() + "\n"
    compared = sorted(report.comparisons, key=lambda c: not c.primary)[: 1 + MOST_COMPARISONS]
    text = template_of(__package__, "report.md.jinja").render(
        report=report,
        w=phrases,
        compared=[(comparison, _arms(comparison, report)) for comparison in compared],
        people=_people(report),
        monitors=_monitors(report.monitors),
    )
    return text.rstrip() + "\n"


def runs_tables(report: RunsReport) -> dict[str, list[tuple[str, ...]]]:
    """Tables of a report of runs for a text, by heading; the first row of each is its header."""
    several = len(report.seeds) > 1
    runs = [
        (r["run"], r["arm"] + f", seed {r['seed']}" * several, r["recipe"], r["state"], r["label"])
        for r in report.runs
    ]
    settings = [
        (row["field"], *(leaf(row["values"][arm])[:_MOST_OF_VALUE] for arm in report.arms))
        for row in report.settings
        if row["differs"] and row["mark"] == "identity"
    ]
    decide = "What differs, and decides what is computed"
    apart = [c for c in report.comparisons if any(n.difference for n in c.numbers)]
    shown = _clear_first(apart or report.comparisons[:MOST_COMPARISONS])
    numbers = [_number_row(comparison, report) for comparison in shown]
    found = {n.verdict for c in shown for n in c.numbers}
    signs = ", ".join(f"{sign} {word}" for word, sign in phrases.SIGNS.items() if word in found)
    same = len(report.comparisons) - len(apart)
    signs += f"; {same} are the same" * bool(apart and same)
    compared = f"Numbers, and differences to the first ({signs})"
    return {
        "Runs": [("run", "arm", "recipe", "state", "note and tags"), *runs],
        **({decide: [("setting", *report.arms), *settings]} if settings else {}),
        **({compared: [("number", *report.arms), *numbers[:MOST_NUMBERS]]} if numbers else {}),
    }


def runs_lines(report: RunsReport) -> Iterator[str]:
    """A report of runs for a terminal."""
    yield f"{report.title}; baseline {report.baseline}"
    yield from (printing.folded(plain(text), "warning: ") for text in report.warnings)
    for title, rows in runs_tables(report).items():
        yield f"\n{title}"
        yield from (plain(line) for line in printing.table_lines(rows[1:], rows[0], "  "))
    yield "\n" + printing.folded(plain(phrases.answer(report)), "Answer: ")


def _clear_first(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The primary comparison, those in which an arm is better or worse, the others."""

    def order(one: Comparison) -> tuple[bool, bool]:
        return not one.primary, not any(n.verdict in ("better", "worse") for n in one.numbers)

    return sorted(comparisons, key=order)


def _number_row(comparison: Comparison, report: SweepReport) -> tuple[str, ...]:
    column, key = column_of(comparison, report), comparison.key
    rows = {n.arm: arm_row(n, column, report) for n in comparison.numbers}
    under = f", {key.protocol_name}" if key.protocol_name not in ("", "own") else ""
    cells = [f"{key.metric} of {key.model}, {key.decoding}{under}"]
    for arm in report.arms:
        row = rows.get(arm)
        parts = [printing.MISSING] if row is None else [row["value"], row["bounds"], row["sign"]]
        if row is not None and row["difference"] not in ("", printing.MISSING):
            parts[:2] = row["difference"], row["difference_bounds"]
        cells.append(" ".join(filter(None, parts)))
    return tuple(cells)


def _people(report: SweepReport) -> Section:
    return corrected_section(report.people[:MOST_ROWS], "arm", "seed")


def _monitors(rows: Sequence[Row]) -> Section:
    """Arms with a monitor: proxy and gold at one step of all, at the end, and at the best step."""

    def steps(values: Sequence[int]) -> str:
        return f"{len(values)} (step {', '.join(map(str, values))})" if values else "0"

    def pair(row: Row, when: str) -> str:
        return " / ".join(printing.number(row[f"{name}_{when}"]) for name in ("proxy", "gold"))

    at = f"at step {rows[0]['at']}" if rows and rows[0]["at"] is not None else "at an equal step"
    header = (f"proxy / gold {when}" for when in (at, "at the end", "at the best"))
    cells = (
        (
            *(row["arm"], str(row["trials"]), steps(row["alarms"]), steps(row["stopped"])),
            *(pair(row, when) for when in ("equal", "end", "best")),
        )
        for row in rows
    )
    names = ("arm", "trials", "alarms", "stopped", *header)
    return Section("Monitors", (), names, tuple(cells))


def _arms(comparison: Comparison, report: SweepReport) -> list[dict[str, Any]]:
    """One row per arm; of many arms the baseline and the most different ones."""
    column = column_of(comparison, report)
    changes = {n.arm: n.difference for n in comparison.numbers}
    kept = leading(changes, report.baseline, changes, MOST_ARMS)
    return [arm_row(n, column, report) for n in comparison.numbers if n.arm in kept]


#: Characters that start a formula in a spreadsheet.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def number_rows(report: SweepReport) -> list[dict[str, Any]]:
    """One row per arm and number, by name; each factor and each seed has a column."""
    rows = []
    for comparison in report.comparisons:
        for found in comparison.numbers:
            levels = report.arm_levels.get(found.arm, {})
            points = {point["seed"]: point["value"] for point in found.points}
            of_number = {k: v for k, v in vars(found).items() if k not in ("points", "note")}
            rows.append(
                {
                    "arm": found.arm,
                    **{f"factor_{factor}": levels.get(factor, "") for factor in report.factors},
                    "baseline": found.arm == report.baseline,
                    "primary": comparison.primary,
                    "higher_is_better": comparison.higher_is_better,
                    **vars(comparison.key),
                    **{name: _known(value) for name, value in of_number.items()},
                    **{f"seed_{seed}": _known(points.get(seed)) for seed in report.seeds},
                    "note": found.note,
                }
            )
    return rows


def trial_rows(report: SweepReport) -> list[dict[str, Any]]:
    """One row per trial, by name."""
    return [
        {k: " ".join(v) if isinstance(v, tuple) else _known(v) for k, v in trial.items()}
        for trial in report.trials
    ]


def _known(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows in the form of ``report.csv`` and ``trials.csv``."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def shown_sides(sides: Sequence[Row], first_arms: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts with as many of their answers as fit on a page; arms named first are preferred."""
    rank = {arm: i for i, arm in enumerate(first_arms)}
    shown = []
    for place, side in enumerate(sides):
        ordered = sorted(
            side["answers"],
            key=lambda a: (a["sample_index"], rank.get(a["arm"], len(rank)), a["seed"]),
        )
        found = example_html(side["prompt"], ordered, f"e{place}", len(sides))
        shown.append({"side": side, **found})
    return shown


#: Rows of arms on the page, over all comparisons.
MOST_ROWS = 600
#: Arms in the charts of curves; those visible by default, and in the columns of
#: rubrics.
MOST_LINES = 40
FEW_ARMS = 7
MOST_FLIPS = 600
VIEWS = (
    ("summary", "Summary"),
    ("arms", "Arms"),
    ("monitors", "Monitors"),
    ("curves", "Learning curves"),
    ("judges", "Judges × arms"),
    ("rubrics", "Rubrics"),
    ("flips", "Prompts that flip"),
    ("answers", "Answers side by side"),
    ("cost", "Cost and waste"),
    ("incidents", "Incidents"),
    ("protocols", "Protocols and provenance"),
)
#: Names in a report of runs, which has one more.
OF_RUNS = {
    "summary": {"summary": "Summary", "settings": "Settings"},
    "arms": {"arms": "Numbers"},
    "cost": {"cost": "Cost"},
}
#: Their names in a report of agents, which has one more.
OF_AGENTS = {
    "arms": {"arms": "Arms", "attempts": "Why attempts fail"},
    "flips": {"flips": "Tasks that flip"},
    "answers": {"answers": "Transcripts"},
}


def views_of(report: SweepReport) -> dict[str, str]:
    """The views of a report; for agents and runs without those of judges that are empty."""
    few = report.attempts or not report.sweep
    empty = {"judges": few and not report.matrix, "rubrics": few and not report.rubrics}
    empty["monitors"] = not report.monitors
    other = OF_AGENTS if report.attempts else {}
    other = other if report.sweep else {**OF_RUNS, **other}
    kept = ((view, name) for view, name in VIEWS if not empty.get(view))
    return {k: v for view, name in kept for k, v in other.get(view, {view: name}).items()}


def page(report: SweepReport, *, reload_s: int = 0) -> str:
    """The page's text, without characters that UTF-8 cannot encode.

    Parameters
    ----------
    report
        The report.
    reload_s
        Interval at which the page of a running sweep reloads itself; 0: never. The page of a
        finished sweep does not reload.
    """
    compared = shown_comparisons(report)
    columns = [column_of(c, report) for c in compared]
    # An arm's index decides its colour in every view; the baseline comes first.
    arms = sorted(report.arms, key=lambda arm: arm != report.baseline)
    index = {arm: i for i, arm in enumerate(arms)}
    few = leading_arms(report)
    prompts = shown_sides(report.side_by_side, few)
    parts = parts_of(__package__, charts=bool(report.curves), script="page.js")
    text: str = parts["template"].render(
        report=report,
        parts=parts,
        reload_s=reload_s if report.state == "running" else 0,
        views=views_of(report).items(),
        names=views_of(report),
        settings=report.settings if isinstance(report, RunsReport) else (),
        w=phrases,
        failure_words=FAILURE_WORDS,
        index=index,
        few=few,
        compared=[
            (c, column, [arm_row(n, column, report) for n in c.numbers], comparison_notes(c))
            for c, column in zip(compared, columns, strict=True)
        ],
        people=_people(report),
        not_shown=len(report.comparisons) - len(compared),
        most_lines=MOST_LINES,
        plots=plots(report, index, frozenset(index[a] for a in few)),
        matrices=matrices(report),
        rubric_scale=drawing.scale_for(
            [v for r in report.rubrics for v in r["values"].values()], ticks=3
        ),
        prompts=prompts,
        attempts=attempts_of(s["said"] for one in prompts for s in one["said"]),
        attempts_tables=attempts_tables(report.attempts, few),
        flips=report.flips[:MOST_FLIPS],
        monitors=_monitors(report.monitors),
        costs=phrases.costs(report),
        whole=phrases.cost_of("all arms", report.trials),
    )
    return text


# ---------------------------------------------------------------- selection for the page


def shown_comparisons(report: SweepReport) -> list[Comparison]:
    """The primary comparison and as many others, in their order, as fit on a page."""
    ordered = sorted(report.comparisons, key=lambda c: not c.primary)
    rows = accumulate(len(c.numbers) for c in ordered)
    return [c for c, n in zip(ordered, rows, strict=True) if n <= MOST_ROWS or c is ordered[0]]


def leading_arms(report: SweepReport, most: int = FEW_ARMS) -> list[str]:
    """The baseline and the arms that differ most from it; all if there are few."""
    changes = {n.arm: n.difference for n in report.primary.numbers} if report.primary else {}
    return leading(report.arms, report.baseline, changes, most)


def plots(
    report: SweepReport, index: Mapping[str, int], shown: frozenset[int]
) -> list[dict[str, Any]]:
    """Learning curves, a chart per metric of a stage; ``shown`` are the arms visible by
    default."""
    by_metric: dict[str, list[Series]] = {}
    arms = set(leading_arms(report, MOST_LINES))
    curves = [curve for curve in report.curves if curve["arm"] in arms]
    for c in curves:
        one = Series(c["arm"], c["steps"], c["mean"], c["low"], c["high"], index[c["arm"]])
        by_metric.setdefault(f"{c['metric']} ({c['stage']})", []).append(one)
    made = []
    for name, found in by_metric.items():
        drawn = chart(sorted(found, key=lambda one: one.place), of=len(curves))
        rows = sorted(found, key=lambda one: (one.place not in shown, one.place))
        visible = shown & {one.place for one in found} or {rows[0].place}
        made.append(
            {"name": name, "chart": drawn, "visible": visible, "rows": [summary(r) for r in rows]}
        )
    return made


def matrices(report: SweepReport) -> list[dict[str, Any]]:
    """Judges against arms, with judges as columns."""
    if not report.matrix:
        return []
    name = ", ".join(filter(None, (report.matrix[0]["metric"], report.matrix[0]["decoding"])))
    cells = [{c["arm"]: c for c in row["cells"]} for row in report.matrix]
    ranges = [_range(found.values()) for found in cells]
    return [{"name": name, "rows": report.matrix, "cells": cells, "ranges": ranges}]


def _range(cells: Iterable[Row]) -> tuple[float, float]:
    known = [v for v in (printing.finite(c["value"]) for c in cells) if v is not None]
    return (min(known), max(known)) if known else (0.0, 0.0)
