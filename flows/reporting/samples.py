"""Samples files straight into arrays: a report reads thousands of them. And what their prompts ask.

In: Parquet files of evaluations (:mod:`refiner_core.evaluation.metrics`). Out: means per prompt,
credit per rubric, rows of a few prompts. Columns go from Parquet to NumPy; no row becomes a Python
object but those that are shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from flows.stored import HELD_OUT, prompts_of
from infra.store.workspace import Workspace
from refiner_core.contract.errors import DataError
from refiner_core.evaluation.metrics import metric_columns
from refiner_core.report.sweep.evidence import PromptMeans, Question, RubricScores

Floats = npt.NDArray[np.float64]
#: A rubric that so many prompts share is shown by itself; others are one with those of their kind.
_SHARED_BY = 5
_OTHERS = "(others)"
#: Attempts at a task that a report shows.
MOST_ATTEMPTS = 4
#: Rows that are held at a time while rows are looked for.
_AT_ONCE = 512
_TEXTS = dict.fromkeys(("kind", "title", "polarity", "source"), pa.string())
_JUDGEMENTS = pa.schema({"j": pa.list_(pa.struct({**_TEXTS, "score": pa.float64()}))})


class SamplesReader:
    """Reads samples files. What many of them share is read and held once: ids of prompts, and
    files that are the same byte for byte, as the random copier's are under a judge that repeats
    itself. Safe to use from several threads."""

    def __init__(self) -> None:
        self._files: dict[bytes, PromptMeans] = {}
        self._prompts: dict[bytes, tuple[tuple[str, ...], npt.NDArray[np.intp]]] = {}

    def means(self, path: Path) -> PromptMeans:
        """Every metric per prompt.

        Raises
        ------
        DataError
            The file is missing, damaged, or no samples file.
        """
        content = _content(path)
        key = hashlib.sha256(content).digest()
        if key not in self._files:
            with _opened(path, content) as file:
                columns = ["sample_id", *metric_columns(file.schema_arrow)]
                self._files[key] = self._means(file.read(columns=columns, use_threads=False))
        return self._files[key]

    def _means(self, table: Any) -> PromptMeans:
        prompts, place = self._places(table.column("sample_id"))
        metrics = [
            name
            for name in metric_columns(table.schema)
            if table.column(name).null_count < len(place)
        ]
        columns = [table.column(name).to_numpy() for name in metrics]
        values = np.stack(columns) if columns else np.zeros((0, len(place)))
        return PromptMeans(prompts, tuple(metrics), _mean_per_prompt(values, place, len(prompts)))

    def rubrics(
        self, path: Path, names: Sequence[tuple[str, str]] | None = None
    ) -> RubricScores | None:
        """Credit per rubric and prompt; see
        :meth:`refiner_core.report.sweep.evidence.Stored.rubrics`."""
        with _opened(path, _content(path)) as file:
            table = file.read(columns=["sample_id", "judgements"], use_threads=False)
        prompts, place = self._places(table.column("sample_id"))
        judged = _judged(table.column("judgements"))
        if judged is None:
            return None
        sample, title, kind, credit = judged
        at = place[sample]
        if names is None:
            names = _names(title, kind, at)
        known = {name: i for i, name in enumerate(names)}
        pairs, which = _pairs(title, kind)
        rows = np.array([known.get(p, known.get((_OTHERS, p[1]), -1)) for p in pairs])[which]
        kept = (rows >= 0) & ~np.isnan(credit)
        cells = rows[kept] * len(prompts) + at[kept]
        size = len(names) * len(prompts)
        count = np.bincount(cells, minlength=size)
        total = np.bincount(cells, weights=credit[kept], minlength=size)
        values = _ratio(total, count).reshape(len(names), len(prompts))
        return RubricScores(tuple(names), values)

    def rows(self, path: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
        """First samples of these prompts, whole; of agents the first attempts."""
        wanted = pc.field("sample_id").isin(list(prompts))
        found: list[dict[str, Any]] = []
        with _opened(path, _content(path)) as file:
            # Answers are long, and few are shown.
            for batch in file.iter_batches(batch_size=_AT_ONCE, use_threads=False):
                found += pa.Table.from_batches([batch]).filter(wanted).to_pylist()
        return [
            row for row in found if row["sample_index"] < (MOST_ATTEMPTS if "episode" in row else 1)
        ]

    def _places(self, column: Any) -> tuple[tuple[str, ...], npt.NDArray[np.intp]]:
        """Ids in ascending order, and the place of each sample's prompt among them."""
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        key = b"".join(bytes(b) for b in array.buffers() if b is not None)
        if key not in self._prompts:
            ids, place = np.unique(np.array(array.to_pylist(), dtype=object), return_inverse=True)
            self._prompts[key] = (tuple(ids.tolist()), place)
        return self._prompts[key]


