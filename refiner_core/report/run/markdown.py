"""A run's report as short Markdown: for a note, a pull request, a message.

In: a :class:`~refiner_core.report.run.document.RunReport`. Out: GitHub's Markdown: stages with
times, main numbers before and after, what went wrong, what it took, what comes next. Texts of
people and of policies are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from refiner_core.report.printing import counted, moment
from refiner_core.report.run import words
from refiner_core.report.run.document import RunReport
from refiner_core.report.sweep.markdown import escaped

_MOST_INCIDENTS = 20


def markdown(report: RunReport) -> str:
    """The whole text; ends with one line feed."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: RunReport) -> Iterator[str]:
    yield f"# {escaped(report.run)}"
    yield ""
    began = moment(report.began_at)
    yield (
        f"Recipe {escaped(report.recipe)}, begun {began}, {report.state} as of "
        f"{moment(report.made_at)}. {escaped(report.state_text)}"
    )
    yield ""
    if report.warnings:
        yield "**Before you read on**"
        yield ""
        yield from (f"- {escaped(text)}" for text in report.warnings)
        yield ""
    yield "## Stages"
    yield ""
    yield from _table(words.STAGE_HEADER, [words.stage_cells(row) for row in report.stages])
    for title, header, rows in words.number_tables(report):
        yield f"## {escaped(title)}"
        yield ""
        yield from _table(header, rows)
    yield from _incidents(report)
    yield "## What it took"
    yield ""
    yield escaped(words.cost_text(report))
    yield ""
    if report.published:
        yield "## Published"
        yield ""
        for one in report.published:
            step = "" if one.step is None else f" (step {one.step})"
            yield f"- {escaped(one.target)}{step}"
        yield ""
    if report.next_commands:
        yield "## Next"
        yield ""
        yield "```bash"
        yield from report.next_commands
        yield "```"


def _incidents(report: RunReport) -> Iterator[str]:
    if not report.incidents:
        return
    yield f"## {counted(len(report.incidents), 'incident').capitalize()}"
    yield ""
    for incident in report.incidents[-_MOST_INCIDENTS:]:
        over = "" if incident.resolved else " (open)"
        yield f"- {moment(incident.at)} {escaped(incident.stage)}: {escaped(incident.text)}{over}"
    yield ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(escaped(cell) for cell in header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"
    yield ""
