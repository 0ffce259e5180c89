"""The course of a training, as a short table and a line of blocks.

In: the curves in the report of the card's own stage. Out: at most ten steps side by side, and a
sparkline of the first curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from refiner_core.cards.agents import is_agent
from refiner_core.cards.facts import CardFacts, finite
from refiner_core.cards.printed import MISSING, Line, joined, number

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