def _content(path: Path) -> bytes:
    """A file at once: they are small, and often on a network's file system."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception | str) -> DataError:
    return DataError(
        f"{path} cannot be read ({error})",
        expected="a samples file of an evaluation",
        fix="restore the file, or delete its stage's folder and run the recipe again",
    )


@contextmanager
def _opened(path: Path, content: bytes) -> Iterator[Any]:
    try:
        with pq.ParquetFile(pa.BufferReader(content), pre_buffer=False) as file:
            if "sample_id" not in file.schema_arrow.names:
                raise _unreadable(path, "it has no sample ids")
            yield file
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, error) from error


def _mean_per_prompt(values: Floats, place: npt.NDArray[np.intp], prompts: int) -> Floats:
    """Of values [metrics, samples], the mean [metrics, prompts] of what is not NaN."""
    samples = np.bincount(place, minlength=prompts)
    most = int(samples.max(initial=1))
    # Samples beside each other, prompts in order, NaN where a prompt has fewer than the others.
    order = np.argsort(place, kind="stable")
    nth = np.arange(len(place)) - np.repeat(np.cumsum(samples) - samples, samples)
    table = np.full((len(values), prompts, most), np.nan)
    table[:, place[order], nth] = values[:, order]
    known = ~np.isnan(table)
    return _ratio(np.where(known, table, 0.0).sum(axis=2), known.sum(axis=2))


def _ratio(total: npt.NDArray[Any], count: npt.NDArray[Any]) -> Floats:
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# ---------------------------------------------------------------- rubrics


def _judged(
    column: Any,
) -> tuple[npt.NDArray[np.intp], Any, Any, Floats] | None:
    """Judgements of rubrics: sample, title and kind (as Arrow arrays), credit."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if not len(array):
        return None
    lines = pc.binary_join_element_wise('{"j":', array, "}", "")
    text = "\n".join(lines.to_pylist()).encode()
    parsed = pyarrow.json.read_json(
        pa.BufferReader(text),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=_JUDGEMENTS, unexpected_field_behavior="ignore"
        ),
    )
    lists = parsed.column("j").combine_chunks()
    sample = pc.list_parent_indices(lists)
    flat = pc.list_flatten(lists)
    if not len(flat):
        return None
    keep = pc.fill_null(pc.equal(pc.struct_field(flat, "kind"), "rubric"), False)
    flat, sample = flat.filter(keep), sample.filter(keep)
    if not len(flat):
        return None
    score = pc.struct_field(flat, "score").to_numpy(zero_copy_only=False)
    polarity = pc.struct_field(flat, "polarity")
    negative = pc.equal(polarity, "negative").to_numpy(zero_copy_only=False).astype(bool)
    kind = pc.binary_join_element_wise(pc.struct_field(flat, "source"), polarity, ", ")
    credit = np.where(negative, 1.0 - score, score).astype(np.float64)
    return sample.to_numpy(), pc.struct_field(flat, "title"), kind, credit


def _pairs(title: Any, kind: Any) -> tuple[list[tuple[str, str]], npt.NDArray[np.intp]]:
    """Distinct (title, kind), and which of them each judgement is of."""
    titles, kinds = title.dictionary_encode(), kind.dictionary_encode()
    codes = titles.indices.to_numpy().astype(np.int64) * len(kinds.dictionary)
    distinct, which = np.unique(codes + kinds.indices.to_numpy(), return_inverse=True)
    of_title, of_kind = titles.dictionary.to_pylist(), kinds.dictionary.to_pylist()
    pairs = [(of_title[c // len(of_kind)], of_kind[c % len(of_kind)]) for c in distinct.tolist()]
    return pairs, which


def _names(title: Any, kind: Any, at: npt.NDArray[np.intp]) -> list[tuple[str, str]]:
    """Rubrics that several prompts share, then the rest of each kind together."""
    pairs, which = _pairs(title, kind)
    seen = np.unique(which.astype(np.int64) * (int(at.max()) + 1) + at)
    prompts = np.bincount(seen // (int(at.max()) + 1), minlength=len(pairs))
    shared = [p for p, n in zip(pairs, prompts.tolist(), strict=True) if n >= _SHARED_BY]
    rest = [p for p, n in zip(pairs, prompts.tolist(), strict=True) if n < _SHARED_BY]
    return [*sorted(shared), *sorted({(_OTHERS, kind) for _, kind in rest})]


# ---------------------------------------------------------------- prompts


def questions_of(
    workspace: Workspace, stage_id: str, attempt: int, prompts: Sequence[str], file: str = HELD_OUT
) -> dict[str, Question]:
    """Questions of these prompts, by the prepared rows that an attempt at a stage has read; nothing
    where those are gone: numbers and answers do without."""
    _, path = prompts_of(workspace, workspace.layout.attempt(stage_id, attempt), file)
    if path is None:
        return {}
    try:
        with pq.ParquetFile(path) as rows:
            table = rows.read(["sample_id", "question", "prompt_text"])
    except (OSError, pa.ArrowInvalid):
        return {}
    asked = table.filter(pc.field("sample_id").isin(list(prompts)))
    return {
        row["sample_id"]: Question(row["question"], row["prompt_text"]) for row in asked.to_pylist()
    }
