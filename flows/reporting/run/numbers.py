"""What evaluations of a run say: numbers with intervals, and what training has changed, paired.

In: a :class:`~flows.reporting.run.reading.RunReading`. Out: :class:`Evaluated` (one evaluation that
is done and can be read) and rows of numbers and changes. Numbers come as they were recorded;
changes are computed from the samples, and left out where those are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.reporting.run.reading import RunReading
from refiner_core.contract.kinds import MODELS
from refiner_core.contract.protocols import protocol_name
from refiner_core.contract.records import StageResult
from refiner_core.evaluation.compare import compare_results
from refiner_core.evaluation.metrics import higher_is_better
from refiner_core.evaluation.names import base_of
from refiner_core.evaluation.results import load_results
from refiner_core.report.run.document import ChangeRow, NumberRow


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: of which model, under which protocol file (empty: the recipe's settings)."""

    name: str
    stage_id: str
    attempt: int
    model: str
    under: str
    folder: Path
    report: Mapping[str, Any]

    @property
    def whole(self) -> bool:
        """Whether the model is what a training ended with, and not a checkpoint on the way."""
        return self.model in MODELS


def evaluations_of_run(reading: RunReading) -> list[Evaluated]:
    """The evaluations that are done: without a protocol file first, models in the order of
    training."""
    found = []
    for name, history in reading.of_kind("evaluate"):
        result = history.record.result
        if result is None:
            continue
        what = f"The numbers of {name}"
        one = reading.tried(what, _evaluated, reading, name, history.stage_id, result)
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda e: (e.under, _place(e.model)))


def _evaluated(reading: RunReading, name: str, stage_id: str, result: StageResult) -> Evaluated:
    folder = reading.workspace.layout.stage(stage_id).data / result.output_dir
    report = result.report if "evaluations" in result.report else load_results(folder)
    model, under = str(report["model"]), protocol_name(name)
    return Evaluated(name, stage_id, result.attempt, model, under, folder, report)


def _place(model: str) -> tuple[int, int]:
    """Where a model stands: in the order of training, steps before the end."""
    family, _, step = model.partition("-step")
    known = MODELS.index(family) if family in MODELS else len(MODELS)
    return known, int(step) if step.isdigit() else 1 << 62


# ---------------------------------------------------------------- numbers


def number_rows(evaluations: Sequence[Evaluated]) -> tuple[NumberRow, ...]:
    """Every number, models in the order of training, then what stands beside them, once."""
    rows = [_number(e, entry) for e in evaluations for entry in e.report["evaluations"]]
    beside: dict[tuple[str, ...], NumberRow] = {}
    for evaluated in evaluations:
        for entry in evaluated.report.get("reference") or ():
            row = _number(evaluated, entry, reference=True)
            beside[row.model, row.under, row.decoding, row.metric] = row
    return (*rows, *beside.values())


def _number(
    evaluated: Evaluated, entry: Mapping[str, Any], *, reference: bool = False
) -> NumberRow:
    metric = str(entry["metric"])
    return NumberRow(
        model=str(entry["stage"]) if reference else evaluated.model,
        protocol=str(entry["protocol"]),
        protocol_name=str(entry.get("protocol_name") or ""),
        decoding=str(entry["decoding"]),
        metric=metric,
        value=entry.get("value"),
        low=entry.get("low"),
        high=entry.get("high"),
        n=entry.get("n"),
        higher_is_better=higher_is_better(metric),
        under=evaluated.under,
        reference=reference,
    )


# ---------------------------------------------------------------- changes


def before_and_after(evaluations: Sequence[Evaluated]) -> list[tuple[Evaluated, Evaluated]]:
    """Per protocol the pairs whose difference is told: the first trained model (the base, where
    only one is trained) against the last; then each against the one before it."""
    pairs = []
    for under in dict.fromkeys(e.under for e in evaluations):
        models = [e for e in evaluations if e.under == under and e.whole]
        trained = [e for e in models if e.model != MODELS[0]]
        chain = trained if len(trained) > 1 else models
        if len(chain) < 2:
            continue
        pairs.append((chain[0], chain[-1]))
        if len(chain) > 2:
            pairs += pairwise(chain)
    return pairs


def change_rows(reading: RunReading, evaluations: Sequence[Evaluated]) -> tuple[ChangeRow, ...]:
    """What training has changed, number by number; of numbers of single domains nothing."""
    rows: list[ChangeRow] = []
    for before, after in before_and_after(evaluations):
        found = reading.tried(
            f"The difference of {after.name} and {before.name}",
            compare_results,
            [after.folder],
            [before.folder],
            metrics=_shared(after, before),
        )
        rows += [_change(before, after, one) for one in found or ()]
    return tuple(rows)


def _shared(after: Evaluated, before: Evaluated) -> list[str]:
    """Metrics that both have under one protocol, whole domains together."""
    sides = [
        {(e["decoding"], e["metric"]): e["protocol"] for e in side.report["evaluations"]}
        for side in (after, before)
    ]
    alike = {m for (d, m), protocol in sides[0].items() if sides[1].get((d, m)) == protocol}
    apart = {m for (d, m), protocol in sides[0].items() if sides[1].get((d, m)) != protocol}
    return sorted(m for m in alike - apart if base_of(m) == m)


def _change(before: Evaluated, after: Evaluated, found: Mapping[str, Any]) -> ChangeRow:
    metric = str(found["metric"])
    return ChangeRow(
        before=before.model,
        after=after.model,
        under=before.under,
        decoding=str(found["decoding"]),
        metric=metric,
        value_before=float(found["b"]),
        value_after=float(found["a"]),
        difference=float(found["difference"]),
        low=found.get("low"),
        high=found.get("high"),
        n=int(found["n"]),
        higher_is_better=higher_is_better(metric),
    )
