"""Numbers of a run as tables: all models of one way of measuring side by side, and what changed.

In: the numbers and changes of a :class:`~refiner_core.report.run.document.RunReport`. Out:
:class:`Table` values with their drawings; the page lays them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from refiner_core.evaluation.metrics import main_metrics
from refiner_core.report import printing
from refiner_core.report.drawing import Strip, scale_for, strip
from refiner_core.report.run import drawing
from refiner_core.report.run.document import ChangeRow, NumberRow, RunReport
from refiner_core.report.run.words import way_text

MOST_NUMBERS = 3_000


@dataclass(frozen=True)
class MetricLine:
    """A metric of a table: the cells of its models, the drawing of all, what training changed."""

    metric: str
    cells: Mapping[str, NumberRow]
    decimals: int
    drawing: Markup
    change: ChangeRow | None
    verdict: str
    change_decimals: int
    change_drawing: Markup


@dataclass(frozen=True)
class Table:
    """Numbers that were measured alike: one protocol file and decoding. ``pair`` is before and
    after; the first ``main`` of the lines are the main metrics; ``protocols`` are the fingerprints
    of its numbers with what they say. ``changes`` come with what is said of them and their digits.
    """

    name: str
    models: tuple[str, ...]
    pair: tuple[str, str] | None
    lines: tuple[MetricLine, ...]
    main: int
    protocols: tuple[tuple[str, str], ...]
    left_out: int
    changes: tuple[tuple[ChangeRow, str, int], ...]


def model_index(report: RunReport) -> dict[str, int]:
    """A model's place decides its colour in every view."""
    return {m: i for i, m in enumerate(dict.fromkeys(n.model for n in report.numbers))}


def tables(report: RunReport) -> list[Table]:
    """All numbers; sampled decoding first, for there a policy shows what training did to it."""
    index = model_index(report)
    by_way: dict[tuple[str, str], list[NumberRow]] = {}
    for row in report.numbers[:MOST_NUMBERS]:
        by_way.setdefault((row.under, row.decoding), []).append(row)
    ways = sorted(by_way, key=lambda way: way[1] != "sampled")
    return [_table(way, by_way[way], report, index) for way in ways]


def _table(
    way: tuple[str, str], rows: Sequence[NumberRow], report: RunReport, index: Mapping[str, int]
) -> Table:
    under, decoding = way
    changes = [c for c in report.changes if (c.under, c.decoding) == way]
    pair = (changes[0].before, changes[0].after) if changes else None
    by_metric: dict[str, dict[str, NumberRow]] = {}
    for row in rows:
        by_metric.setdefault(row.metric, {})[row.model] = row
    of_pair = {c.metric: c for c in changes if (c.before, c.after) == pair}
    main = main_metrics(r.metric for r in rows if not r.reference)
    order = dict.fromkeys((*main, *by_metric))
    every = sum((r.under, r.decoding) == way for r in report.numbers)
    return Table(
        name=way_text(report, under, decoding),
        models=tuple(m for m in index if any(r.model == m for r in rows)),
        pair=pair,
        lines=tuple(_metric_line(m, by_metric[m], of_pair.get(m), index) for m in order),
        main=len(main),
        protocols=tuple(dict.fromkeys((r.protocol, r.protocol_name) for r in rows)),
        left_out=every - len(rows),
        changes=tuple((c, verdict(c), change_decimals(c)) for c in changes),
    )


def _metric_line(
    metric: str,
    cells: Mapping[str, NumberRow],
    change: ChangeRow | None,
    index: Mapping[str, int],
) -> MetricLine:
    widths = [c.high - c.low for c in cells.values() if c.low is not None and c.high is not None]
    values = [abs(c.value) for c in cells.values() if printing.finite(c.value) is not None
              and c.value is not None]  # fmt: skip
    widest = max((w for w in widths if w > 0), default=None)
    decimals = printing.decimals_for(widest, max(values, default=None))
    marks = [
        drawing.Mark(index[m], m, c.value, printing.finite(c.low), printing.finite(c.high))
        for m in sorted(cells, key=lambda m: index[m])
        if (c := cells[m]).value is not None and printing.finite(c.value) is not None
    ]
    said = "; ".join(
        f"{m.model} {printing.with_interval(m.value, m.low, m.high, decimals)}" for m in marks
    )
    return MetricLine(
        metric,
        cells,
        decimals,
        drawing.models(marks, f"{metric}: {said}"),
        change,
        verdict(change) if change is not None else "",
        change_decimals(change) if change is not None else decimals,
        change_strip(change) if change is not None else Markup(""),
    )


def change_decimals(change: ChangeRow) -> int:
    """Digits by how well the change is known."""
    low, high = change.low, change.high
    width = None if low is None or high is None else high - low
    return printing.decimals_for(width, change.difference)


def change_strip(change: ChangeRow) -> Markup:
    """What changed, with its interval, against 0."""
    scale = scale_for((0.0, change.difference, change.low, change.high), ticks=3)
    low, high, digits = change.low, change.high, change_decimals(change)
    said = printing.with_interval(change.difference, low, high, digits, signed=True)
    label = f"{change.metric}, {change.after} minus {change.before}: {said}"
    shown = Strip(change.difference, low, high, (), verdict(change), label, zero=True)
    return strip(shown, scale) if scale is not None else Markup("")


def verdict(change: ChangeRow) -> str:
    """``better`` or ``worse`` where the interval keeps clear of 0 and one of them is known to be
    good; else ``changed`` or ``not clear``."""
    low, high = printing.finite(change.low), printing.finite(change.high)
    if low is None or high is None or low <= 0 <= high:
        return "not clear"
    if change.higher_is_better is None:
        return "changed"
    return "better" if (change.difference > 0) == change.higher_is_better else "worse"
