"""In what two sides came out differently: prepared rows, training steps, samples, numbers.

In: pairs of stages. Out: a :class:`FileRows` per file of prepared rows that is not bitwise the
same, a :class:`Divergence` per training (the first step whose numbers or rollouts are not bitwise
the same), a :class:`NumberChange` per metric. Numbers of different protocols are refused, with the
names of the fields in which these differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair
from infra.store.traces import list_rollouts, read_metrics, read_rollouts
from refiner_core.contract.errors import RefinerError
from refiner_core.contract.kinds import TRAINED
from refiner_core.contract.proofs import MEASURED

FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")
_FEW_ROWS = 5


@dataclass(frozen=True)
class FileRows:
    """One file of prepared rows.

    Attributes
    ----------
    a_rows, b_rows
        How many; None where a side has no such file (any more).
    only_a, only_b, changed
        How many rows one side alone has, and how many both have with other content.
    examples
        A few ids for each of the three.
    order
        The first position at which the rows that both have stand in another order; None: nowhere.
    columns
        Of the first changed row, the columns that differ.
    """

    stage: str
    file: str
    a_rows: int | None
    b_rows: int | None
    only_a: int = 0
    only_b: int = 0
    changed: int = 0
    examples: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), ())
    order: int | None = None
    columns: tuple[str, ...] = ()


def row_changes(pairs: Sequence[Pair]) -> list[FileRows]:
    """Prepared rows that differ, over all `data` stages."""
    found = []
    for pair in pairs:
        if pair.kind != "data" or (both := pair.both) is None:
            continue
        found += [c for name in FILES if (c := _file(pair.name, name, *both)) is not None]
    return found


def _file(stage: str, name: str, a: Half, b: Half) -> FileRows | None:
    paths = [None if h.output is None else h.output / name for h in (a, b)]
    digests = [_digest(h, name) for h in (a, b)]
    if digests[0] is not None and digests[0] == digests[1]:
        return None
    kept = [path if path is not None and path.exists() else None for path in paths]
    if kept[0] is None and kept[1] is None:
        return None
    tables = [None if path is None else _hashes(path) for path in kept]
    one, other = tables
    if one is None or other is None:
        counts = [None if t is None else len(t) for t in tables]
        return FileRows(stage, name, counts[0], counts[1])
    if one == other and list(one) == list(other):
        return None
    only_a = [k for k in one if k not in other]
    only_b = [k for k in other if k not in one]
    changed = [k for k in one if k in other and one[k] != other[k]]
    common = ([k for k in one if k in other], [k for k in other if k in one])
    order = next((i for i, (x, y) in enumerate(zip(*common, strict=True)) if x != y), None)
    assert kept[0] is not None, "read above"
    assert kept[1] is not None, "read above"
    return FileRows(
        stage,
        name,
        len(one),
        len(other),
        len(only_a),
        len(only_b),
        len(changed),
        (tuple(only_a[:_FEW_ROWS]), tuple(only_b[:_FEW_ROWS]), tuple(changed[:_FEW_ROWS])),
        order,
        _columns(kept[0], kept[1], changed[0]) if changed else (),
    )


def _digest(half: Half, name: str) -> str | None:
    result = half.record.result if half.record is not None else None
    files = result.files if result is not None else ()
    return next((f.sha256 for f in files if f.path == name), None)


def _hashes(path: Path) -> dict[str, str]:
    """``sample_id`` -> hash of the row, in the file's order."""
    import pyarrow.parquet as pq

    found = {}
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            text = json.dumps(row, sort_keys=True, default=str)
            found[str(row["sample_id"])] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _columns(a: Path, b: Path, sample_id: str) -> tuple[str, ...]:
    one, other = (_row(path, sample_id) for path in (a, b))
    return tuple(k for k in dict.fromkeys([*one, *other]) if one.get(k) != other.get(k))


def _row(path: Path, sample_id: str) -> dict[str, object]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path, filters=[("sample_id", "==", sample_id)]).to_pylist()
    return dict(rows[0]) if rows else {}


_COMPARED = ("sample", *TRAINED)
#: In the order in which a rollout comes about.
_FIELDS = (
    *("prompt_index", "sample_id", "response_ids", "response_text", "logprobs", "finish_reason"),
    *("status", "judgements", "reward", "advantage"),
)
_FEW, _CUT = 6, 160


