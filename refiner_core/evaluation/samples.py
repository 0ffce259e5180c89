"""Per-sample results: the evidence behind every number of an evaluation.

In: one answer with its reward and, where the generator knows it, the truth. Out: a row, and Parquet
files of rows.

A metric is None where it was not measured: the judge failed, the row has no rubrics or no truth. It
is never 0 for such a reason, and never left out because the *policy* failed: a malformed answer
scores 0 by rule.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RewardConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import PromptRow, RewardResult
from refiner_core.data.truth import score_truth
from refiner_core.evaluation.statistics import Kind

#: Metric to reward component.
_FROM_REWARD = {
    "format_valid": "format_valid",
    "rubric_score": "rubric",
    "citation_precision": "citation_precision",
    "citation_recall": "citation_recall",
    "citation_f1": "citation_f1",
    "citation_format": "citation_format",
    "claims": "claims",
    "uncited": "uncited",
}
#: Metric to key of the ground truth's scores.
_FROM_TRUTH = {
    "oracle": "oracle",
    "fact_recall": "fact_recall",
    "truth_citation_f1": "citation_f1",
}
#: What no judge has a part in, so that it counts whether or not the judge answered.
_WITHOUT_JUDGE = frozenset({"format_valid", "claims", "uncited"})

#: Every metric, in the order of reports.
METRICS = (
    *_FROM_REWARD,
    "reward",
    "length_tokens",
    "stop_rate",
    *_FROM_TRUTH,
    "oracle_given_valid",
    "judge_failed",
)
#: What they are, for their intervals; all others are shares in [0, 1].
YES_NO = frozenset({"format_valid", "stop_rate", "judge_failed"})
NUMBERS = frozenset({"reward", "claims", "uncited", "length_tokens"})


def metric_kind(metric: str, config: RewardConfig) -> Kind:
    """Which interval a metric may have."""
    if metric in YES_NO:
        return "yes_no"
    # The recorded alternatives of the aggregation leave [0, 1].
    unbounded = metric == "rubric_score" and config.rubric_aggregation != "weighted_mean"
    return "number" if metric in NUMBERS or unbounded else "share"


def sample_row(
    prompt: PromptRow,
    sample_index: int,
    text: str,
    *,
    length_tokens: int,
    stopped: bool,
    result: RewardResult,
) -> dict[str, Any]:
    """One sample as a row of the samples file."""
    failed = result.status == "unscored"
    metrics: dict[str, float | None] = {}
    for metric, component in _FROM_REWARD.items():
        measured = _applies(metric, result) and (metric in _WITHOUT_JUDGE or not failed)
        metrics[metric] = float(result.components[component]) if measured else None
    metrics["reward"] = None if failed else result.total
    metrics["length_tokens"] = float(length_tokens)
    metrics["stop_rate"] = float(stopped)
    truth = None if prompt.truth is None else score_truth(text, prompt.truth)
    for metric, key in _FROM_TRUTH.items():
        metrics[metric] = None if truth is None else float(truth[key])
    valid = metrics["format_valid"] == 1.0
    metrics["oracle_given_valid"] = metrics["oracle"] if valid else None
    metrics["judge_failed"] = float(failed)
    return {
        "sample_id": prompt.sample_id,
        "sample_index": sample_index,
        "response_text": text,
        "finish_reason": "stop" if stopped else "length",
        "status": result.status,
        **metrics,
        "judgements": json.dumps([dict(j) for j in result.judgements], ensure_ascii=False),
    }


def _applies(metric: str, result: RewardResult) -> bool:
    """Whether the row has what the metric is about: rubrics, evidence to cite."""
    if metric == "rubric_score":
        return not result.components.get("no_rubrics")
    if metric.startswith("citation_"):
        return bool(result.components.get("citation_applicable", 1.0))
    return True


def _schema(metrics: Sequence[str], texts: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("sample_id", pa.string(), nullable=False),
            pa.field("sample_index", pa.int32(), nullable=False),
            pa.field("response_text", pa.string(), nullable=False),
            pa.field("finish_reason", pa.string(), nullable=False),
            pa.field("status", pa.string(), nullable=False),
            *(pa.field(metric, pa.float64()) for metric in metrics),
            pa.field("judgements", pa.string(), nullable=False),
            *(pa.field(text, pa.string(), nullable=False) for text in texts),
        ],
        metadata={b"refiner.kind": b"evaluation samples", b"refiner.format": b"1"},
    )


def write_samples(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    metrics: Sequence[str] = METRICS,
    texts: Sequence[str] = (),
) -> None:
    """Write rows (atomically; an existing file is replaced).

    Parameters
    ----------
    metrics
        Columns of numbers; what a row lacks is null.
    texts
        Columns of text beside those that every samples file has.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(metrics, texts))
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")


def metric_columns(schema: Any) -> list[str]:
    """The metrics that a samples file has, by its Arrow schema: its columns of numbers, in the
    order in which they were written."""
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_float64(field.type)]


#: Columns that are most of a file, and that who compares numbers does without.
TEXTS = ("response_text", "judgements", "episode")


def load_samples(path: Path, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read rows back; metrics that a newer version adds are missing from older files.
    ``leave_out`` these columns.

    Raises
    ------
    DataError
        If the file is missing or is no samples file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            kept = [name for name in file.schema_arrow.names if name not in leave_out]
            rows: list[dict[str, Any]] = file.read(kept).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise _unreadable(path, str(error)) from error
    if rows and "sample_id" not in rows[0]:
        raise _unreadable(path, "it has no sample ids")
    return rows


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} cannot be read ({why})",
        expected="a samples file of an evaluation",
        fix="restore the file, or delete its stage's folder and run the recipe again",
    )
