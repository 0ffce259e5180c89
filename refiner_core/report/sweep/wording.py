"""Sentences and rows of a sweep's report, which page, Markdown and terminal share.

In: a :class:`~refiner_core.report.sweep.document.SweepReport`. Out: plain text, and rows of text
and drawings. An answer claims what the numbers carry and no more: what is not clear is called that,
with the smallest effect that could have been seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from refiner_core.report.drawing import scale_for, strip
from refiner_core.report.printing import (
    count,
    counted,
    decimals_for,
    finite,
    hours,
    interval,
    number,
    p_phrase,
    p_text,
    total,
    with_interval,
)
from refiner_core.report.sweep.document import ArmNumber, Comparison, Key, Row, SweepReport

_NAMED = 3
_STATES = ("done", "running", "waiting", "held", "failed", "interrupted")


def key_text(key: Key) -> str:
    """``oracle of grpo (sampled, protocol held-out)``."""
    of = f" of {key.model}" if key.model else ""
    decoding = f"{key.decoding}, " if key.decoding else ""
    return f"{key.metric}{of} ({decoding}protocol {key.protocol_name or key.protocol[:8]})"


def answer(report: SweepReport) -> str:
    """The answer to the sweep's question, as far as there is one."""
    primary = report.primary
    if primary is None:
        return f"There is no answer yet: no number that decides has come. {state_text(report)}"
    decimals = decimals_of(primary)
    others = [n for n in primary.numbers if n.arm != report.baseline]
    said = [n for n in others if n.difference is not None]
    if len(report.arms) < 2:
        return _alone(report, primary, decimals)
    if not said:
        return (
            f"There is no answer yet: on {key_text(primary.key)} no arm can be compared with the "
            f"baseline {report.baseline}. {_missing_text(others)}".strip()
        )
    clear = [n for n in said if n.verdict in ("better", "worse")]
    sentences = [_clear_text(report, primary, clear, decimals)] if clear else []
    sentences.append(_rest_text(report, primary, said, decimals, bool(clear)))
    moved = [n.arm for n in said if n.verdict == "judge moved"]
    if moved:
        sentences.append(
            f"Of {listed(moved)} nothing is claimed: the judge scored the same answers differently "
            "in the meantime."
        )
    sentences.append(_missing_text([n for n in others if n.difference is None]))
    if report.state == "running":
        sentences.append("The sweep still runs; this may change.")
    return " ".join(filter(None, sentences))


def _alone(report: SweepReport, primary: Comparison, decimals: int) -> str:
    n = primary.numbers[0] if primary.numbers else None
    if n is None or n.value is None:
        return "The sweep has one arm, and no number of it has come yet."
    value = with_interval(n.value, n.low, n.high, decimals)
    return (
        f"The sweep has one arm, so nothing is compared. {n.arm}: {value} "
        f"{key_text(primary.key)} ({basis(n, report)})."
    )


def _clear_text(
    report: SweepReport, primary: Comparison, clear: Sequence[ArmNumber], decimals: int
) -> str:
    ranked = sorted(clear, key=lambda n: (n.verdict != "better", -abs(n.difference or 0.0)))
    parts = [
        f"{n.arm} is {n.verdict} than {report.baseline} by {_effect(n, decimals)} "
        f"(adjusted p {p_phrase(n.p_adjusted)}; {basis(n, report)})"
        for n in ranked[:_NAMED]
    ]
    more = len(ranked) - _NAMED
    also = f"; {counted(more, 'more arm differs', 'more arms differ')} clearly" if more > 0 else ""
    return f"On {key_text(primary.key)}, {'; '.join(parts)}{also}."


def _rest_text(
    report: SweepReport,
    primary: Comparison,
    said: Sequence[ArmNumber],
    decimals: int,
    some_clear: bool,
) -> str:
    unclear = [n for n in said if n.verdict == "not clear"]
    if not unclear:
        return ""
    could = detectable_phrase(report.detectable, decimals)
    if some_clear:
        rest = "the other arm" if len(unclear) == 1 else f"the other {len(unclear)} arms"
        return f"For {rest} the difference is not clear" + (f" ({could})." if could else ".")
    largest = max(unclear, key=lambda n: abs(n.difference or 0.0))
    text = (
        f"No arm differs clearly from the baseline {report.baseline} on {key_text(primary.key)}. "
        f"The largest difference is that of {largest.arm}, {_effect(largest, decimals)} "
        f"(adjusted p {p_phrase(largest.p_adjusted)}; {basis(largest, report)})"
    )
    return text + (f"; {could}." if could else ".")


