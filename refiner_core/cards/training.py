"""Course and cost of a training: its curve, machine, time, GPU-hours, money, what was certified.

In: reports, provenance, cost and certificate of :class:`CardFacts`. Out: a short table with a line
of blocks, and lines of the section "Hardware and cost".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.cards.facts import (
    MISSING,
    CardFacts,
    Line,
    counted,
    finite,
    joined,
    number,
    quoted,
)
from refiner_core.cards.setup import is_agent
from refiner_core.contract.kinds import KINDS
from refiner_core.contract.proofs import Certificate

TABLE_POINTS = 10
SPARK_POINTS = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
#: Curves of a stage's report (dotted path in it), as a card names them. The first is drawn.
_CURVES: dict[str, tuple[tuple[str, str], ...]] = {
    "grpo": (
        ("curves.scores", "reward"),
        ("curves.objective/kl3_avg", "KL"),
        ("curves.val/sequence_lengths", "tokens per rollout"),
        ("curves.val/stop_rate", "share that stopped"),
    ),
    "sft": (("train_loss.curve", "training loss"),),
}
#: The same of an agent, whose rollouts hold what tools and users said as well.
_CURVES_OF_EPISODES = (
    ("curves.scores", "reward"),
    ("curves.objective/kl3_avg", "KL"),
    ("curves.episodes/success", "share solved"),
    ("curves.episodes/turns", "turns"),
    ("curves.val/sequence_lengths", "tokens per episode, with those of tools and user"),
)


@dataclass(frozen=True)
class TrainingCurve:
    """A table of a run's course, its sparkline, and what is to be said with them."""

    header: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    lines: tuple[Line, ...]


def training_curve(facts: CardFacts) -> TrainingCurve | None:
    """The course of this model's own training; None where no point is recorded."""
    curves = _CURVES.get(facts.stage, _CURVES["sft"])
    if facts.stage == "grpo" and is_agent(facts):
        curves = _CURVES_OF_EPISODES
    found = [
        (f"reports.{facts.stage}.{path}", name, points)
        for path, name in curves
        if (points := _points(facts, path))
    ]
    if not found:
        return None
    path, name, main = found[0]
    beside = [curve for curve in found[1:] if _steps(curve[2]) == _steps(main)]
    rows = []
    for index in _spread(len(main), TABLE_POINTS):
        cells = [number(main[index][0], f"{path}.{index}.0"), _shown(path, main, index)]
        cells += [_shown(other, points, index) for other, _, points in beside]
        rows.append(tuple(cells))
    lines = [_sparkline(path, name, main)]
    lines += [_apart(*curve) for curve in found[1:] if curve not in beside]
    return TrainingCurve(
        header=("step", name, *(other for _, other, _ in beside)),
        rows=tuple(rows),
        lines=(*lines, *_validation(facts)),
    )


def _points(facts: CardFacts, path: str) -> list[tuple[Any, float | None]]:
    value: Any = facts.reports.get(facts.stage, {})
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    points = value if isinstance(value, list | tuple) else ()
    return [(point[0], finite(point[1])) for point in points]


def _steps(points: Sequence[tuple[Any, float | None]]) -> list[Any]:
    return [step for step, _ in points]


def _spread(length: int, most: int) -> list[int]:
    """At most ``most`` indices, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [round(i * (length - 1) / (most - 1)) for i in range(most)]


def _shown(path: str, points: Sequence[tuple[Any, float | None]], index: int) -> Line:
    value = points[index][1]
    return Line(MISSING) if value is None else number(f"{value:.4g}", f"{path}.{index}.1")


def _sparkline(path: str, name: str, points: Sequence[tuple[Any, float | None]]) -> Line:
    known = [(value, index) for index, (_, value) in enumerate(points) if value is not None]
    if not known:
        return Line(f"The {name} was never a finite number.")
    (low, first), (high, last) = min(known), max(known)
    blocks = "".join(_block(points[i][1], low, high) for i in _spread(len(points), SPARK_POINTS))
    text = f"{name.capitalize()} from step " + number(points[0][0], f"{path}.0.0") + " to "
    text = text + number(points[-1][0], f"{path}.{len(points) - 1}.0") + f": `{blocks}` (lowest "
    return text + _shown(path, points, first) + ", highest " + _shown(path, points, last) + ")."


def _block(value: float | None, low: float, high: float) -> str:
    if value is None:
        return " "
    share = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, int(share * len(_BLOCKS)))]


def _apart(path: str, name: str, points: Sequence[tuple[Any, float | None]]) -> Line:
    """A curve that was not computed at every step, and so cannot stand beside the others."""
    ends = [_shown(path, points, index) for index in (0, len(points) - 1)]
    text = f"{name[:1].upper()}{name[1:]} was not computed in all steps; the first value is "
    return text + ends[0] + ", the last " + ends[1] + "."


def _validation(facts: CardFacts) -> list[Line]:
    loss = facts.reports.get(facts.stage, {}).get("validation_loss")
    path = f"reports.{facts.stage}.validation_loss"
    values = [(k, finite((loss or {}).get(k))) for k in ("final", "best", "best_step")]
    if any(value is None for _, value in values):
        return []
    final, best, step = (number(f"{value:.4g}", f"{path}.{key}") for key, value in values)
    parts = ["Validation loss: " + final + " at the end", "lowest " + best + " after step " + step]
    return [joined(parts) + "."]


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


def public_certificate(
    certificates: list[Certificate], trained_on: Mapping[str, Any]
) -> dict[str, Any]:
    """The newest certificate of the kind of machine that a training ran on, without its name.

    Parameters
    ----------
    certificates
        Those of a workspace, oldest first.
    trained_on
        Provenance of the training stage: its ``host`` and ``versions``.

    Returns
    -------
    dict
        ``made_at`` (day), ``gpus`` (how many), ``gpu`` (name), ``passed``, ``failed``, ``absent``;
        empty where no certificate is of the same processor, GPUs and torch, or it did not pass.
    """
    host, torch = trained_on.get("host") or {}, (trained_on.get("versions") or {}).get("torch")
    same = [
        made
        for made in certificates
        if made.passed
        and made.host.get("cpu") == host.get("cpu")
        and list(made.host.get("gpus") or ()) == list(host.get("gpus") or ())
        and made.versions.get("torch") == torch
    ]
    if not same:
        return {}
    made = same[-1]
    return {
        "made_at": made.made_at[:10],
        "gpus": len(made.gpus),
        "gpu": made.gpus[0] if made.gpus else "",
        "passed": made.count("pass"),
        "failed": made.count("fail"),
        "absent": made.count("absent"),
    }


def hardware_notes(facts: CardFacts) -> list[Line]:
    """One note where such hardware was certified, none where not."""
    known = facts.certificate
    if not known:
        return []
    text = Line("The hardware that it was trained on was certified by `refiner certify` on ")
    text = text + quoted(str(known["made_at"]), "certificate.made_at")
    if known["gpus"]:
        text = text + " (" + number(known["gpus"], "certificate.gpus") + " x "
        text = text + quoted(str(known["gpu"]), "certificate.gpu") + ")"
    text = text + ": " + counted(known["passed"], "certificate.passed", "check") + " passed, "
    text = text + number(known["failed"], "certificate.failed") + " failed, and "
    return [text + number(known["absent"], "certificate.absent") + " could not be made there."]
