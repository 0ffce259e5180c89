"""From per-sample rows to numbers with intervals, and ``results.json``.

In: rows per protocol. Out: files in the stage's output folder::

    samples-greedy.parquet  samples-sampled.parquet  samples-random_copier.parquet
    results.json   {"version", "model", "model_ref", "protocols", "evaluations", "reference"}

``evaluations`` has one entry per decoding and metric: ``stage`` (the model's name), ``protocol``
(fingerprint), ``protocol_name``, ``decoding``, ``metric``, ``value``, ``low``, ``high`` (95 %),
``n`` (prompts), ``numerator``, ``denominator`` (samples), ``interval`` (its method) and
``samples_file``. ``reference`` has the same for the random copier, under each protocol. A metric
that no sample has (no rubrics, no ground truth) has no entry. ``protocols`` describes each
fingerprint in full. If the judge counts its usage, ``judge_usage`` is that of these numbers
(:class:`~refiner_core.contract.types.JudgeUsage`); it is a cost, not a result.
``reference_fresh`` records whether the copier's answers were judged anew, or possibly taken from
the store. With a protocol file, each entry has its name as ``under``, and ``protocols`` as
``file``.

For agents (:mod:`.episodes`), ``n`` counts tasks, the reference is ``do_nothing``, and ``episodes``
has further counts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from refiner_core.contract.config import RecipeConfig
from refiner_core.contract.errors import ConfigurationError, DataError
from refiner_core.contract.files import replacing
from refiner_core.contract.types import JudgeUsage
from refiner_core.evaluation.metric_names import base_of
from refiner_core.evaluation.metrics import (
    METRICS,
    TEXTS,
    kind_of,
    load_samples,
    weighed,
    write_samples,
)
from refiner_core.evaluation.protocol import Protocol
from refiner_core.evaluation.statistics import Estimate, estimate, paired_difference_over_seeds
from refiner_core.judges.context import usage_to_json

RESULTS_VERSION = 1
RESULTS_FILE = "results.json"


class MeasuredRows(NamedTuple):
    """Per-sample rows under one protocol; ``metrics`` are the possible ones."""

    protocol: Protocol
    rows: Sequence[dict[str, Any]]
    metrics: Sequence[str] = METRICS


def metric_entries(
    stage: str, measured: MeasuredRows, samples_file: str, config: RecipeConfig
) -> list[dict[str, Any]]:
    """One entry per measured metric."""
    entries = []
    for metric in measured.metrics:
        found = recompute(measured.rows, metric, config)
        if found is None:
            continue
        protocol = measured.protocol
        protocol = protocol.with_reward(config) if weighed(metric) else protocol
        entries.append(
            {
                "stage": stage,
                "protocol": protocol.fingerprint,
                "protocol_name": protocol.name,
                "decoding": protocol.decoding,
                "metric": metric,
                **found._asdict(),
                "samples_file": samples_file,
                **({"under": protocol.file} if protocol.file else {}),
            }
        )
    return entries


def recompute(
    rows: Sequence[Mapping[str, Any]], metric: str, config: RecipeConfig
) -> Estimate | None:
    """A metric of per-sample rows, with its interval: the same rows and configuration give the same
    number, bit by bit. None if no sample has the metric."""
    return estimate(
        rows,
        metric,
        kind=kind_of(metric, rows, config),
        resamples=config.evaluate.bootstrap_samples,
        seed=config.evaluate.seed,
        stream=metric.replace("pass^1", "pass@1") if base_of(metric) == "pass^1" else "",
    )


def write_results(
    output_dir: Path,
    config: RecipeConfig,
    model: tuple[str, str],
    measured: Sequence[MeasuredRows],
    reference: tuple[str, Sequence[dict[str, Any]]],
    *,
    metrics: Sequence[str] = METRICS,
    texts: Sequence[str] = (),
    judge_usage: JudgeUsage | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Write all files of an evaluation (``results.json`` last) and return its content.

    Parameters
    ----------
    model
        Its name, and the reference that it was loaded from.
    reference
        The reference (name, rows), with ``metrics``.
    texts
        Text columns of the samples files.
    more
        Further entries of the results, stored unchanged.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    baseline_name, baseline_rows = reference
    baseline_file = f"samples-{baseline_name}.parquet"
    write_samples(output_dir / baseline_file, baseline_rows, metrics, texts)
    evaluations: list[dict[str, Any]] = []
    baseline: list[dict[str, Any]] = []
    protocols: dict[str, Any] = {}
    for part in measured:
        samples_file = f"samples-{part.protocol.decoding}.parquet"
        write_samples(output_dir / samples_file, part.rows, part.metrics, texts)
        evaluations += metric_entries(model[0], part, samples_file, config)
        beside = MeasuredRows(part.protocol, baseline_rows, metrics)
        baseline += metric_entries(baseline_name, beside, baseline_file, config)
        for protocol in (part.protocol, part.protocol.with_reward(config)):
            protocols[protocol.fingerprint] = protocol.as_json()
    results: dict[str, Any] = {
        "version": RESULTS_VERSION,
        "model": model[0],
        "model_ref": model[1],
        "protocols": protocols,
        "evaluations": evaluations,
        "reference": baseline,
        **more,
    }
    if judge_usage is not None:
        results["judge_usage"] = usage_to_json(judge_usage)
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(output_dir / RESULTS_FILE) as file:
        file.write(text.encode())
    return results


def load_results(folder: Path) -> dict[str, Any]:
    """``results.json`` of an evaluation's output folder.

    Raises
    ------
    DataError
        It is missing, cut short, or of another version.
    """
    path = folder / RESULTS_FILE
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error})",
            expected="the results of a finished evaluation",
            fix="restore the file, or delete its stage's folder and run the recipe again",
        ) from error
    if results.get("version") != RESULTS_VERSION:
        raise DataError(
            f"{path} has version {results.get('version')}",
            expected=f"version {RESULTS_VERSION}",
            fix="use the refiner that wrote it, or run the recipe again, which measures again",
        )
    return results


def compare_results(
    a: Sequence[Path], b: Sequence[Path], *, metrics: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """First minus second, for every decoding and metric that all folders have.

    Parameters
    ----------
    a, b
        Output folders, one per seed; position s on both sides is the same seed.
    metrics
        Only these. By default all except ``reward`` (for agents also ``partial``) if it is
        combined differently: arms of an ablation of the reward are compared on everything else.

    Returns
    -------
    list of dict
        ``decoding``, ``metric``, ``protocol``, ``protocol_name``, ``a`` and ``b`` (means over the
        seeds), ``difference``, ``low``, ``high``, ``n`` (prompts), ``seeds``, ``excluded`` (prompts
        without a value somewhere), ``p_value``, ``interval``. A metric without common prompts
        has no entry.

    Raises
    ------
    ConfigurationError
        Protocols or prompts differ, or sides have different numbers of seeds.
    """
    if not a or len(a) != len(b):
        raise ConfigurationError(
            f"{len(a)} evaluations cannot be paired with {len(b)}",
            expected="one folder per seed, the same seeds on both sides",
            fix="evaluate the missing seeds, or leave them out on both sides",
        )
    folders = [*a, *b]
    tables = [_entries(folder) for folder in folders]
    samples = functools.cache(partial(load_samples, leave_out=TEXTS))  # each file once
    rows = []
    for key, first in tables[0].items():
        decoding, metric = key
        entries = [table[key] for table in tables if key in table]
        if (metrics is not None and metric not in metrics) or len(entries) < len(tables):
            continue
        apart = len({e["protocol"] for e in entries}) > 1
        if metrics is None and weighed(metric) and apart:
            continue
        _same_protocol(entries, folders)
        sides = [samples(f / e["samples_file"]) for f, e in zip(folders, entries, strict=True)]
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


def _entries(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Entries of an evaluation by (decoding, metric)."""
    return {(e["decoding"], e["metric"]): e for e in load_results(folder)["evaluations"]}


def _same_protocol(entries: Sequence[dict[str, Any]], folders: Sequence[Path]) -> None:
    """Refuse numbers measured in different ways; the message names the differences."""
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
    """Dotted names of the fields in which two protocols differ, ignoring provenance."""
    found: list[str] = []
    for key in sorted({*first, *second} - ({"data"} if not prefix else set())):
        left, right = first.get(key), second.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += _differing(left, right, f"{prefix}{key}.")
        elif left != right:
            found.append(prefix + key)
    return found
