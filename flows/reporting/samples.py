"""Reads samples files into arrays, as a report reads thousands of them; and their prompts'
questions.

In: Parquet files of evaluations (:mod:`refiner_core.evaluation.metrics`). Out: means per prompt,
credit per rubric, rows of a few prompts. Columns go from Parquet to pandas; only shown rows become
Python objects.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flows.stored import HELD_OUT, prompts_of
from infra.store.workspace import Workspace
from refiner_core.evaluation.metrics import metric_columns, opened
from refiner_core.report.sweep.evidence import PromptMeans

#: A rubric shared by so many prompts is shown separately; others are merged by kind.
_SHARED_BY = 5
_OTHERS = "(others)"
#: Maximum number of attempts at a task in a report.
MOST_ATTEMPTS = 4


class SamplesReader:
    """Reads samples files. Byte-identical files, such as those of the random copier under a
    deterministic judge, are read once. Safe to use from several threads."""

    def __init__(self) -> None:
        self._files: dict[bytes, PromptMeans] = {}

    def means(self, path: Path) -> PromptMeans:
        """Every metric per prompt, prompts in ascending order.

        Raises
        ------
        DataError
            The file is missing, damaged, or no samples file.
        """
        try:
            content = path.read_bytes()  # as a whole: they are small
        except OSError:
            content = b""
        key = hashlib.sha256(content).digest()
        if key not in self._files:
            with opened(path, pa.BufferReader(content) if content else None) as file:
                metrics = metric_columns(file.schema_arrow)
                rows = file.read(columns=["sample_id", *metrics], use_threads=False).to_pandas()
            means = rows.groupby("sample_id")[metrics].mean().dropna(axis=1, how="all")
            values = np.ascontiguousarray(means.to_numpy().T)
            self._files[key] = PromptMeans(tuple(means.index), tuple(means.columns), values)
        return self._files[key]

    def rubrics(
        self, path: Path, names: Sequence[tuple[str, str]] | None = None
    ) -> tuple[tuple[tuple[str, str], ...], Any] | None:
        """Credit per rubric and prompt; None without judgements by rubrics.

        ``names`` are the wanted rubrics, as in another evaluation; by default those that several
        prompts share, with the others merged by kind.
        """
        with opened(path) as file:
            rows = file.read(columns=["sample_id", "judgements"], use_threads=False).to_pydict()
        judged = _judged(rows)
        if judged.empty:
            return None
        if names is None:
            asked = judged.groupby(["title", "kind"])["sample_id"].nunique()
            rest = {(_OTHERS, kind) for _, kind in asked.index[asked < _SHARED_BY]}
            names = [*asked.index[asked >= _SHARED_BY], *sorted(rest)]
        shown = pd.MultiIndex.from_frame(judged[["title", "kind"]]).isin(names)
        means = judged.assign(title=judged["title"].where(shown, _OTHERS)).pivot_table(
            "credit", index=["title", "kind"], columns="sample_id", dropna=False
        )
        whole = means.reindex(
            pd.MultiIndex.from_tuples(names), columns=sorted({*rows["sample_id"]})
        )
        return tuple(names), whole.to_numpy()

    def rows(self, path: Path, prompts: Sequence[str]) -> list[dict[str, Any]]:
        """First samples of these prompts, complete; for agents the first attempts."""
        wanted = pc.field("sample_id").isin(list(prompts))
        with opened(path) as file:
            found = file.read(use_threads=False).filter(wanted).to_pylist()
        return [
            row for row in found if row["sample_index"] < (MOST_ATTEMPTS if "episode" in row else 1)
        ]


def _judged(rows: Mapping[str, list[Any]]) -> pd.DataFrame:
    """Judgements of rubrics, with their credit."""
    found = [
        (sample_id, one.get("title"), f"{one.get('source')}, {one.get('polarity')}", credit_of(one))
        for sample_id, text in zip(rows["sample_id"], rows["judgements"], strict=True)
        for one in json.loads(text or "[]")
        if one.get("kind") == "rubric"
    ]
    return pd.DataFrame(found, columns=["sample_id", "title", "kind", "credit"])


def credit_of(judgement: Mapping[str, Any]) -> float:
    """Score of a positive rubric, 1 - score of a negative one; NaN without a score."""
    score = judgement.get("score")
    if score is None:
        return math.nan
    return 1.0 - score if judgement.get("polarity") == "negative" else float(score)


# ---------------------------------------------------------------- prompts


def questions_of(
    workspace: Workspace, stage_id: str, attempt: int, prompts: Sequence[str], file: str = HELD_OUT
) -> dict[str, dict[str, str]]:
    """Questions of these prompts, from the prepared rows of a stage's attempt; empty if those are
    gone: metrics and answers do not need them."""
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
        row["sample_id"]: {"question": row["question"], "prompt": row["prompt_text"]}
        for row in asked.to_pylist()
    }
