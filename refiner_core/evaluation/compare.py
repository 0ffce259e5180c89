"""Compare two models, or two arms over several seeds, from their evaluations.

In: output folders of evaluations. Out: per decoding and metric the paired difference with its
interval. Different protocols are refused: their numbers answer different questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.errors import ConfigurationError
from refiner_core.evaluation.metrics import weighed
from refiner_core.evaluation.results import load_results
from refiner_core.evaluation.samples import TEXTS, load_samples
from refiner_core.evaluation.statistics import paired_difference_over_seeds


def compare_results(
    a: Sequence[Path], b: Sequence[Path], *, metrics: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """First minus second, for every decoding and metric that all folders have.

    Parameters
    ----------
    a, b
        Output folders, one per seed; position s on both sides is the same seed.
    metrics
        Only these. By default all, but for ``reward`` (of agents ``partial`` too) where it is
        combined differently: arms of an ablation of the reward are compared on everything else.

    Returns
    -------
    list of dict
        ``decoding``, ``metric``, ``protocol``, ``protocol_name``, ``a`` and ``b`` (means over the
        seeds), ``difference``, ``low``, ``high``, ``n`` (prompts), ``seeds``, ``excluded`` (prompts
        without a value somewhere), ``p_value``, ``interval``. A metric without a prompt in common
        has no entry.

    Raises
    ------
    ConfigurationError
        If protocols or prompts differ, or sides have different numbers of seeds.
    """
    if not a or len(a) != len(b):
        raise ConfigurationError(
            f"{len(a)} evaluations cannot be paired with {len(b)}",
            expected="one folder per seed, the same seeds on both sides",
            fix="evaluate the missing seeds, or leave them out on both sides",
        )
    folders = [*a, *b]
    tables = [_entries(folder) for folder in folders]
    samples = _SampleFiles()
    rows = []
    for key, first in tables[0].items():
        decoding, metric = key
        if (metrics is not None and metric not in metrics) or not all(
            key in table for table in tables
        ):
            continue
        entries = [table[key] for table in tables]
        apart = len({e["protocol"] for e in entries}) > 1
        if metrics is None and weighed(metric) and apart:
            continue
        _same_protocol(entries, folders)
        sides = [samples.load(f / e["samples_file"]) for f, e in zip(folders, entries, strict=True)]
        found = paired_difference_over_seeds(sides[: len(a)], sides[len(a) :], metric)
        if found.n == 0:
            continue
        values = [float(entry["value"]) for entry in entries]
        numbers = found._asdict()
        rows.append(
            {
                "decoding": decoding,
                "metric": metric,
                "protocol": first["protocol"],
                "protocol_name": first["protocol_name"],
                "a": sum(values[: len(a)]) / len(a),
                "b": sum(values[len(a) :]) / len(b),
                "difference": numbers.pop("value"),
                **numbers,
            }
        )
    return rows


class _SampleFiles:
    """Per-sample rows, each file read once for all its metrics."""

    def __init__(self) -> None:
        self.known: dict[Path, list[dict[str, Any]]] = {}

    def load(self, path: Path) -> list[dict[str, Any]]:
        if path not in self.known:
            self.known[path] = load_samples(path, TEXTS)
        return self.known[path]


def _entries(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Entries of an evaluation by (decoding, metric)."""
    return {(e["decoding"], e["metric"]): e for e in load_results(folder)["evaluations"]}


def _same_protocol(entries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Refuse unless all numbers were measured the same way; say in what they differ."""
    first = entries[0]
    for entry, folder in zip(entries[1:], folders[1:], strict=True):
        if entry["protocol"] == first["protocol"]:
            continue
        fields = _differing(
            load_results(folders[0])["protocols"][first["protocol"]],
            load_results(folder)["protocols"][entry["protocol"]],
        )
        raise ConfigurationError(
            f"{first['metric']} ({first['decoding']}) was measured in two ways: "
            f"{first['protocol_name']} in {folders[0]} and {entry['protocol_name']} in {folder} "
            f"differ in {', '.join(fields)}",
            expected="one protocol",
            fix="evaluate both with the same settings, or leave this metric out",
        )


def _differing(first: Mapping[str, Any], second: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the fields in which two protocols differ; provenance aside."""
    found: list[str] = []
    for key in sorted({*first, *second} - ({"data"} if not prefix else set())):
        left, right = first.get(key), second.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _differing(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(prefix + key)
    return found
