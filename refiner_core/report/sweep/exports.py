"""A sweep's report as Markdown, as CSV tables and as JSON.

In: a :class:`~refiner_core.report.sweep.document.SweepReport`. Out: GitHub's Markdown for cards,
issues and pull requests; rows (for W&B) and CSV, in which numbers are written in full and an empty
cell is a number that is not there; JSON. Texts of people and of policies are escaped: they cannot
open a table, a link, an HTML tag or call anybody by name, nor be a formula of a spreadsheet.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from refiner_core.contract.records import to_json
from refiner_core.report.printing import (
    MISSING,
    count,
    counted,
    duration,
    finite,
    hours,
    moment,
    number,
    plain,
)
from refiner_core.report.sweep import wording as words
from refiner_core.report.sweep.document import Comparison, SweepReport, TrialRow
from refiner_core.report.sweep.wording import ArmRow, Column, arm_row, comparison_notes
from refiner_core.report.transcripts import attempts_tables

#: Comparisons besides the primary one that are printed in full, and rows of long tables.
MOST_COMPARISONS = 8
MOST_ARMS = 40
MOST_INCIDENTS = 20
MOST_FLIPS = 10
#: What Markdown obeys: brackets only where a link follows, an underscore only at a word's edge.
_SPECIAL = re.compile(r"([\\`*|~#]|\[(?=[^\]]*\][(\[])|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")


def markdown(report: SweepReport) -> str:
    """The whole text; ends with one line feed."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: SweepReport) -> Iterator[str]:
    yield f"# {escaped(report.title or report.sweep)}"
    yield ""
    yield (
        f"Sweep `{_code(report.sweep)}` of recipe `{_code(report.recipe)}`, {report.state}, as of "
        f"{moment(report.made_at)}. {words.state_text(report)}"
    )
    yield ""
    if report.warnings:
        yield "**Before you read on**"
        yield ""
        yield from (f"- {escaped(text)}" for text in report.warnings)
        yield ""
    if report.question:
        yield f"**Question.** {escaped(report.question)}"
        yield ""
    yield f"**Answer.** {escaped(words.answer(report))}"
    yield ""
    yield from _comparisons(report)
    yield from _attempts(report)
    yield from _flips(report)
    yield from _cost(report)
    yield from _incidents(report)
    yield from _protocols(report)


def _comparisons(report: SweepReport) -> Iterator[str]:
    ordered = sorted(report.comparisons, key=lambda c: not c.primary)
    for comparison in ordered[: 1 + MOST_COMPARISONS]:
        yield f"## {escaped(words.key_text(comparison.key))}"
        yield ""
        yield from arms_table(comparison, report)
        yield ""
        yield from (f"- {escaped(text)}" for text in comparison_notes(comparison))
        yield ""
    if (more := len(ordered) - 1 - MOST_COMPARISONS) > 0:
        yield f"{counted(more, 'comparison')} more: `report.csv`, `report.html`."
        yield ""


def arms_table(comparison: Comparison, report: SweepReport) -> Iterator[str]:
    """One row per arm: value, difference, adjusted p, what it says; of many arms the baseline and
    those that differ most."""
    column = Column.of(comparison, report, drawn=False)
    numbers = comparison.numbers
    if len(numbers) > MOST_ARMS:
        ranked = sorted(
            numbers, key=lambda n: (n.arm != report.baseline, -abs(n.difference or 0.0))
        )
        kept = {n.arm for n in ranked[:MOST_ARMS]}
        numbers = tuple(n for n in numbers if n.arm in kept)
    rows = [arm_row(n, column, report) for n in numbers]
    yield from table(
        ("arm", comparison.key.metric, "difference", "p (adjusted)", "says", "of", "note"),
        [_cells(row) for row in rows],
    )
    if (more := len(comparison.numbers) - len(rows)) > 0:
        yield ""
        yield f"{counted(more, 'arm')} more with smaller differences: `report.csv`."


def _cells(row: ArmRow) -> list[str]:
    return [
        f"{row.arm} (baseline)" if row.baseline else row.arm,
        f"{row.value} {row.bounds}".strip(),
        f"{row.difference} {row.difference_bounds}".strip(),
        row.p_adjusted,
        f"{row.sign} {row.verdict}".strip(),
        row.basis,
        row.note,
    ]


def _attempts(report: SweepReport) -> Iterator[str]:
    if not report.attempts:
        return
    yield "## Why attempts fail"
    yield ""
    for found in attempts_tables(report.attempts, report.arms[:MOST_ARMS]):
        yield f"{escaped(found.name)}:"
        yield ""
        names = [c.replace("_", " ") for c in found.classes]
        errors = [f"error: {kind.replace('_', ' ')}" for kind in found.kinds]
        yield from table(
            ("arm", "domain", "attempts", "passed", *names, *errors),
            [
                [
                    r.arm,
                    r.domain or "all",
                    count(r.asked),
                    count(r.passed),
                    *(count(r.failures.get(c, 0)) for c in found.classes),
                    *(count(r.errors.get(k, 0)) for k in found.kinds),
                ]
                for r in found.rows
            ],
        )
        yield ""


