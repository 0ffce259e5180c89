"""Drawings within tables (strips, dots, shares of a reward), and interactive charts.

In: numbers and a :class:`Scale`; series. Out: values that ``drawing.html.jinja`` writes as SVG,
coloured by classes of the page's style sheet; charts as JSON values for ``parts.html.jinja``, and a
summary of each series in numbers for print and screen readers.

Places in a strip are percentages, so that it fits any column width. The content of a drawing is
also text in its ``aria-label`` and its tooltip. ``charts.js`` draws a chart (lines over steps or
days, with bands, points and notes) with BokehJS when it scrolls into view. The script comes from
the wheel of bokeh and is part of the page itself, so that it works from any disk, without a network
and without ``eval``. Python's side of bokeh is not used: it takes a second to import and a tenth of
a second per figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from refiner_core.report.printing import finite, plain
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


#: Points of all charts of a page, and the minimum of one series.
MOST_POINTS, _FEWEST_POINTS = 30_000, 8
#: Vertical lines of a chart.
_MOST_MARKS = 60


class Series(NamedTuple):
    """A line of a chart: ``values`` over ``steps``, None if missing.

    ``low`` and ``high`` are the ends of its band. ``place`` (among arms or models) decides its
    colour and dashes; ``notes`` describe each point.
    """

    name: str
    steps: Sequence[Any]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    place: int = 1
    notes: Sequence[str] = ()


def chart(
    series: Sequence[Series], *, of: int = 1, marks: Sequence[float] = (), days: bool = False
) -> dict[str, Any]:
    """A chart of one or several series.

    Parameters
    ----------
    of
        Number of series in all charts of the page: each gets its part of the page's points.
    marks
        Steps with a vertical line.
    days
        Steps are milliseconds since 1970.
    """
    most = max(_FEWEST_POINTS, MOST_POINTS // max(1, of))
    lines = [_line(one, kept_indices(one.values, most)) for one in series]
    return {"lines": lines, "marks": list(marks[:_MOST_MARKS]), "days": days}


def _line(one: Series, kept: Sequence[int]) -> dict[str, Any]:
    columns = {"y": one.values, "low": one.low, "high": one.high}
    return {
        "name": plain(one.name),
        "index": one.place,
        "colour": f"--s{style_of(one.place)}",
        "dash": dash_of(one.place),
        "x": [one.steps[i] for i in kept],
        **{n: [_rounded(column[i]) for i in kept] for n, column in columns.items() if column},
        "notes": [plain(one.notes[i]) for i in kept] if one.notes else [],
    }


def _rounded(value: float | None) -> float | None:
    known = finite(value)
    return None if known is None else float(f"{known:.5g}")


def kept_indices(values: Sequence[float | None], most: int) -> list[int]:
    """Indices of about ``most`` values: of each section its lowest, its highest and its first gap,
    so that thinning keeps spikes and gaps. The ends stay."""
    size = len(values)
    if size <= most:
        return list(range(size))
    there = {i: v for i, value in enumerate(values) if (v := finite(value)) is not None}
    kept = {0, size - 1, *list(there)[:1], *list(there)[-1:]}
    stretches = max(1, (most - 4) // 3)
    for k in range(stretches):
        part = range(k * size // stretches, (k + 1) * size // stretches)
        known = [i for i in part if i in there]
        kept.update([i for i in part if i not in there][:1])
        if known:
            kept |= {min(known, key=there.__getitem__), max(known, key=there.__getitem__)}
    return sorted(kept)


def summary(one: Series) -> dict[str, Any]:
    """A series in numbers: (step, value) of its first, last, lowest and highest point, None if
    it has no finite value, and the number of ``missing`` values."""
    pairs = zip(one.steps, map(finite, one.values), strict=True)
    known = [(step, value) for step, value in pairs if value is not None]
    found = {"series": one, "missing": len(one.values) - len(known)}
    if not known:
        return found | dict.fromkeys(("first", "last", "lowest", "highest"))
    lowest, highest = (pick(known, key=lambda point: point[1]) for pick in (min, max))
    return found | {"first": known[0], "last": known[-1], "lowest": lowest, "highest": highest}


@lru_cache
def library() -> Markup:
    """BokehJS from its wheel."""
    scripts = files("bokeh").joinpath("server/static/js")
    names = ("bokeh.min.js", "bokeh-api.min.js")
    return Markup("\n".join(scripts.joinpath(n).read_text(encoding="utf-8") for n in names))