@dataclass(frozen=True)
class RolloutChange:
    """The first rollout of a step that differs: in which fields, and the first of them."""

    sample_id: str
    sample_index: int
    fields: tuple[str, ...]
    a: str
    b: str


@dataclass(frozen=True)
class Divergence:
    """How far two trainings are the same.

    Attributes
    ----------
    step
        The first that differs; None where none does, as far as both have gone.
    same_steps
        How many steps before that are bitwise the same.
    a_steps, b_steps
        The last step that each has logged.
    metrics
        At that step: name -> both values, those that differ.
    rollout
        The first rollout of that step that differs; None where none does, or none are kept.
    note
        What could not be compared.
    """

    stage: str
    step: int | None
    same_steps: int
    a_steps: int
    b_steps: int
    metrics: Mapping[str, tuple[Any, Any]]
    rollout: RolloutChange | None = None
    note: str = ""


def divergences(pairs: Sequence[Pair]) -> list[Divergence]:
    """Each pair of training stages of which both sides have logged something."""
    found = []
    for pair in pairs:
        if pair.kind not in _COMPARED or (both := pair.both) is None:
            continue
        if (one := _divergence(pair.name, *both)) is not None:
            found.append(one)
    return found


def _divergence(stage: str, a: Half, b: Half) -> Divergence | None:
    lines = [_lines(h.file("metrics")) for h in (a, b)]
    rollouts = [_rollout_files(h.file("rollouts")) for h in (a, b)]
    one, other = lines
    if not (one or rollouts[0]) or not (other or rollouts[1]):
        return None
    last = [max([*of, *kept], default=0) for of, kept in zip(lines, rollouts, strict=True)]
    steps = sorted({*one, *other, *rollouts[0], *rollouts[1]})
    same = 0
    for step in (s for s in steps if s <= min(last)):
        numbers = _numbers(one.get(step, []), other.get(step, []))
        rollout = _rollout(rollouts[0].get(step), rollouts[1].get(step))
        if numbers or rollout is not None:
            return Divergence(stage, step, same, last[0], last[1], numbers, rollout)
        same += 1
    note = ""
    if last[0] != last[1]:
        note = f"one has gone to step {last[0]}, the other to step {last[1]}"
    return Divergence(stage, None, same, last[0], last[1], {}, None, note)


def _lines(path: Path | None) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for line in read_metrics(path) if path is not None else ():
        found.setdefault(line.step, []).append(line.metrics)
    return found


def _numbers(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> dict[str, tuple[Any, Any]]:
    one, other = _merged(a), _merged(b)
    names = [n for n in dict.fromkeys([*one, *other]) if not n.startswith(MEASURED)]
    return {n: (one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)}


def _merged(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for line in lines for name, value in line.items()}


def _rollout_files(folder: Path | None) -> dict[int, Path]:
    if folder is None:
        return {}
    return {int(p.stem.removeprefix("step-")): p for p in list_rollouts(folder)}


def _rollout(a: Path | None, b: Path | None) -> RolloutChange | None:
    """The first rollout that differs; where one side keeps none of the step, nothing is said."""
    if a is None or b is None or a.read_bytes() == b.read_bytes():
        return None
    one, other = read_rollouts(a), read_rollouts(b)
    for x, y in zip(one, other, strict=False):
        if fields := _fields_apart(x, y):
            which = (str(x.get("sample_id")), int(x.get("sample_index") or 0))
            return RolloutChange(*which, fields, _cut(x.get(fields[0])), _cut(y.get(fields[0])))
    if len(one) != len(other):
        row = (one if len(one) > len(other) else other)[min(len(one), len(other))]
        which = (str(row.get("sample_id")), int(row.get("sample_index") or 0))
        return RolloutChange(*which, ("count",), str(len(one)), str(len(other)))
    return None


def _fields_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    names = dict.fromkeys([*(f for f in _FIELDS if f in a or f in b), *a, *b])
    return tuple(name for name in names if a.get(name) != b.get(name))


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _CUT else f"{text[:_CUT]}…"


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
            fields = _protocols_apart(_protocol(a, x), _protocol(b, y))
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


def _protocols_apart(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted({*a, *b} - (set(_LEFT_OUT) if not prefix else set())):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            found += _protocols_apart(x, y, f"{prefix}{key}.")
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
    from refiner_core.evaluation.metrics import load_samples

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
