"""Rows of a comparison as they are printed, for page and Markdown alike.

In: an :class:`~refiner_core.report.sweep.document.ArmNumber` and the :class:`Column` of its
comparison (digits and scales that all its arms share). Out: :class:`ArmRow`.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from refiner_core.report import drawing
from refiner_core.report.printing import (
    MISSING,
    finite,
    interval,
    number,
    p_text,
)
from refiner_core.report.sweep import words
from refiner_core.report.sweep.document import ArmNumber, Comparison, SweepReport

#: What verdicts are shown as: a sign beside the word, so that nothing depends on colour.
SIGNS = {
    "better": "▲",
    "worse": "▼",
    "not clear": "■",
    "judge moved": "◆",
    "not comparable": "✕",
    "missing": "✕",
}


@dataclass(frozen=True)
class Column:
    """What all arms of a comparison share."""

    decimals: int
    values: drawing.Scale | None
    differences: drawing.Scale | None
    matters: float | None

    @classmethod
    def of(cls, comparison: Comparison, report: SweepReport, *, drawn: bool = True) -> Column:
        """Scales that hold every interval and every seed; none where nothing is ``drawn``."""
        numbers = comparison.numbers
        if not drawn:
            return cls(words.decimals_of(comparison), None, None, None)
        values = [v for n in numbers for v in (n.value, n.low, n.high)]
        values += [p.value for n in numbers for p in n.points]
        differences = [
            v for n in numbers for v in (n.difference, n.difference_low, n.difference_high)
        ]
        differences += [p.difference for n in numbers for p in n.points]
        known = [d for d in differences if finite(d) is not None]
        matters = report.detectable.get("smallest_effect") if comparison.primary else None
        matters = float(matters) if isinstance(matters, int | float) else None
        return cls(
            decimals=words.decimals_of(comparison),
            values=drawing.scale_for(values),
            differences=drawing.scale_for([*known, 0.0]) if known else None,
            matters=finite(matters),
        )


@dataclass(frozen=True)
class ArmRow:
    """One arm's number as text and drawings."""

    arm: str
    baseline: bool
    value: str
    bounds: str
    difference: str
    difference_bounds: str
    p: str
    p_adjusted: str
    verdict: str
    sign: str
    basis: str
    note: str
    value_strip: Markup
    difference_strip: Markup
    number: ArmNumber


def arm_row(found: ArmNumber, column: Column, report: SweepReport) -> ArmRow:
    """A row; a number that is missing is a dash, and the note says why."""
    baseline = found.arm == report.baseline
    verdict = "baseline" if baseline else (found.verdict or "missing")
    excluded = f", {found.excluded} left out" if found.excluded else ""
    d = column.decimals
    return ArmRow(
        arm=found.arm,
        baseline=baseline,
        value=number(found.value, d),
        bounds=interval(found.low, found.high, d),
        difference="" if baseline else number(found.difference, d, signed=True),
        difference_bounds=interval(found.difference_low, found.difference_high, d),
        p="" if baseline else p_text(found.p),
        p_adjusted="" if baseline else p_text(found.p_adjusted),
        verdict=verdict,
        sign=SIGNS.get(verdict, ""),
        basis=f"{words.basis(found, report)}{excluded}" if found.seeds else "",
        note=_sentence(found.note) or _why_missing(found),
        value_strip=_value_strip(found, column, verdict),
        difference_strip=_difference_strip(found, column, verdict),
        number=found,
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _why_missing(found: ArmNumber) -> str:
    if finite(found.value) is None:
        return "There is no number of this arm yet."
    return ""


def _value_strip(found: ArmNumber, column: Column, verdict: str) -> Markup:
    if column.values is None or finite(found.value) is None:
        return Markup("")
    points = tuple(p.value for p in found.points)
    label = f"{found.arm}: {number(found.value, column.decimals)}"
    label += f" {interval(found.low, found.high, column.decimals)}"
    seeds = _seeds([(p.seed, p.value) for p in found.points], column.decimals)
    shown = drawing.Strip(
        found.value, found.low, found.high, points, verdict, f"{label.strip()}; {seeds}"
    )
    return drawing.strip(shown, column.values)


def _difference_strip(found: ArmNumber, column: Column, verdict: str) -> Markup:
    if column.differences is None or finite(found.difference) is None:
        return Markup("")
    points = tuple(p.difference for p in found.points)
    d = column.decimals
    label = f"{found.arm} minus baseline: {number(found.difference, d, signed=True)}"
    label += f" {interval(found.difference_low, found.difference_high, d)}"
    seeds = _seeds([(p.seed, p.difference) for p in found.points], d, signed=True)
    shown = drawing.Strip(
        found.difference,
        found.difference_low,
        found.difference_high,
        points,
        verdict,
        f"{label.strip()}; {seeds}",
        zero=True,
        matters=column.matters,
    )
    return drawing.strip(shown, column.differences)


def _seeds(points: list[tuple[int, float | None]], decimals: int, *, signed: bool = False) -> str:
    said = [
        f"seed {seed}: "
        + (
            number(value, decimals, signed=signed)
            if finite(value) is not None
            else f"{MISSING} (missing)"
        )
        for seed, value in points
    ]
    return ", ".join(said) or "no seed has a number"


def comparison_notes(comparison: Comparison) -> list[str]:
    """Warnings of a comparison, and what an interval of it is."""
    kinds = dict.fromkeys(n.interval for n in comparison.numbers if n.interval)
    made = [f"Intervals are of 95 %: {', '.join(kinds)}."] if kinds else []
    return [*comparison.warnings, *made]
