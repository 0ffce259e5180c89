"""Evaluations as tables and as the Hub's ``model-index``.

In: the evaluations of :class:`CardFacts`. Out: one table per protocol, with models side by side
only where the protocol is the same, and index entries for the card's own model. A value that is not
a finite number is shown as missing and never published as a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refiner_core.cards.facts import CardFacts, finite

_ORDER = ("base", "random_copier", "sft", "rft", "grpo", "command")
_LABELS = {
    "base": "base",
    "random_copier": "random copier (floor)",
    "sft": "SFT",
    "rft": "RFT",
    "grpo": "GRPO",
    "command": "external",
}
_MISSING = "—"


@dataclass(frozen=True)
class Table:
    """One protocol's numbers, ready to print."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def result_tables(facts: CardFacts) -> list[Table]:
    """One table per (protocol, decoding), in the order in which they were evaluated."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry in facts.evaluations:
        groups.setdefault((entry["protocol"], entry["decoding"]), []).append(entry)
    return [_table(facts, *key, entries) for key, entries in groups.items()]


def _table(
    facts: CardFacts, protocol: str, decoding: str, entries: list[Mapping[str, Any]]
) -> Table:
    models = sorted({entry["stage"] for entry in entries}, key=_rank)
    metrics = list(dict.fromkeys(entry["metric"] for entry in entries))
    (usual, _), *_ = Counter(entry["n"] for entry in entries).most_common(1)
    cells = {(e["metric"], e["stage"]): cell(e, with_n=e["n"] != usual) for e in entries}
    name = entries[0].get("protocol_name") or "protocol"
    return Table(
        title=f"{name}, {decoding} decoding, n = {usual} (protocol `{protocol[:12]}`)",
        header=("metric", *(_label(model, facts.stage) for model in models)),
        rows=tuple(
            (f"`{metric}`", *(cells.get((metric, model), _MISSING) for model in models))
            for metric in metrics
        ),
    )


def _rank(model: str) -> tuple[int, str]:
    return (_ORDER.index(model) if model in _ORDER else len(_ORDER), model)


def _label(model: str, own: str) -> str:
    label = _LABELS.get(model, f"`{model}`")
    return f"**{label} (this model)**" if model == own else label


def cell(entry: Mapping[str, Any], *, with_n: bool = True) -> str:
    """``0.512 [0.480, 0.543], n = 64``; a dash where there is no number."""
    n = f", n = {entry['n']}" if with_n else ""
    value, low, high = (finite(entry.get(key)) for key in ("value", "low", "high"))
    if value is None:
        return f"{_MISSING}{n}"
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{value:.3f}{interval}{n}"


def without_value(facts: CardFacts) -> list[str]:
    """Names of the numbers that could not be computed."""
    return [
        f"`{entry['metric']}` of {entry['stage']} ({entry['decoding']})"
        for entry in facts.evaluations
        if finite(entry.get("value")) is None
    ]


def model_index(facts: CardFacts) -> list[dict[str, Any]]:
    """The ``model-index`` of the front matter; empty where the model has no finite number."""
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in facts.evaluations:
        value = finite(entry.get("value"))
        if entry["stage"] != facts.stage or value is None:
            continue
        protocol, decoding = entry["protocol"], entry["decoding"]
        name = entry.get("protocol_name") or "held-out questions"
        result = results.setdefault(
            (protocol, decoding),
            {
                "task": {"type": "text-generation", "name": "citation-grounded refinement"},
                "dataset": {"type": "refiner-held-out", "name": f"{name} ({protocol[:12]})"},
                "metrics": [],
            },
        )
        result["metrics"].append(
            {
                "type": entry["metric"],
                "name": f"{entry['metric']} ({decoding}, n = {entry['n']} prompts)",
                "value": round(value, 6),
            }
        )
    return [{"name": facts.name, "results": list(results.values())}] if results else []
