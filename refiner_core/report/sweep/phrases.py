"""Sentences and rows of a sweep's report, shared by page, Markdown and terminal.

In: a :class:`~refiner_core.report.sweep.sweep_report.SweepReport`. Out: plain text, and rows of
text and drawings. An answer claims no more than the numbers support: unclear results are called so,
with the smallest effect that could have been detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, get_args

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
from refiner_core.report.sweep.sweep_report import (
    ArmNumber,
    Comparison,
    NumberKey,
    Row,
    SweepReport,
    TrialState,
)

_NAMED = 3
_STATES = get_args(TrialState)


def key_text(key: NumberKey) -> str:
    """``oracle of grpo (sampled, protocol held-out)``."""
    of = f" of {key.model}" if key.model else ""
    decoding = f"{key.decoding}, " if key.decoding else ""
    return f"{key.metric}{of} ({decoding}protocol {key.protocol_name or key.protocol[:8]})"


def answer(report: SweepReport) -> str:
    """The answer to the sweep's question, if there is one."""
    primary = report.primary
    if primary is None:
        return f"There is no answer yet: the deciding numbers are missing. {state_text(report)}"
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
    order = ("better", "worse", "not clear")
    told = [n for n in said if n.verdict in order]
    told.sort(key=lambda n: (order.index(n.verdict or ""), -abs(n.difference or 0.0)))
    moved = [n.arm for n in said if n.verdict == "judge moved"]
    parts = [_compared(n, report, decimals) for n in told[:_NAMED]]
    parts += [f"{len(told) - _NAMED} more are listed below"] if len(told) > _NAMED else []
    sentences = [f"On {key_text(primary.key)}, {'; '.join(parts)}."] if parts else []
    if any(n.verdict == "not clear" for n in told):
        sentences.append(detectable_phrase(report.detectable, decimals))
    if moved:
        sentences.append(
            f"Of {listed(moved)} nothing is claimed: the judge scored the same answers differently "
            "in the meantime."
        )
    sentences.append(_missing_text([n for n in others if n.difference is None]))
    if report.state == "running":
        sentences.append("The sweep still runs; this may change.")
    return " ".join(filter(None, sentences))


def _compared(n: ArmNumber, report: SweepReport, decimals: int) -> str:
    """``a is better than base by +0.03 [0.01, 0.05] (adjusted p = 0.04; 3 seeds × 9 prompts)``."""
    low, high = n.difference_low, n.difference_high
    effect = with_interval(n.difference, low, high, decimals, signed=True)
    verb = "does not clearly differ from" if n.verdict == "not clear" else f"is {n.verdict} than"
    p_value = p_phrase(n.p_adjusted)
    by = f"{effect} (adjusted p {p_value}; {basis(n, report)})"
    return f"{n.arm} {verb} {report.baseline}{':' if n.verdict == 'not clear' else ' by'} {by}"


def _alone(report: SweepReport, primary: Comparison, decimals: int) -> str:
    n = primary.numbers[0] if primary.numbers else None
    if n is None or n.value is None:
        return "The sweep has one arm, and no number yet."
    value = with_interval(n.value, n.low, n.high, decimals)
    return (
        f"The sweep has one arm, so nothing is compared. {n.arm}: {value} "
        f"{key_text(primary.key)} ({basis(n, report)})."
    )


def _missing_text(missing: Sequence[ArmNumber]) -> str:
    return f"Without a comparison: {listed([n.arm for n in missing])}." if missing else ""


def basis(n: ArmNumber, report: SweepReport) -> str:
    """``3 seeds × 200 prompts``; for agents, tasks."""
    each = "task" if report.attempts else "prompt"
    return f"{counted(n.seeds, 'seed')} × {counted(n.n, each)}"


def detectable_phrase(detectable: Mapping[str, Any], decimals: int) -> str:
    """The detectable effect in words; empty if unknown."""
    effect = detectable.get("effect")
    if not isinstance(effect, int | float) or not finite(float(effect)):
        return ""  # also without any variation, which is luck, not infinite precision
    shown = max(decimals, decimals_for(None, float(effect)) - 1)
    power = detectable.get("power")
    share = f" in {power * 100:.0f}\u00a0% of such comparisons" if isinstance(power, float) else ""
    return f"An effect of {number(float(effect), shown)} would have been seen{share}."


def listed(names: Sequence[str], most: int = 6) -> str:
    """``a, b and c``; of a long list the first names, and the number of the rest."""
    names = list(dict.fromkeys(names))
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1] if names else ""]))


# ---------------------------------------------------------------- state, cost


def state_text(report: SweepReport) -> str:
    """``18 trials: 12 done, 4 running, 2 failed.``"""
    found = Counter[str](t["state"] for t in report.trials)
    parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
    noun = "trial" if report.sweep else "run"
    return f"{counted(len(report.trials), noun)}: {', '.join(parts) or 'none begun'}."


def cost_of(arm: str, trials: Sequence[Row]) -> dict[str, Any]:
    """The sum over an arm's trials; ``unknown`` counts trials with unknown hours. None if all are
    unknown."""
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
    """One per arm, in the order of arms."""
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
    return ", ".join(parts) or "the cost is unknown"


# ---------------------------------------------------------------- digits


def decimals_of(comparison: Comparison) -> int:
    """The number of decimals of all arms of a comparison, so that columns align."""
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


#: Signs of verdicts, shown beside the word, so that nothing depends on colour.
SIGNS = {
    "better": "▲",
    "worse": "▼",
    "not clear": "■",
    "judge moved": "◆",
    "not comparable": "✕",
    "missing": "✕",
}


def column_of(comparison: Comparison, report: SweepReport) -> dict[str, Any]:
    """Shared column format of a comparison's arms: digits, and scales that fit every interval and
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
    """One arm's number as text and drawings; a missing one is a dash, with the reason in the
    note."""
    baseline = found.arm == report.baseline
    unknown = "missing" if finite(found.difference) is None else ""  # it has no direction
    verdict = "baseline" if baseline else (found.verdict or unknown)
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
    """Strip of an arm's ``value``, or of its ``difference`` to the baseline."""
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
    """Methods of a comparison's intervals."""
    kinds = dict.fromkeys(n.interval for n in comparison.numbers if n.interval)
    return [f"Intervals are of 95 %: {', '.join(kinds)}."] if kinds else []