def _missing_text(missing: Sequence[ArmNumber]) -> str:
    return f"Without a comparison: {listed([n.arm for n in missing])}." if missing else ""


def _effect(n: ArmNumber, decimals: int) -> str:
    low, high = n.difference_low, n.difference_high
    return with_interval(n.difference, low, high, decimals, signed=True)


def basis(n: ArmNumber, report: SweepReport) -> str:
    """``3 seeds × 200 prompts``; of agents, tasks."""
    each = "task" if report.attempts else "prompt"
    return f"{counted(n.seeds, 'seed')} × {counted(n.n, each)}"


def detectable_phrase(detectable: Mapping[str, Any], decimals: int | None = None) -> str:
    """``effects below 0.021 would mostly go unseen``, or nothing where that is not known."""
    effect = detectable.get("effect")
    if not isinstance(effect, int | float) or not finite(float(effect)):
        return ""  # nor where nothing has varied: that tells of luck, not of an infinite precision
    shown = max(decimals or 0, decimals_for(None, float(effect)) - 1)
    power = detectable.get("power")
    share = f" in {power * 100:.0f}\u00a0% of such sweeps" if isinstance(power, float) else ""
    return f"an effect of {number(float(effect), shown)} would have been seen{share}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """``a, b and c``; of many the first, and how many more."""
    names = list(dict.fromkeys(names))
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1] if names else ""]))


# ---------------------------------------------------------------- state, cost


def state_text(report: SweepReport) -> str:
    """``18 trials: 12 done, 4 running, 2 failed.``"""
    found = Counter[str](t["state"] for t in report.trials)
    parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
    return f"{counted(len(report.trials), 'trial')}: {', '.join(parts) or 'none begun'}."


def cost_of(arm: str, trials: Sequence[Row]) -> dict[str, Any]:
    """The sum over an arm's trials; ``unknown`` counts those of which hours are not known. None:
    nobody knows it of any of them."""
    begun = [t for t in trials if t["state"] != "waiting"]
    partly = ("gpu_hours", "cpu_hours", "queue_seconds", "judge_calls")
    always = ("lost_seconds", "lost_steps", "attempts")
    return {
        "arm": arm,
        "trials": len(trials),
        "done": sum(t["state"] == "done" for t in trials),
        "unknown": sum(t["gpu_hours"] is None and t["cpu_hours"] is None for t in begun),
        **{name: total(t[name] for t in trials) for name in partly},
        **{name: sum(t[name] for t in trials) for name in always},
    }


def costs(report: SweepReport) -> list[dict[str, Any]]:
    """One per arm, in the arms' order."""
    by_arm: dict[str, list[Row]] = {arm: [] for arm in report.arms}
    for trial in report.trials:
        by_arm.setdefault(trial["arm"], []).append(trial)
    return [cost_of(arm, trials) for arm, trials in by_arm.items()]


def cost_text(report: SweepReport) -> str:
    """``21.3 GPU-hours, 4.1 CPU-hours; 36 steps done again``."""
    whole = cost_of("", report.trials)
    named = (("gpu_hours", "GPU-hours"), ("cpu_hours", "CPU-hours"))
    parts = [f"{hours(whole[key])} {name}" for key, name in named if whole[key]]
    if whole["judge_calls"]:
        parts.append(f"{count(int(whole['judge_calls']))} judge calls")
    if whole["lost_steps"]:
        parts.append(f"{counted(whole['lost_steps'], 'step')} done again")
    return ", ".join(parts) or "nothing is known of what it has cost"


# ---------------------------------------------------------------- digits


