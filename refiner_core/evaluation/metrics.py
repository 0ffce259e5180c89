"""Metrics: their names, direction, kind, order and rows.

In: names. Out: whether the metric exists, its direction, its kind of number, its prompts, and the
order of metrics.

Answers (one prompt, one answer) have the fixed :data:`~refiner_core.evaluation.metrics.METRICS`.
Episodes of an agent have :data:`EPISODE_METRICS`, the metrics of
:mod:`refiner_core.evaluation.metric_names` for each k, and the shares of attempts that failed for
each reason, ``failure/CLASS``. All except these also exist by domain, as ``METRIC/DOMAIN``. A
metric of a task (``pass@4``) is only in the row of its first attempt, so that sums over rows are
sums over tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import PromptRow, RewardResult
from refiner_core.data.truth import score_truth
from refiner_core.environments.protocol import FAILURES
from refiner_core.evaluation.metric_names import BY_PEOPLE, FAILURE, FIRST, base_of, pass_names
from refiner_core.evaluation.statistics import Kind

#: Metrics that are components of a reward, where one has another name.
_FROM_REWARD = (
    *("format_valid", "rubric_score", "citation_precision", "citation_recall", "citation_f1"),
    *("citation_format", "claims", "uncited"),
)
_COMPONENTS = {"rubric_score": "rubric"}
#: Metric to key of the ground truth's scores.
_FROM_TRUTH = {"oracle": "oracle", "fact_recall": "fact_recall", "truth_citation_f1": "citation_f1"}
#: Metrics without a part of the judge, which count even if the judge failed.
_WITHOUT_JUDGE = frozenset({"format_valid", "claims", "uncited"})

#: All metrics, in the order of reports.
METRICS = (
    *_FROM_REWARD,
    "reward",
    "length_tokens",
    "stop_rate",
    *_FROM_TRUTH,
    "oracle_given_valid",
    "judge_failed",
)


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
    for metric in _FROM_REWARD:
        measured = _applies(metric, result) and (metric in _WITHOUT_JUDGE or not failed)
        component = _COMPONENTS.get(metric, metric)
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
    """True if the metric applies to the row: it has rubrics, or evidence to cite."""
    if metric == "rubric_score":
        return not result.components.get("no_rubrics")
    if metric.startswith("citation_"):
        return bool(result.components.get("citation_applicable", 1.0))
    return True


def _schema(metrics: Sequence[str], texts: Sequence[str]) -> Any:
    import pyarrow as pa

    def text(name: str) -> Any:
        return pa.field(name, pa.string(), nullable=False)

    return pa.schema(
        [
            text("sample_id"),
            pa.field("sample_index", pa.int32(), nullable=False),
            *map(text, ("response_text", "finish_reason", "status")),
            *(pa.field(metric, pa.float64()) for metric in metrics),
            *map(text, ("judgements", *texts)),
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
        Columns of numbers; missing values are null.
    texts
        Text columns beside those of every samples file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([dict(row) for row in rows], schema=_schema(metrics, texts))
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")


def metric_columns(schema: Any) -> list[str]:
    """The metrics of a samples file, by its Arrow schema: its columns of numbers, in the order
    of writing."""
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_float64(field.type)]


#: Columns that make up most of a file, and that comparisons of numbers do not need.
TEXTS = ("response_text", "judgements", "episode")


def load_samples(path: Path, leave_out: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read rows back; metrics of newer versions are missing from older files.
    Columns in ``leave_out`` are skipped.

    Raises
    ------
    DataError
        The file is missing or is no samples file.
    """
    with opened(path) as file:
        kept = [name for name in file.schema_arrow.names if name not in leave_out]
        rows: list[dict[str, Any]] = file.read(kept).to_pylist()
    return rows


