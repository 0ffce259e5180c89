"""From finished evaluations to lines of the history.

In: a plan whose evaluations are done, and in which night under which conditions. Out: rows, and
watched metrics prompt by prompt, since outputs of old stages may be reclaimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.nightly.checkpoints import Resolved
from flows.nightly.plans import evaluations_in
from infra.store.nightly_records import NightlyRecords
from infra.store.record_files import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan, PlannedStage
from refiner_core.contract.records import StageResult
from refiner_core.nightly.compare import per_prompt
from refiner_core.nightly.values import ROW_VERSION, Nightly, Row

_NUMBER = ("value", "low", "high", "n", "protocol")


@dataclass(frozen=True)
class Occasion:
    """For which night, and how.

    Attributes
    ----------
    measured
        Whether an evaluation that no earlier night knows was made in ``measured_in``; else it was
        made elsewhere, and nobody knows under which conditions.
    """

    nightly: Nightly
    night: str
    measured_in: str
    late: bool = False
    run: str = ""
    measured: bool = True


def harvest(
    plan: Plan,
    found: Resolved,
    occasion: Occasion,
    workspace: Workspace,
    records: NightlyRecords,
    known: Sequence[Row],
) -> list[Row]:
    """Write what the evaluations of a checkpoint say into the history; the lines that are new.

    ``known`` are the lines so far.
    """
    before = {row.stage: row.measured_in for row in known}
    written = []
    for stage in evaluations_in(plan):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        facts = _facts(plan, stage, result)
        for entries in _by_protocol(result.report["evaluations"]):
            row = _row(stage, entries, found, occasion, before, facts)
            _keep_values(row, entries, occasion.nightly, workspace, records)
            if records.add_row(row):
                written.append(row)
    return written


def _by_protocol(entries: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    for decoding in dict.fromkeys(e["decoding"] for e in entries):
        yield [e for e in entries if e["decoding"] == decoding]


def _row(
    stage: PlannedStage,
    entries: Sequence[Mapping[str, Any]],
    found: Resolved,
    occasion: Occasion,
    before: Mapping[str, str],
    facts: Mapping[str, str],
) -> Row:
    main = next((e for e in entries if e["metric"] != "reward"), entries[0])
    nightly = occasion.nightly
    return Row(
        version=ROW_VERSION,
        nightly=nightly.name,
        night=occasion.night,
        checkpoint=found.checkpoint.name,
        canary=found.checkpoint == nightly.canary,
        protocol=str(main["protocol"]),
        protocol_name=str(main["protocol_name"]),
        protocol_set=stage.protocol,
        decoding=str(main["decoding"]),
        digest=found.digest,
        source=found.what,
        stage=stage.id,
        samples=str(main["samples_file"]),
        run=occasion.run,
        fresh=stage.id not in before and occasion.measured,
        late=occasion.late,
        measured_in=before.get(stage.id, occasion.measured_in if occasion.measured else ""),
        evaluated_at=now_text(),
        numbers={e["metric"]: {k: e.get(k) for k in _NUMBER} for e in entries},
        facts=facts,
    )


def _keep_values(
    row: Row,
    entries: Sequence[Mapping[str, Any]],
    nightly: Nightly,
    workspace: Workspace,
    records: NightlyRecords,
) -> None:
    there = {e["metric"] for e in entries}
    wanted = [
        metric
        for metric in nightly.alerts.metrics
        if metric in there and records.values(row.stage, row.protocol, metric) is None
    ]
    output = workspace.output_dir(row.stage)
    if not wanted or output is None or not (output / row.samples).exists():
        return
    from refiner_core.evaluation.samples import load_samples

    samples = load_samples(output / row.samples)
    found = {metric: per_prompt(samples, metric) for metric in wanted}
    records.keep_values(row.stage, row.protocol, found)


def _facts(plan: Plan, stage: PlannedStage, result: StageResult) -> dict[str, str]:
    """What may have changed beside the weights."""
    judge, said = plan.config_of(stage).judge, result.provenance
    host = said.get("host") or {}
    found = {
        "judge.kind": judge.kind,
        "judge.model": judge.model,
        "judge.revision": judge.revision or "",
        "judge.served": ", ".join(sorted(_usage(result).get("served") or {})),
        "code": said.get("code") or "",
        "python": said.get("python") or "",
        "host.name": host.get("name") or "",
        "host.cpu": host.get("cpu") or "",
        "host.gpus": ", ".join(host.get("gpus") or ()),
        **{f"versions.{k}": v for k, v in (said.get("versions") or {}).items()},
    }
    return {name: str(value) for name, value in found.items() if value}


def _usage(result: StageResult) -> Mapping[str, Any]:
    usage: Mapping[str, Any] = result.report.get("judge_usage") or {}
    return usage
