"""What a checkpoint took: machine, time, GPU-hours, money.

In: the provenance and cost of :class:`CardFacts`. Out: lines of the section "Hardware and cost".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from refiner_core.cards.facts import CardFacts, finite
from refiner_core.cards.printed import Line, counted, joined, number, quoted
from refiner_core.contract.kinds import KINDS


def cost_lines(facts: CardFacts) -> list[Line]:
    """Machine, time per stage, and what all attempts together took."""
    lines = []
    if facts.provenance.get("host"):
        lines.append("**Machine:** " + quoted(str(facts.provenance["host"]), "provenance.host"))
    durations = _times(facts.provenance.get("durations"), "provenance.durations")
    spent = _times(facts.cost.get("seconds"), "cost.seconds")
    if durations:
        lines.append("**Time of the attempts that made it:** " + durations + ".")
    if spent and (durations is None or spent.text != durations.text):
        lines.append("**Time of all attempts:** " + spent + ".")
    used = used_hours(facts)
    if used is not None:
        lines.append("**Compute:** " + used + ", all attempts together." + _price(facts))
    judged = _judged(facts)
    if judged is not None:
        lines.append("**Judging in training:** " + judged + ".")
    return lines


def _judged(facts: CardFacts) -> Line | None:
    """What the judge was asked in the steps that led here; None where it keeps no count."""
    used, path = facts.reports.get("grpo", {}).get("judge"), "reports.grpo.judge"
    if not isinstance(used, Mapping) or not finite(used.get("asked")):
        return None

    def part(name: str, one: str, many: str = "") -> Line:
        return counted(used.get(name, 0), f"{path}.{name}", one, many)

    parts = [part("asked", "judgement"), part("calls", "call")]
    words = (
        ("stored", "known before"),
        ("shared", "asked for another answer as well"),
        ("failed", "without a score"),
    )
    parts += [part(name, text, text) for name, text in words if used.get(name)]
    tokens = [
        part("prompt_tokens", "token read", "tokens read"),
        part("completion_tokens", "written", "written"),
    ]
    return joined(parts + (tokens if used.get("prompt_tokens") else []))


def used_hours(facts: CardFacts) -> Line | None:
    """``3.20 GPU-hours``, or core-hours where no GPU was used; None where nobody has counted."""
    unit = hours_unit(facts)
    return None if unit is None else _hours(facts, unit) + _unit_name(unit)


def lost_hours(facts: CardFacts) -> Line | None:
    """``0.40 of 3.20 GPU-hours``: what went into work that was done again; None for nothing."""
    unit = hours_unit(facts)
    if unit is None or not finite(facts.cost.get(f"lost_{unit}")):
        return None
    return _hours(facts, f"lost_{unit}") + " of " + _hours(facts, unit) + _unit_name(unit)


def hours_unit(facts: CardFacts) -> str | None:
    """The unit that a run is counted in: ``gpu_hours``, or ``core_hours`` without GPUs."""
    for unit in ("gpu_hours", "core_hours"):
        if finite(facts.cost.get(unit)):
            return unit
    return None


def _unit_name(unit: str) -> str:
    return " GPU-hours" if unit == "gpu_hours" else " core-hours"


def _hours(facts: CardFacts, key: str) -> Line:
    return number(_amount(finite(facts.cost.get(key)) or 0.0), f"cost.{key}")


def _amount(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _price(facts: CardFacts) -> Line:
    """The price of all GPU-hours, by the price of one."""
    price, hours = finite(facts.cost.get("price")), finite(facts.cost.get("gpu_hours"))
    if price is None or not hours:
        return Line("")
    currency = str(facts.cost.get("currency") or "")
    total = number(_amount(price * hours), "cost.gpu_hours")
    each = number(_amount(price), "cost.price")
    return " That is about " + total + f" {currency} at " + each + f" {currency} per GPU-hour."


def _times(seconds: Any, path: str) -> Line | None:
    if not isinstance(seconds, Mapping):
        return None
    known = [stage for stage in seconds if finite(seconds[stage]) is not None]
    known.sort(key=lambda stage: (_place(stage), stage))
    parts = [f"{stage} " + number(duration(seconds[stage]), f"{path}.{stage}") for stage in known]
    return joined(parts) if parts else None


def _place(stage: str) -> int:
    return KINDS[stage].order if stage in KINDS else sys.maxsize


def duration(seconds: float) -> str:
    """``2 h 02 min``, ``3 min 05 s``, ``4.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