def _flips(report: SweepReport) -> Iterator[str]:
    if not report.flips:
        return
    yield "## Prompts that flip"
    yield ""
    largest = sorted(report.flips, key=lambda f: -abs(f.value - f.baseline))[:MOST_FLIPS]
    yield from table(
        ("arm", "prompt", "baseline", "arm's", "seeds that agree"),
        [
            [
                f.arm,
                f"{f.question[:120]} ({f.sample_id})",
                number(f.baseline, 2),
                number(f.value, 2),
                f"{f.seeds_agree} of {f.seeds}",
            ]
            for f in largest
        ],
    )
    yield ""


def _cost(report: SweepReport) -> Iterator[str]:
    found = words.costs(report)
    yield "## Cost and waste"
    yield ""
    yield f"{words.cost_text(report)}.".capitalize().replace("gpu", "GPU").replace("cpu", "CPU")
    yield ""
    shown = found[:MOST_ARMS]
    yield from table(
        ("arm", "trials done", "GPU-hours", "CPU-hours", "queue", "lost", "steps lost", "attempts",
         "judge calls"),
        [
            [
                c.arm,
                f"{c.done} of {c.trials}",
                hours(c.gpu_hours),
                hours(c.cpu_hours),
                duration(c.queue_seconds),
                duration(c.lost_seconds) if c.lost_seconds else "0",
                str(c.lost_steps),
                str(c.attempts),
                count(c.judge_calls),
            ]
            for c in shown
        ],
    )  # fmt: skip
    if len(found) > len(shown):
        yield ""
        yield f"{counted(len(found) - len(shown), 'arm')} more: `trials.csv`."
    yield ""


def _incidents(report: SweepReport) -> Iterator[str]:
    if not report.incidents:
        return
    yield "## Incidents"
    yield ""
    newest = sorted(report.incidents, key=lambda i: (i.resolved, i.at))
    for i in newest[:MOST_INCIDENTS]:
        state = "" if i.resolved else " **(open)**"
        yield f"- {moment(i.at)}, {escaped(i.arm)}/seed{i.seed}: {escaped(i.text)}{state}"
    if (more := len(newest) - MOST_INCIDENTS) > 0:
        yield f"- {more} more are on the page"
    yield ""


def _protocols(report: SweepReport) -> Iterator[str]:
    if not report.protocols:
        return
    yield "## Protocols"
    yield ""
    for fingerprint, protocol in report.protocols.items():
        name = escaped(str(protocol.get("name") or "protocol"))
        yield f"- {name}: `{_code(fingerprint)}`"
    yield ""


# ---------------------------------------------------------------- escaping


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table; cells are escaped, and empty ones are a dash where their column has none."""
    yield "| " + " | ".join(map(escaped, header)) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = " ".join(plain(text).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = _SPECIAL.sub(r"\\\1", line).replace("@", "&#64;")
    return line if line != MISSING else MISSING


def _code(text: str) -> str:
    return plain(text).replace("`", "'").replace("\n", " ")


#: What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_OF_NUMBER = (
    "value",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "p",
    "p_adjusted",
    "n",
    "seeds",
    "excluded",
    "interval",
    "verdict",
)
_OF_KEY = ("model", "protocol", "protocol_name", "decoding", "metric", "judge")
TRIAL_HEADER = tuple(f.name for f in dataclasses.fields(TrialRow))


def number_header(report: SweepReport) -> list[str]:
    """Columns of :func:`number_rows`; each factor and each seed has its own."""
    seeds = [f"seed_{seed}" for seed in report.seeds]
    return ["arm", *(f"factor_{f}" for f in report.factors), "baseline", "primary", *_OF_KEY,
            *_OF_NUMBER, *seeds, "note"]  # fmt: skip


def number_rows(report: SweepReport) -> Iterator[list[Any]]:
    """One row per arm and number."""
    for comparison in report.comparisons:
        key = [getattr(comparison.key, name) for name in _OF_KEY]
        for measured in comparison.numbers:
            levels = report.arm_levels.get(measured.arm, {})
            points = {point.seed: point.value for point in measured.points}
            yield [
                measured.arm,
                *(levels.get(factor, "") for factor in report.factors),
                measured.arm == report.baseline,
                comparison.primary,
                *key,
                *(_known(getattr(measured, name)) for name in _OF_NUMBER),
                *(_known(points.get(seed)) for seed in report.seeds),
                measured.note,
            ]


def trial_rows(report: SweepReport) -> Iterator[list[Any]]:
    """One row per trial."""
    for trial in report.trials:
        values = (getattr(trial, name) for name in TRIAL_HEADER)
        yield [" ".join(v) if isinstance(v, tuple) else _known(v) for v in values]


def _known(value: Any) -> Any:
    return finite(value) if isinstance(value, float) else value


def numbers_csv(report: SweepReport) -> str:
    """``report.csv``."""
    return _csv(number_header(report), number_rows(report))


def trials_csv(report: SweepReport) -> str:
    """``trials.csv``."""
    return _csv(TRIAL_HEADER, trial_rows(report))


def values(report: SweepReport) -> dict[str, Any]:
    """The whole report as JSON values, its version first; a number that is not finite is None."""
    return dict(_clean(to_json(report)))


def document(report: SweepReport) -> str:
    """``report.json``."""
    return json.dumps(values(report), ensure_ascii=False, allow_nan=False) + "\n"


def _clean(value: Any) -> Any:
    """Without what JSON or UTF-8 cannot hold."""
    if isinstance(value, dict):
        return {key: _clean(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    return finite(value) if isinstance(value, float) else value


def _csv(header: Sequence[str], rows: Iterator[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
