"""In what two sides came out differently: prepared rows, training steps, samples, numbers.

In: pairs of stages. Out: a :class:`FileRows` per file of prepared rows that is not bitwise the
same, a :class:`Divergence` per training (the first step whose numbers or rollouts are not bitwise
the same), a :class:`NumberChange` per metric. Numbers of different protocols are refused, with the
names of the fields in which these differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flows.diffing.sides import Half, Pair, both_of, differing
from flows.stored import rollouts_by_step
from infra.store.traces import read_metrics, read_rollouts
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


def row_changes(pairs: Iterable[Pair]) -> Iterator[FileRows]:
    """Prepared rows that differ, over all `data` stages. Rows are known by ``sample_id`` and
    compared by a hash of all their columns: large sets are read in batches and not held."""
    for stage, a, b in both_of(pairs, "data"):
        for name in FILES:
            if (digest := a.digests.get(name)) is not None and digest == b.digests.get(name):
                continue
            paths = [path for h in (a, b) if (path := _output_file(h, name)) is not None]
            if len(paths) == 2:
                yield from _changed_rows(stage, name, *paths)
            elif paths:
                count = len(_hashes(paths[0]))
                there = _output_file(a, name) is not None
                yield FileRows(stage, name, *((count, None) if there else (None, count)))


def _output_file(half: Half, name: str) -> Path | None:
    path = None if half.output is None else half.output / name
    return path if path is not None and path.exists() else None


def _changed_rows(stage: str, name: str, a: Path, b: Path) -> Iterator[FileRows]:
    one, other = _hashes(a), _hashes(b)
    if list(one.items()) == list(other.items()):
        return
    only_a = [k for k in one if k not in other]
    only_b = [k for k in other if k not in one]
    changed = [k for k in one if k in other and one[k] != other[k]]
    common = ([k for k in one if k in other], [k for k in other if k in one])
    columns = differing(*(_row(path, changed[0]) for path in (a, b))) if changed else ()
    yield FileRows(
        stage,
        name,
        len(one),
        len(other),
        len(only_a),
        len(only_b),
        len(changed),
        (tuple(only_a[:_FEW_ROWS]), tuple(only_b[:_FEW_ROWS]), tuple(changed[:_FEW_ROWS])),
        next((i for i, (x, y) in enumerate(zip(*common, strict=True)) if x != y), None),
        tuple(columns),
    )


def _hashes(path: Path) -> dict[str, str]:
    """``sample_id`` -> hash of the row, in the file's order."""
    import pyarrow.parquet as pq

    found = {}
    for batch in pq.ParquetFile(path).iter_batches(batch_size=512):
        for row in batch.to_pylist():
            text = json.dumps(row, sort_keys=True, default=str)
            found[str(row["sample_id"])] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _row(path: Path, sample_id: str) -> dict[str, object]:
    import pyarrow.parquet as pq

    rows = pq.read_table(path, filters=[("sample_id", "==", sample_id)]).to_pylist()
    return dict(rows[0]) if rows else {}


# ---------------------------------------------------------------- training


