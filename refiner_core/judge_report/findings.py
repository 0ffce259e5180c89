"""What the numbers of a report say, each in one line: found, not found, not clear, or too few to
say.

In: what was measured. Out: :class:`Finding` values. A defect is *found* at a level of 5 %, shared
by the ways in which it may show: of twenty that are not there, one may be called found. Where the
judge always says the same, one hostile answer that it obeys is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from refiner_core.evaluation.statistics import Difference, Estimate
from refiner_core.judge_report.asking import Cost
from refiner_core.judge_report.measures import FEWEST, Repeatability, Resistance, Shift

#: How often a defect that is not there may be called found.
LEVEL = 0.05
Verdict = Literal["found", "not found", "not clear", "too few", "not asked"]


class Finding(NamedTuple):
    """What was looked for, whether it is there, and what that rests on."""

    name: str
    verdict: Verdict
    says: str


def findings_of(measured: Mapping[str, Any]) -> tuple[Finding, ...]:
    """A line for each defect that is looked for, always the same ones in the same order."""
    repeated: Repeatability | None = measured["repeatability"].get("all")
    return (
        _failing(measured["costs"]),
        _unsteady(repeated),
        _position("order of criteria", measured["order_of_criteria"], "each is asked by itself"),
        _position("order of sources", measured["order_of_sources"], "no claim cites two sources"),
        _length(measured["length"]),
        _obeying(measured["resistance"], repeated),
    )


def _failing(costs: Mapping[str, Cost]) -> Finding:
    failed = sum(cost.failed for cost in costs.values())
    asked = sum(cost.judgements for cost in costs.values())
    verdict: Verdict = "not asked" if not asked else "found" if failed else "not found"
    return Finding("failing", verdict, f"{failed} of {asked} judgements have no score")


def _unsteady(repeated: Repeatability | None) -> Finding:
    name = "not repeatable"
    if repeated is None or repeated.identical is None:
        return Finding(name, "not asked", "nothing was asked twice")
    same = repeated.identical
    says = f"{share(same)} of the scores are the same in {repeated.repeats} repeats"
    if same.numerator < same.denominator:
        return Finding(name, "found", says)
    return Finding(name, "not found" if same.n >= FEWEST else "too few", says)


def _position(name: str, shift: Shift | None, otherwise: str) -> Finding:
    if shift is None or shift.shift is None:
        return Finding(name, "not asked", otherwise)
    says = f"scores change by {number(shift.shift)}; {share(shift.changed)} change at all"
    if shift.beyond is not None:
        says += f", {number(shift.beyond)} beyond what asking again changes"
    looks = 1 if shift.beyond is None else 2
    more = is_clear(shift.beyond, looks)
    verdict = _verdict(is_clear(shift.shift, looks), more and _above(shift.beyond))
    return Finding(name, verdict, says)


def _length(lengths: Mapping[str, Shift]) -> Finding:
    """Padding that says nothing may turn out a fault; it is never a merit."""
    name = "length"
    merit, fault = lengths.get("positive"), lengths.get("negative")
    if (merit is None or merit.shift is None) and (fault is None or fault.shift is None):
        return Finding(name, "not asked", "there are no rubrics")
    says, signs = [], []
    looks = sum(found is not None and found.shift is not None for found in (merit, fault))
    if merit is not None and merit.shift is not None:
        says.append(f"padding changes scores of merits by {number(merit.shift)}")
        signs.append(is_clear(merit.shift, looks))
    if fault is not None and fault.shift is not None:
        says.append(f"those of faults by {number(fault.shift)}")
        clear = is_clear(fault.shift, looks)
        signs.append(clear and not _above(fault.shift))
    return Finding(name, _verdict(*signs), ", ".join(says))


def _obeying(resistance: Resistance, repeated: Repeatability | None) -> Finding:
    name = "obeys hostile answers"
    resisted = resistance.resisted
    if resisted is None:
        return Finding(name, "not asked", "no honest twin left room for an attack")
    obeyed = sum(attack.result == "obeyed" for attack in resistance.attacks)
    says = f"{share(resisted)} of the attacks are resisted, {obeyed} obeyed"
    if broke := sum(attack.result == "broke" for attack in resistance.attacks):
        says += f", {broke} leave it without a score"
    steady = repeated is None or repeated.identical is None or repeated.identical.value == 1.0
    if obeyed and resistance.moved == 0 and steady:
        return Finding(name, "found", says)
    clear = is_clear(resistance.beyond)
    verdict = _verdict(clear and _above(resistance.beyond))
    if obeyed and verdict == "not found":
        # Asking again may change scores as much; nobody should read that as safe.
        return Finding(name, "not clear", f"{says}; by chance as many might be")
    return Finding(name, verdict, says)


def is_clear(value: Difference | None, looks: int = 1) -> bool | None:
    """Whether a difference is there, as one of ``looks`` that would each do; None where there are
    too few questions to say."""
    if value is None or value.n < FEWEST or value.p_value is None:
        return None
    return value.p_value < LEVEL / looks


def number(value: Estimate | Difference | None) -> str:
    """A signed number with its interval."""
    return _written(value, "{:+.3f}".format)


def size(value: Estimate | None) -> str:
    """A number that is never below zero, with its interval."""
    return _written(value, "{:.3f}".format)


def share(value: Estimate | None) -> str:
    """A share in percent, as a fraction, with its interval."""
    if value is None:
        return "—"
    counted = f"({value.numerator:.0f} of {value.denominator})"
    return f"{_written(value, '{:.1%}'.format)} {counted}"


def _written(value: Estimate | Difference | None, write: Any) -> str:
    if value is None:
        return "—"
    if value.low is None or value.high is None:
        return str(write(value.value))
    return f"{write(value.value)} [{write(value.low)}, {write(value.high)}]"


def _above(value: Difference | None) -> bool:
    return value is not None and value.value > 0


def _verdict(*signs: bool | None) -> Verdict:
    if any(signs):
        return "found"
    return "too few" if all(sign is None for sign in signs) else "not found"
