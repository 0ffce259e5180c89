"""Parts of a stage's report that the Prefect UI shows, as markdown. Pure; no Prefect import.

In: a terminal :class:`~refiner_core.contract.types.StageView` with its report. Out: texts and rows.
Reports differ by kind and grow with time, so their parts are recognised by form and nothing is
required: a *number* is a mapping with ``metric`` and ``value``; a *curve* is a list of
``[step, value]`` pairs under the key ``curve`` or inside ``curves``; a *card* is markdown under
``card``, or a file that ``card`` or ``card_path`` names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.orchestrator.timeline import Incident, clock_text
from refiner_core.contract.types import StageView
from refiner_core.report.printing import table

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 60
_CURVE_ROWS = 12
#: Prefect shows markdown as a whole; a card is a few kilobytes.
_CARD_LIMIT_BYTES = 200_000
_COLUMNS = ("stage", "decoding", "metric", "value", "low", "high", "n", "protocol_name")


@dataclass(frozen=True)
class Artifact:
    """A markdown artifact. ``key`` is the same in every run of a recipe: the UI has a history."""

    key: str
    markdown: str
    description: str


def artifact_key(*parts: str) -> str:
    """A key as Prefect wants it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def artifacts_of(recipe: str, view: StageView) -> list[Artifact]:
    """All that the stage's report has to show."""
    name, rows = view.name, numbers_in(view.report)
    numbers = f"### {name}\n\n{markdown_table(rows)}" if rows else ""
    curves = [curve_markdown(*curve) for curve in curves_in(view.report).items()]
    found = (
        ("numbers", numbers, f"Numbers of {name}"),
        ("curves", "\n\n".join(curves), f"Curves of {name}"),
        ("card", inert(card_in(view.report)), "The model card as published"),
    )
    return [
        Artifact(artifact_key(recipe, name, w), text, about) for w, text, about in found if text
    ]


def shortened(text: str, path: str) -> str:
    """As much of a long text as the UI bears, and where the rest is."""
    if len(text) <= _CARD_LIMIT_BYTES:
        return text
    whole = text[:_CARD_LIMIT_BYTES].rpartition("\n")[0]
    return f"{whole}\n\nThe rest is in `{path}`.\n"


def incidents_markdown(incidents: Sequence[Incident]) -> str:
    """The timeline as a table, and what it cost in all."""
    rows = [
        {
            "time (UTC)": clock_text(i.at),
            "stage": i.stage,
            "what": i.text,
            "state": "resolved" if i.resolved else "open",
        }
        for i in incidents
    ]
    steps = sum(i.lost_steps or 0 for i in incidents)
    return f"{markdown_table(rows)}\n\n{steps} steps were done again."


def numbers_in(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every evaluated number of a report, in its order."""
    return [
        {c: found[c] for c in _COLUMNS if c in found}
        for found in _mappings(report)
        if "metric" in found and "value" in found
    ]


def curves_in(report: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Every curve of a report by the name of what it belongs to, without points that are NaN."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for path, value in _items(report):
        *parents, last = path
        if not isinstance(value, list | tuple):
            continue
        if last == "curve" or "curves" in parents:
            points = [(float(p[0]), float(p[1])) for p in value if _is_point(p)]
            name = parents[-1] if last == "curve" and parents else last
            if points:
                curves[name.replace("_", " ")] = points
    return curves


def card_in(report: Mapping[str, Any]) -> str:
    """The model card's markdown without its YAML head, or the empty string."""
    for name in ("card", "card_path"):
        value = report.get(name)
        if not isinstance(value, str) or not value:
            continue
        if "\n" in value:
            return without_front_matter(value)
        path = Path(value)
        if path.is_file() and path.stat().st_size <= _CARD_LIMIT_BYTES:
            return without_front_matter(path.read_text(encoding="utf-8"))
    return ""


def without_front_matter(card: str) -> str:
    """Markdown without the ``---`` block that the Hub reads and a page would show as rubble."""
    if card.startswith("---\n") and "\n---\n" in card[3:]:
        return card[3:].partition("\n---\n")[2].lstrip()
    return card


def inert(markdown: str) -> str:
    """Markdown without HTML and images, within code as outside: a row, an answer or a judge may
    have written a part of it, and a browser would fetch and obey."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "‹", markdown).replace("![", "!\\[")


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a markdown table; columns in the order in which they first occur."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, ([row.get(c, "") for c in columns] for row in rows), _cell)


def curve_markdown(name: str, points: Sequence[tuple[float, float]]) -> str:
    """A curve as a sparkline and a short table."""
    values = [value for _, value in points]
    picked = [points[i] for i in _spread(len(points), _CURVE_ROWS)]
    shown = markdown_table([{"step": _number(s), name: _number(v)} for s, v in picked])
    low, high = _number(min(values)), _number(max(values))
    return f"### {inert(name)}\n\n`{sparkline(values)}` {low} to {high}\n\n{shown}"


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of blocks, lowest to highest; at most 60 of them, evenly picked."""
    shown = [values[i] for i in _spread(len(values), _SPARK_WIDTH)]
    low, high = min(shown), max(shown)
    if low == high:
        return _BLOCKS[0] * len(shown)
    return "".join(_BLOCKS[round((v - low) / (high - low) * (len(_BLOCKS) - 1))] for v in shown)


def _spread(count: int, limit: int) -> list[int]:
    """At most ``limit`` indices, evenly spaced, first and last included."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def _items(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value inside nested mappings, with the keys that lead to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, str(key)), inner
            yield from _items(inner, (*path, str(key)))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping inside, however deep."""
    if isinstance(value, Mapping):
        yield value
        for inner in value.values():
            yield from _mappings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _mappings(inner)


def _is_point(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(v, int | float) and math.isfinite(v) for v in value)
    )


def _cell(value: Any) -> str:
    text = _number(value) if isinstance(value, float) else str("" if value is None else value)
    return inert(text).replace("|", "\\|").replace("\n", " ")


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) and abs(value) < 1e4 else f"{value:g}"
