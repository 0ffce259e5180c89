"""In what prepared rows differ: those of one side only, those whose content changed, their order.

In: the output folders of two `data` stages. Out: a :class:`FileRows` per file that is not bitwise
the same. Rows are known by ``sample_id`` and compared by a hash of all their columns, so that large
sets are read in batches and not held.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.diffing.sides import Half, Pair

FILES = ("sft_train.parquet", "sft_val.parquet", "rl_train.parquet", "rl_test.parquet")
_FEW = 5


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
        (tuple(only_a[:_FEW]), tuple(only_b[:_FEW]), tuple(changed[:_FEW])),
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