#: In the order in which a rollout comes about.
_FIELDS = (
    *("prompt_index", "sample_id", "response_ids", "response_text", "logprobs", "finish_reason"),
    *("status", "judgements", "reward", "advantage"),
)
_CUT = 160


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
    """Divergence of two trainings: how far they are the same.

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


def divergences(pairs: Iterable[Pair]) -> Iterator[Divergence]:
    """Each pair of training stages of which both sides have logged something. Rollouts of a step
    are sampled before its numbers are logged, so that of the two a rollout that differs is the
    earlier. What only measures (times, speed, what the judge's server did) is left aside."""
    for stage, a, b in both_of(pairs, "sample", *TRAINED):
        one, other = _steps(a), _steps(b)
        if one and other:
            yield _divergence(stage, one, other)


def _steps(half: Half) -> dict[int, tuple[dict[str, Any], Path | None]]:
    """Traces of each step of a training: its numbers, later lines going before earlier ones,
    and its rollouts."""
    if (paths := half.paths) is None:
        return {}
    numbers: dict[int, dict[str, Any]] = {}
    for line in read_metrics(paths.metrics):
        numbers.setdefault(line.step, {}).update(
            {k: v for k, v in line.metrics.items() if not k.startswith(MEASURED)}
        )
    rollouts = rollouts_by_step(paths.rollouts)
    return {s: (numbers.get(s, {}), rollouts.get(s)) for s in sorted({*numbers, *rollouts})}


def _divergence(
    stage: str,
    one: Mapping[int, tuple[dict[str, Any], Path | None]],
    other: Mapping[int, tuple[dict[str, Any], Path | None]],
) -> Divergence:
    last, same = (max(one), max(other)), 0
    for step in (s for s in sorted({*one, *other}) if s <= min(last)):
        (numbers, rollouts), (others, more) = (s.get(step, ({}, None)) for s in (one, other))
        metrics, rollout = differing(numbers, others), _first_rollout(rollouts, more)
        if metrics or rollout is not None:
            return Divergence(stage, step, same, *last, metrics, rollout)
        same += 1
    gone = f"one has gone to step {last[0]}, the other to step {last[1]}"
    return Divergence(stage, None, same, *last, {}, None, gone if last[0] != last[1] else "")


def _first_rollout(a: Path | None, b: Path | None) -> RolloutChange | None:
    """The first rollout that differs; where one side keeps none of the step, nothing is said."""
    if a is None or b is None or a.read_bytes() == b.read_bytes():
        return None
    one, other = read_rollouts(a), read_rollouts(b)
    for x, y in zip_longest(one, other):
        row = x or y
        which = (str(row.get("sample_id")), int(row.get("sample_index") or 0))
        if x is None or y is None:
            return RolloutChange(*which, ("count",), str(len(one)), str(len(other)))
        apart = differing(x, y)
        if apart:
            fields = (*(f for f in _FIELDS if f in apart), *(f for f in apart if f not in _FIELDS))
            return RolloutChange(*which, fields, *map(_cut, apart[fields[0]]))
    return None


def _cut(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _CUT else f"{text[:_CUT]}…"


# ---------------------------------------------------------------- evaluations


@dataclass(frozen=True)
class NumberChange:
    """One metric of one model. ``difference`` is second minus first, paired over prompts (of these
    two checkpoints); None where the protocols differ, which ``refused`` names. ``same``: both are
    the same number under the same protocol."""

    stage: str
    decoding: str
    metric: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    refused: tuple[str, ...] = ()
    same: bool = False


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


Rows = Sequence[Mapping[str, Any]]


def evaluation_changes(pairs: Iterable[Pair]) -> tuple[list[NumberChange], list[SampleChange]]:
    """Every metric that both sides have; and evaluations under one protocol whose samples are not
    bitwise the same."""
    numbers: list[NumberChange] = []
    samples: list[SampleChange] = []
    for stage, a, b in both_of(pairs, "evaluate"):
        one, other = _entries(a), _entries(b)
        rows: dict[str, tuple[Rows, Rows] | None] = {}
        for key in (k for k in one if k in other):
            x, y = one[key], other[key]
            if x["protocol"] != y["protocol"]:
                apart = _protocols_apart(_protocol(a, x), _protocol(b, y))
                numbers.append(NumberChange(stage, *key, x, y, refused=tuple(apart)))
                continue
            if key[0] not in rows:
                rows[key[0]] = _samples(a, x, b, y)
            same = all(x.get(n) == y.get(n) for n in ("value", "low", "high", "n"))
            paired = _paired(rows[key[0]], key[1])
            numbers.append(NumberChange(stage, *key, x, y, *paired, same=same))
        for decoding, both in rows.items():
            if both is not None:
                samples += _sample_changes(stage, decoding, *both)
    return numbers, samples


def _entries(half: Half) -> dict[tuple[str, str], Mapping[str, Any]]:
    entries = half.report.get("evaluations") or ()
    return {(str(e["decoding"]), str(e["metric"])): e for e in entries}


def _protocol(half: Half, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a protocol, without where its prompts came from: that is no part of them."""
    found = (half.report.get("protocols") or {}).get(entry["protocol"]) or {}
    return {k: v for k, v in found.items() if k != "data"}


def _protocols_apart(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, (x, y) in sorted(differing(a, b).items()):
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _protocols_apart(x, y, f"{prefix}{key}.")
        else:
            yield prefix + key


def _samples(
    a: Half, x: Mapping[str, Any], b: Half, y: Mapping[str, Any]
) -> tuple[Rows, Rows] | None:
    """The samples behind two numbers; None where they are gone."""
    from refiner_core.evaluation.metrics import load_samples

    assert a.output is not None, "a stage with a report is done"
    assert b.output is not None, "a stage with a report is done"
    try:
        one = load_samples(a.output / str(x["samples_file"]))
        return one, load_samples(b.output / str(y["samples_file"]))
    except RefinerError:  # the numbers themselves are shown all the same
        return None


def _paired(
    rows: tuple[Rows, Rows] | None, metric: str
) -> tuple[float | None, float | None, float | None]:
    """Paired difference with its interval, second minus first."""
    from refiner_core.evaluation.statistics import paired_difference_over_seeds

    if rows is None:
        return None, None, None
    try:
        found = paired_difference_over_seeds([rows[1]], [rows[0]], metric)
    except RefinerError:
        return None, None, None
    return (found.value, found.low, found.high) if found.n else (None, None, None)


def _sample_changes(stage: str, decoding: str, one: Rows, other: Rows) -> Iterator[SampleChange]:
    changed = [(x, apart) for x, y in zip(one, other, strict=False) if (apart := differing(x, y))]
    if changed:
        (row, apart), count = changed[0], len(changed)
        name = str(row.get("sample_id"))
        yield SampleChange(stage, decoding, name, tuple(apart), count, len(one))
