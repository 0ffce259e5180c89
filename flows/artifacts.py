"""Parts of a stage's report for the Prefect UI, as markdown. Pure; no Prefect import.

In: a terminal :class:`~refiner_core.contract.types.StageView` with its report. Out: texts and rows.
Reports differ by kind and version, so no field is required: metrics are under ``evaluations`` and
``reference``, a card is markdown under ``card``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.contract.types import StageView
from refiner_core.report.printing import short, table

_COLUMNS = ("stage", "decoding", "metric", "value", "low", "high", "n", "protocol_name")


def artifact_key(*parts: str) -> str:
    """A key in Prefect's form: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def artifacts_of(recipe: str, view: StageView) -> list[dict[str, str]]:
    """Artifacts of a stage's report, in Prefect's form. A ``key`` is the same in every run of a
    recipe, so that the UI has a history."""
    name, found = view.name, list[tuple[str, str, str]]()
    if rows := numbers_in(view.report):
        found.append(("numbers", f"### {name}\n\n{markdown_table(rows)}", f"Numbers of {name}"))
    if card := view.report.get("card"):
        text = inert(without_front_matter(str(card)))
        found.append(("card", text, "The model card as published"))
    return [
        {"key": artifact_key(recipe, name, what), "markdown": text, "description": about}
        for what, text, about in found
    ]


def numbers_in(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every metric of a report, in its order."""
    found = [*report.get("evaluations", ()), *report.get("reference", ())]
    return [{c: number[c] for c in _COLUMNS if c in number} for number in found]


def without_front_matter(card: str) -> str:
    """Markdown without the ``---`` block, which the Hub reads and a page would show as text."""
    if card.startswith("---\n") and "\n---\n" in card[3:]:
        return card[3:].partition("\n---\n")[2].lstrip()
    return card


def inert(markdown: str) -> str:
    """Markdown without HTML and images, in code and outside: parts of it come from rows, answers or
    judges, and a browser would execute or fetch them."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "‹", markdown).replace("![", "!\\[")


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a markdown table; columns in the order of their first occurrence."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, ([row.get(c, "") for c in columns] for row in rows), _cell)


def _cell(value: Any) -> str:
    text = short(value) if isinstance(value, float) else str("" if value is None else value)
    return inert(text).replace("|", "\\|").replace("\n", " ")