@contextmanager
def opened(
    path: Path,
    source: Any = None,
    expected: str = "a samples file of an evaluation",
    fix: str = "restore the file, or delete its stage's folder and run the recipe again",
) -> Iterator[Any]:
    """A Parquet file of answers; ``source`` is its content if already read.

    Raises
    ------
    DataError
        It is missing, damaged, or another kind of file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path if source is None else source, pre_buffer=False) as file:
            if "sample_id" not in file.schema_arrow.names:
                raise OSError("it has no sample ids")
            yield file
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read ({error})", expected=expected, fix=fix) from error


#: Metrics of one attempt, in the order of reports: ``success`` (yes or no), ``reward`` (the
#: environment's own), ``partial`` (weighted share of passed checks), turns, tokens sampled by the
#: model, repaired turns, calls refused by a tool, and whether the infrastructure ended it (the
#: only value in that case).
EPISODE_METRICS = (
    *("success", "reward", "partial", "turns", "length_tokens", "repairs", "tool_errors"),
    "episode_error",
)
FAILURE_METRICS = tuple(f"{FAILURE}{name}" for name in FAILURES)
#: Those that also exist by domain, beside the metrics of tasks.
_BY_DOMAIN = ("success", "reward", "partial", "episode_error")
#: Metrics with their own protocol: only they depend on the weights of checks (or of judge and
#: citations).
WEIGHED = frozenset({"reward", "partial"})

#: Metrics of a short table, in its order; for agents also those of the largest k.
_MAIN = ("format_valid", "rubric_score", "citation_f1", "reward", "oracle", "claims")
_MAIN_OF_TASKS = ("pass@1_first", "pass@1", "pass@k", "pass^k", "partial", "turns", "episode_error")

_PASS = re.compile(r"pass@1_first|pass[@^][1-9]\d*")
#: Kinds of metrics, for their intervals; all others are shares in [0, 1].
YES_NO = frozenset({"format_valid", "stop_rate", "judge_failed", "success", "episode_error", FIRST})
NUMBERS = frozenset(
    {"reward", "claims", "uncited", "length_tokens", "turns", "repairs", "tool_errors"}
)
_LOWER = frozenset({"uncited", "judge_failed", "episode_error", "repairs", "tool_errors"})
_NEITHER = frozenset({"claims", "length_tokens", "turns"})


def episode_metrics(attempts: int, domains: Sequence[str]) -> tuple[str, ...]:
    """All metrics of an evaluation with ``attempts`` per task, in the order of reports."""
    passes = pass_names(attempts)
    split = (*passes, *_BY_DOMAIN)
    by_domain = (f"{metric}/{domain}" for domain in domains for metric in split)
    return (*passes, *EPISODE_METRICS, *FAILURE_METRICS, *by_domain)


def of_tasks(metric: str) -> bool:
    """True if it is a metric of whole tasks, not of attempts."""
    return _PASS.fullmatch(base_of(metric)) is not None


def weighed(metric: str) -> bool:
    """True if it is one of :data:`WEIGHED`, for any domain."""
    return base_of(metric) in WEIGHED


def metrics_of(config: RecipeConfig) -> tuple[str, ...]:
    """Possible metrics of a recipe's evaluations; for an agent without those by domain."""
    if not config.environment.name:
        return METRICS
    sampled = "sampled" in config.evaluate.decoding
    return episode_metrics(config.evaluate.num_samples if sampled else 1, ())


def main_metrics(metrics: Iterable[str]) -> list[str]:
    """The metrics of a short table, in its order."""
    found = set(metrics)
    ks = [int(m[5:]) for m in found if re.fullmatch(r"pass@\d+", m)]
    if not ks:
        return [m for main in _MAIN for m in (main, f"{main}/{BY_PEOPLE}") if m in found]
    once = ("pass@1_first", "pass@k", "pass^k")  # with one attempt, pass@1 equals all of them
    named = [m for m in _MAIN_OF_TASKS if max(ks) > 1 or m not in once]
    most = [f"{m[:5]}{max(ks)}" if m in once[1:] else m for m in named]
    return [m for m in dict.fromkeys(most) if m in found]


def has_metric(config: RecipeConfig, metric: str) -> bool:
    """True if a recipe's evaluations may have it (domains are checked only against tasks)."""
    return base_of(metric) in metrics_of(config)


def in_order(metrics: Iterable[str]) -> list[str]:
    """In the order of reports; those of episodes keep their order."""
    found = list(dict.fromkeys(metrics))
    place = {metric: i for i, metric in enumerate(METRICS)}
    if any(metric not in place for metric in found):
        return found
    return sorted(found, key=lambda metric: place[metric])


def higher_is_better(metric: str) -> bool | None:
    """Whether higher is better; None if the metric has no direction."""
    base = base_of(metric)
    if base in _NEITHER:
        return None
    return base not in _LOWER and not base.startswith(FAILURE)


def is_number(metric: str) -> bool:
    """True if it is an arbitrary number, not a share in [0, 1]."""
    return base_of(metric) in NUMBERS


def is_yes_no(metric: str) -> bool:
    """True if it is yes or no for a sample."""
    base = base_of(metric)
    return base in YES_NO or base.startswith(FAILURE)


def once_per_prompt(metric: str, decoding: str) -> bool:
    """True if a prompt has exactly one value, so that a yes or no is one trial."""
    return decoding == "greedy" or base_of(metric) == FIRST


def kind_of(metric: str, rows: Sequence[Mapping[str, Any]], config: RecipeConfig) -> Kind:
    """Kind of interval for a metric of these rows. pass@k and pass^k are yes or no for each
    task if k is its number of attempts, and a share for smaller k."""
    if metric == "rubric_score" and config.reward.rubric_aggregation != "weighted_mean":
        return "number"  # the alternative aggregations leave [0, 1]
    base = base_of(metric)
    if of_tasks(metric) and base != FIRST:
        attempts = max((int(row["sample_index"]) for row in rows), default=0) + 1
        return "yes_no" if int(base[5:]) == attempts else "share"
    if is_yes_no(metric):
        return "yes_no"
    return "number" if is_number(metric) else "share"
