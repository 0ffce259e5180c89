"""A report as tables of plain values: one row per arm and number, and one per trial.

In: a :class:`~refiner_core.report.sweep.document.SweepReport`. Out: rows (for W&B) and CSV.
Numbers are written in full; an empty cell is a number that is not there, and ``note`` says why.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from refiner_core.contract.records import to_json
from refiner_core.report.printing import finite, plain
from refiner_core.report.sweep.document import SweepReport, TrialRow

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
        for number in comparison.numbers:
            levels = report.arm_levels.get(number.arm, {})
            points = {point.seed: point.value for point in number.points}
            yield [
                number.arm,
                *(levels.get(factor, "") for factor in report.factors),
                number.arm == report.baseline,
                comparison.primary,
                *key,
                *(_known(getattr(number, name)) for name in _OF_NUMBER),
                *(_known(points.get(seed)) for seed in report.seeds),
                number.note,
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
