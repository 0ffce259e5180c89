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
from collections.abc import Iterator, Sequence
from typing import Any

from refiner_core.contract.records import to_json
from refiner_core.report.pages import template_of
from refiner_core.report.printing import finite, plain
from refiner_core.report.sweep import wording
from refiner_core.report.sweep.document import ArmNumber, Comparison, Key, SweepReport, TrialRow
from refiner_core.report.sweep.wording import Column, arm_row
from refiner_core.report.transcripts import attempts_tables

#: Comparisons besides the primary one that are printed in full, and rows of long tables.
MOST_COMPARISONS = 8
MOST_ARMS = 40
MOST_INCIDENTS = 20
MOST_FLIPS = 10


def markdown(report: SweepReport) -> str:
    """The whole text; ends with one line feed."""
    flips = sorted(report.flips, key=lambda f: -abs(f.value - f.baseline))
    compared = sorted(report.comparisons, key=lambda c: not c.primary)[: 1 + MOST_COMPARISONS]
    text = template_of(__package__, "report.md.jinja").render(
        report=report,
        w=wording,
        compared=[(comparison, _arms(comparison, report)) for comparison in compared],
        attempts=attempts_tables(report.attempts, report.arms[:MOST_ARMS]),
        flips=flips[:MOST_FLIPS],
        costs=wording.costs(report),
        incidents=sorted(report.incidents, key=lambda i: (i.resolved, i.at)),
        most_arms=MOST_ARMS,
        most_incidents=MOST_INCIDENTS,
    )
    return text.rstrip() + "\n"


def _arms(comparison: Comparison, report: SweepReport) -> list[dict[str, Any]]:
    """One row per arm; of many arms the baseline and those that differ most."""
    column = Column.of(comparison, report)
    ranked = sorted(
        comparison.numbers, key=lambda n: (n.arm != report.baseline, -abs(n.difference or 0.0))
    )
    kept = {n.arm for n in ranked[:MOST_ARMS]}
    return [arm_row(n, column, report) for n in comparison.numbers if n.arm in kept]


#: What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_OF_NUMBER = tuple(
    f.name for f in dataclasses.fields(ArmNumber) if f.name not in ("arm", "points", "note")
)
_OF_KEY = tuple(f.name for f in dataclasses.fields(Key))
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