def decimals_of(comparison: Comparison) -> int:
    """One number of decimals for all arms of a comparison, so that its columns line up."""
    ends = [
        pair
        for n in comparison.numbers
        for pair in ((n.low, n.high), (n.difference_low, n.difference_high))
    ]
    widths = [finite(high - low) for low, high in ends if low is not None and high is not None]
    if known := [width for width in widths if width is not None and width > 0]:
        return decimals_for(median(known))
    values = [abs(v) for n in comparison.numbers if (v := finite(n.value)) is not None]
    return decimals_for(None, median(values) if values else None)


#: What verdicts are shown as: a sign beside the word, so that nothing depends on colour.
SIGNS = {
    "better": "▲",
    "worse": "▼",
    "not clear": "■",
    "judge moved": "◆",
    "not comparable": "✕",
    "missing": "✕",
}


def column_of(comparison: Comparison, report: SweepReport) -> dict[str, Any]:
    """Column that all arms of a comparison share: digits, and scales that hold every interval and
    every seed."""
    values, differences = [], []
    for n in comparison.numbers:
        values += [n.value, n.low, n.high, *(p["value"] for p in n.points)]
        differences += [n.difference, n.difference_low, n.difference_high]
        differences += [p["difference"] for p in n.points]
    known = [d for d in differences if finite(d) is not None]
    matters = report.detectable.get("smallest_effect") if comparison.primary else None
    return {
        "decimals": decimals_of(comparison),
        "value": scale_for(values),
        "difference": scale_for([*known, 0.0]) if known else None,
        "matters": finite(float(matters)) if isinstance(matters, int | float) else None,
    }


def arm_row(found: ArmNumber, column: Mapping[str, Any], report: SweepReport) -> dict[str, Any]:
    """One arm's number as text and drawings; one that is missing is a dash, and the note says
    why."""
    baseline = found.arm == report.baseline
    verdict = "baseline" if baseline else (found.verdict or "missing")
    excluded = f", {found.excluded} left out" if found.excluded else ""
    missing = "There is no number of this arm yet." if finite(found.value) is None else ""
    d = column["decimals"]
    return {
        "arm": found.arm,
        "baseline": baseline,
        "value": number(found.value, d),
        "bounds": interval(found.low, found.high, d),
        "difference": "" if baseline else number(found.difference, d, signed=True),
        "difference_bounds": interval(found.difference_low, found.difference_high, d),
        "p_adjusted": "" if baseline else p_text(found.p_adjusted),
        "verdict": verdict,
        "sign": SIGNS.get(verdict, ""),
        "basis": f"{basis(found, report)}{excluded}" if found.seeds else "",
        "note": found.note[:1].upper() + found.note[1:] or missing,
        "value_strip": _strip(found, column, verdict, "value"),
        "difference_strip": _strip(found, column, verdict, "difference"),
        "number": found,
    }


def _strip(
    found: ArmNumber, column: Mapping[str, Any], verdict: str, of: str
) -> dict[str, Any] | None:
    """A strip of an arm's ``value``, or of how far it is from the baseline's (``difference``)."""
    scale, value, decimals = column[of], getattr(found, of), column["decimals"]
    change = of == "difference"
    ends = (found.difference_low, found.difference_high) if change else (found.low, found.high)
    if scale is None or finite(value) is None:
        return None
    points = {p["seed"]: p[of] for p in found.points}
    seeds = (
        f"seed {seed}: {number(point, decimals, signed=change)}"
        f"{' (missing)' if finite(point) is None else ''}"
        for seed, point in points.items()
    )
    said = with_interval(value, *ends, decimals, signed=change)
    name = f"{found.arm} minus baseline" if change else found.arm
    label = f"{name}: {said}; {', '.join(seeds) or 'no seed has a number'}"
    more = {"zero": change, "matters": column["matters"] if change else None}
    return strip(scale, value, ends, verdict, label, points=tuple(points.values()), **more)


def comparison_notes(comparison: Comparison) -> list[str]:
    """Warnings of a comparison, and what an interval of it is."""
    kinds = dict.fromkeys(n.interval for n in comparison.numbers if n.interval)
    made = [f"Intervals are of 95 %: {', '.join(kinds)}."] if kinds else []
    return [*comparison.warnings, *made]
