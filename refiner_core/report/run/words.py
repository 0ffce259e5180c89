"""What the report of a run says in words: stages, main numbers, cost. Terminal and Markdown print
the same.

In: a :class:`~refiner_core.report.run.document.RunReport`. Out: cells and sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from refiner_core.evaluation.metrics import main_metrics
from refiner_core.report.printing import (
    MISSING,
    counted,
    decimals_for,
    duration,
    hours,
    with_interval,
)
from refiner_core.report.run.document import ChangeRow, NumberRow, RunReport, StageRow

#: States of a stage that say that its last attempt came to no good end.
_ENDED_BADLY = ("killed", "hung", "failed")
STAGE_HEADER = ("stage", "state", "time", "attempts", "note")


class NumberTable(NamedTuple):
    """Main numbers that were measured alike."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def stage_cells(row: StageRow) -> tuple[str, ...]:
    """One row of a table of stages."""
    state = f"{row.state} before" if row.skipped else row.state
    attempts = str(len(row.attempts)) if row.attempts else ""
    return row.name, state, duration(row.seconds), attempts, _note(row)


def _note(row: StageRow) -> str:
    if row.skipped:
        return f"made by {row.made_by}" if row.made_by else "there before this run began"
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


def number_tables(report: RunReport) -> Iterator[NumberTable]:
    """Per protocol and decoding: the main numbers of all models, and what training changed."""
    for under, decoding in dict.fromkeys((n.under, n.decoding) for n in report.numbers):
        here = [n for n in report.numbers if (n.under, n.decoding) == (under, decoding)]
        changes = [c for c in report.changes if (c.under, c.decoding) == (under, decoding)]
        yield _table(way_text(report, under, decoding), here, changes)


def way_text(report: RunReport, under: str, decoding: str) -> str:
    """``sampled decoding, held-out prompts``; ``greedy decoding, protocol strict``."""
    asked = "held-out tasks" if report.agent else "held-out prompts"
    return f"{decoding} decoding, {f'protocol {under}' if under else asked}"


def _table(title: str, numbers: Sequence[NumberRow], changes: Sequence[ChangeRow]) -> NumberTable:
    models = list(dict.fromkeys(n.model for n in numbers))
    values = {(n.model, n.metric): n for n in numbers}
    pair = next(((c.before, c.after) for c in changes), None)
    changed = {c.metric: c for c in changes if (c.before, c.after) == pair}
    header = ("", *models, *([f"{pair[1]} minus {pair[0]}"] if pair else []))
    rows = []
    for metric in main_metrics(n.metric for n in numbers if not n.reference):
        cells = [_number(values.get((model, metric))) for model in models]
        rows.append((metric, *cells, *([_change(changed.get(metric))] if pair else [])))
    return NumberTable(f"{title} (95 % interval)", header, rows)


def change_tables(report: RunReport) -> list[NumberTable]:
    """The same, narrow: before, after and what that changed; where nothing is paired, the models
    as they are. Sampled decoding first, for there a policy shows what training did to it."""
    found = []
    for table in number_tables(report):
        if " minus " in table.header[-1]:
            after, _, before = table.header[-1].partition(" minus ")
            places = [0, table.header.index(before), table.header.index(after), -1]
            header = tuple(table.header[i] for i in places)
            table = NumberTable(
                table.title, header, [tuple(row[i] for i in places) for row in table.rows]
            )
        found.append(table)
    return sorted(found, key=lambda t: not t.title.startswith("sampled"))


def _number(row: NumberRow | None) -> str:
    if row is None:
        return MISSING
    width = None if row.low is None or row.high is None else row.high - row.low
    return with_interval(row.value, row.low, row.high, decimals_for(width, row.value))


def _change(row: ChangeRow | None) -> str:
    if row is None:
        return MISSING
    width = None if row.low is None or row.high is None else row.high - row.low
    decimals = decimals_for(width, row.difference)
    return with_interval(row.difference, row.low, row.high, decimals, signed=True)


# ---------------------------------------------------------------- sentences


def cost_text(report: RunReport) -> str:
    """``5 min 24 s of work, 0.09 core-hours; 3 steps (12 s) done twice.``"""
    cost = report.cost
    if cost.seconds is None:
        return "Nothing has been worked on."
    parts = [f"{duration(cost.seconds)} of work"]
    if cost.gpu_hours:
        parts.append(f"{hours(cost.gpu_hours)} GPU-hours")
    elif cost.cpu_hours is not None:
        parts.append(f"{hours(cost.cpu_hours)} core-hours")
    if cost.money is not None:
        parts.append(f"about {cost.money:,.2f} {cost.currency}")
    if asked := cost.judge.get("asked"):
        parts.append(f"{counted(int(asked), 'judgement')}")
    text = ", ".join(parts)
    if cost.lost_steps or cost.lost_seconds >= 1:
        steps = f"{counted(cost.lost_steps, 'step')}, " if cost.lost_steps else ""
        text += f"; done again: {steps}{duration(cost.lost_seconds)}"
    return text + "."


def incidents_text(report: RunReport) -> str:
    """``2 incidents, all resolved``; empty where nothing went wrong."""
    if not report.incidents:
        return ""
    still = sum(not incident.resolved for incident in report.incidents)
    count = counted(len(report.incidents), "incident")
    return f"{count}, {still} open" if still else f"{count}, all resolved"


def without_incident(report: RunReport) -> str:
    """What can be said where no incident is recorded: a worker that dies while no orchestrator
    lives leaves none, and that is not "nothing went wrong"."""
    ended = [row.name for row in report.stages if row.state in _ENDED_BADLY]
    if ended:
        return f"none is recorded yet: {', '.join(ended)} ended while nobody was there to note it"
    if report.state == "done":
        return "nothing went wrong"
    return "nothing went wrong so far"
