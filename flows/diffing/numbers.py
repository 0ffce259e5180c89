"""How two sides compare on evaluations: under one protocol only, prompt by prompt.

In: pairs of `evaluate` stages. Out: a :class:`NumberChange` per metric. Numbers of different
protocols are refused, with the names of the fields in which these differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.diffing.sides import Half, Pair
from refiner_core.contract.errors import RefinerError

_LEFT_OUT = ("data",)  # of a protocol: where its prompts came from, no part of what they are


@dataclass(frozen=True)
class NumberChange:
    """One metric of one model. ``difference`` is second minus first, paired over prompts (of these
    two checkpoints); None where the protocols differ, which ``refused`` names."""

    stage: str
    decoding: str
    metric: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    refused: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether both are the same number under the same protocol."""
        names = ("value", "low", "high", "n")
        return not self.refused and all(self.a.get(n) == self.b.get(n) for n in names)


@dataclass(frozen=True)
class SampleChange:
    """The first sample of an evaluation that differs, and in which columns; ``count`` samples do
    so."""

    stage: str
    decoding: str
    sample_id: str
    fields: tuple[str, ...]
    count: int
    of: int


def number_changes(pairs: Sequence[Pair]) -> list[NumberChange]:
    """Every metric that both sides have."""
    found = []
    for pair in pairs:
        if pair.kind == "evaluate" and (both := pair.both) is not None:
            found += _of_pair(pair.name, *both)
    return found


def sample_changes(pairs: Sequence[Pair]) -> list[SampleChange]:
    """Evaluations under one protocol whose samples are not bitwise the same."""
    found = []
    for pair in pairs:
        if pair.kind != "evaluate" or (both := pair.both) is None:
            continue
        for decoding, files in _sample_files(*both).items():
            change = _samples(pair.name, decoding, both, files)
            if change is not None:
                found.append(change)
    return found


def _of_pair(stage: str, a: Half, b: Half) -> list[NumberChange]:
    one, other = _entries(a), _entries(b)
    paired = _paired(a, b)
    found = []
    for key in (k for k in one if k in other):
        x, y = one[key], other[key]
        if x["protocol"] != y["protocol"]:
            fields = _differing(_protocol(a, x), _protocol(b, y))
            found.append(NumberChange(stage, *key, x, y, refused=tuple(fields)))
            continue
        found.append(NumberChange(stage, *key, x, y, *paired.get(key, (None, None, None))))
    return found


def _entries(half: Half) -> dict[tuple[str, str], Mapping[str, Any]]:
    entries = half.report.get("evaluations") or ()
    return {(str(e["decoding"]), str(e["metric"])): e for e in entries}


def _protocol(half: Half, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (half.report.get("protocols") or {}).get(entry["protocol"]) or {}
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted({*a, *b} - (set(_LEFT_OUT) if not prefix else set())):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            found += _differing(x, y, f"{prefix}{key}.")
        elif x != y:
            found.append(prefix + key)
    return found


def _paired(a: Half, b: Half) -> dict[tuple[str, str], tuple[float, float | None, float | None]]:
    """Paired differences with their intervals, second minus first, of what is under one protocol;
    none where samples are gone."""
    from refiner_core.evaluation.statistics import paired_difference_over_seeds

    found = {}
    one, other = _entries(a), _entries(b)
    rows: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    for key, entry in one.items():
        if key not in other or entry["protocol"] != other[key]["protocol"]:
            continue
        try:
            if key[0] not in rows:
                rows[key[0]] = (_load(a, entry), _load(b, other[key]))
            x, y = rows[key[0]]
            difference = paired_difference_over_seeds([y], [x], key[1])
        except RefinerError:  # the numbers themselves are shown all the same
            continue
        if difference.n:
            found[key] = (difference.value, difference.low, difference.high)
    return found


def _load(half: Half, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    from refiner_core.evaluation.samples import load_samples

    assert half.output is not None, "a stage with a report is done"
    return load_samples(half.output / str(entry["samples_file"]))


def _sample_files(a: Half, b: Half) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Decoding -> an entry of each side, of those under one protocol."""
    one, other = _entries(a), _entries(b)
    found = {}
    for key, entry in one.items():
        if key in other and entry["protocol"] == other[key]["protocol"]:
            found[key[0]] = (entry, other[key])
    return found


def _samples(
    stage: str,
    decoding: str,
    both: tuple[Half, Half],
    entries: tuple[Mapping[str, Any], Mapping[str, Any]],
) -> SampleChange | None:
    try:
        one, other = (_load(h, e) for h, e in zip(both, entries, strict=True))
    except RefinerError:
        return None
    first, count = None, 0
    for x, y in zip(one, other, strict=False):
        fields = tuple(k for k in dict.fromkeys([*x, *y]) if x.get(k) != y.get(k))
        if fields:
            first = first or (str(x.get("sample_id")), fields)
            count += 1
    if first is None:
        return None
    return SampleChange(stage, decoding, *first, count, len(one))
