"""Drawings within tables: strips, dots, shares of a reward.

In: numbers and a :class:`Scale`. Out: values that ``drawing.html.jinja`` writes as SVG, coloured by
classes of the page's style sheet. Places in a strip are percentages, so that it fits any
column width. The content of a drawing is also text in its ``aria-label`` and its
tooltip. Curves are charts (:mod:`refiner_core.report.charts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from refiner_core.report.printing import finite
from refiner_core.report.run.run_report import Row

#: Marks of a mean by verdict: distinguished by form, not by colour alone.
SHAPES: Mapping[str, str] = {
    "better": "M0 -6 L6 5 L-6 5Z",
    "worse": "M0 6 L6 -5 L-6 -5Z",
    "not clear": "M-4.5 -4.5H4.5V4.5H-4.5Z",
    "judge moved": "M0 -6 L6 0 L0 6 L-6 0Z",
    "baseline": "M-5 -1.5H-1.5V-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5Z",
}
#: Marks of arms and models, by index.
DOTS = tuple(SHAPES[k] for k in ("baseline", "not clear", "better", "worse", "judge moved"))
_COLOURS = 7
_MARGIN = 3.0


@dataclass(frozen=True)
class Scale:
    """From numbers to percentages of a width, with round numbers as ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decimals: int

    def place(self, value: float) -> float:
        """Place of a number, in percent; values outside are put at the edge."""
        share = (value - self.low) / (self.high - self.low)
        return _MARGIN + (100 - 2 * _MARGIN) * min(1.0, max(0.0, share))


def scale_for(values: Iterable[float | None], ticks: int = 4) -> Scale | None:
    """A scale for all the numbers; None if there are none."""
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    low, high = min(known), max(known)
    if high - low < 1e-12 * max(1.0, abs(high)):
        pad = abs(high) / 10 or 0.5
        low, high = low - pad, high + pad
    step = _round_step((high - low) / ticks)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return Scale(low, high, tuple(i * step for i in range(first, last + 1)), decimals)


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 5) if rough <= m * power), 10 * power)


def strip(
    scale: Scale, value: float, ends: Sequence[float | None], mark: str, label: str, **more: Any
) -> dict[str, Any]:
    """Content of one strip: a mean, the ends of its interval, the seeds' numbers (``points``);
    ``zero``: it is a difference, and ``matters`` its smallest relevant size."""
    low, high = ends
    shown = {"scale": scale, "value": value, "low": low, "high": high, "mark": mark, "label": label}
    return {"points": (), "zero": False, "matters": None, **shown, **more}


# ---------------------------------------------------------------- marks of several arms or models


def style_of(index: int) -> int:
    """The colour of an arm by its index; the baseline (0) has the text colour."""
    return 0 if index == 0 else 1 + (index - 1) % _COLOURS


def dash_of(index: int) -> int:
    """Dashes of an arm's line, so that colours can repeat."""
    return 0 if index == 0 else (index - 1) // _COLOURS % 4


# ---------------------------------------------------------------- shares of a reward


def shares(parts: Sequence[Row]) -> tuple[list[dict[str, Any]], list[Row]]:
    """Parts of a reward that count, each starting at the end of the previous one (from 0), and
    those that were only measured."""
    counted = [p for p in parts if finite(p["share"]) is not None and p["weight"] != 0]
    ends = [0.0, *accumulate(part["share"] for part in counted)]
    scale = scale_for(ends, ticks=3)
    made = [
        {"part": part, "start": start, "end": end, "scale": scale}
        for part, (start, end) in zip(counted, pairwise(ends), strict=True)
    ]
    return made, [p for p in parts if p not in counted]
