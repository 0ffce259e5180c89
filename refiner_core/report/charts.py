"""Interactive charts of pages: lines over steps or days, with bands, points and notes.

In: series. Out: a chart as JSON values for ``parts.html.jinja``, and a summary of each series in
numbers for print and screen readers. ``charts.js`` draws it with BokehJS when it
scrolls into view. The script comes from the wheel of bokeh and is part of the page itself, so that
it works from any disk, without a network and without ``eval``. Python's side of bokeh is not used:
it takes a second to import and a tenth of a second per figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

from markupsafe import Markup

from refiner_core.report.drawing import dash_of, style_of
from refiner_core.report.printing import finite, plain

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
