"""History of a nightly evaluation: its rows, series and alerts, and the delivery of alerts.

In: a nightly evaluation and its records; evaluated plans, for new rows, with the values of watched
metrics per prompt, since outputs of old stages may be reclaimed. Out: one :class:`HistoryView` for
the page, the terminal and scripts; alerts, sent once per change through every channel. A failing
channel never fails a night: its error is recorded, and the alert is not sent again. A command gets
the plain fields in ``REFINER_ALERT_TITLE``, ``_TEXT``, ``_KIND``, ``_CAUSE``, …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from flows.nightly.checkpoints import ResolvedWeights, evaluations_in
from flows.notifying.sender import ChannelError, send
from infra.store.nightly_records import NightlyRecords
from infra.store.records import now_text
from infra.store.workspace import Workspace
from refiner_core.contract.plan import Plan
from refiner_core.contract.planned import PlannedStage
from refiner_core.contract.records import StageResult, picked, to_json
from refiner_core.nightly.changes import NightSeries, Values, alert_of, per_prompt, series_of
from refiner_core.nightly.definition import ROW_VERSION, Nightly, NightRow, Schedule
from refiner_core.nightly.page import HistoryView, open_alerts
from refiner_core.report.printing import measured

HISTORY_VERSION = 1


def read_history(nightly: Nightly, workspace: Workspace) -> HistoryView:
    """All records of a nightly evaluation."""
    records = NightlyRecords(workspace, nightly.name)
    rows = records.rows()

    def values_of(row: NightRow, metric: str) -> Values | None:
        return records.values(row.stage, row.protocol, metric)

    nights = records.nights()
    missed = {night: records.missed(night) for night in nights}
    return HistoryView(
        nightly=nightly,
        rows=tuple(rows),
        series=tuple(series_of(rows, values_of, nightly.alerts)),
        alerts=tuple(records.alerts()),
        missed={night: found for night, found in missed.items() if found},
        nights=tuple(nights),
    )


def history_json(reading: HistoryView) -> dict[str, Any]:
    """A history as JSON."""
    return {
        "version": HISTORY_VERSION,
        "nightly": reading.nightly.name,
        "rows": [to_json(row) for row in reading.rows],
        "missed": {night: dict(found) for night, found in reading.missed.items()},
        "alerts": [dict(alert) for alert in reading.alerts],
    }


def raise_alerts(reading: HistoryView, records: NightlyRecords) -> list[dict[str, Any]]:
    """Record and return new alerts.

    A late line may move a detected change by a night: that is the same change.
    """
    known = list(records.alerts())
    raised = []
    for series in reading.series:
        for change in series.told:
            beside = _beside(series, change.nights[0], reading) if series.canary else []
            alert = alert_of(reading.nightly.name, series, change, beside)
            if any(_same(alert, other) for other in known):
                continue
            if records.raise_alert(change.id_in(series.key.text), alert):
                raised.append({**alert, "id": change.id_in(series.key.text)})
                known.append(alert)
    return raised


def deliver(
    nightly: Nightly, alerts: Sequence[Mapping[str, Any]], records: NightlyRecords
) -> dict[str, str]:
    """Send new alerts; ``ID by CHANNEL`` -> reason why it was not sent."""
    failed: dict[str, str] = {}
    for alert in alerts:
        whys = {}
        for alarm in nightly.alerts.alarms:
            try:
                send(alarm, alert, prefix="REFINER_ALERT_")
            except ChannelError as error:
                whys[alarm.name] = str(error)
        if whys:
            records.note_unsent(alert["id"], whys)
        failed |= {f"{alert['id']} by {channel}": why for channel, why in whys.items()}
    return failed


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    keys = ("series", "kind", "direction")
    return all(one[k] == other[k] for k in keys) and bool({*one["nights"]} & {*other["nights"]})


def _beside(canary: NightSeries, since: str, reading: HistoryView) -> Sequence[str]:
    """Checkpoints measured since then, under the same protocol."""
    names = [
        row.checkpoint
        for series in reading.series
        if series.key[1:] == canary.key[1:] and not series.canary
        for row in series.rows
        if row.measured_in >= since
    ]
    return list(dict.fromkeys(names))


# ---------------------------------------------------------------- new lines


_NUMBER = ("value", "low", "high", "n", "protocol")


def harvest(
    nightly: Nightly,
    workspace: Workspace,
    plan: Plan,
    found: ResolvedWeights,
    night: str,
    known: Sequence[NightRow],
    *,
    measured_in: str,
    run: str,
) -> None:
    """Add the evaluations of a checkpoint to the history.

    Parameters
    ----------
    known
        The existing lines.
    measured_in
        The night of new evaluations; empty: they were made elsewhere, under unknown conditions.
    """
    records = NightlyRecords(workspace, nightly.name)
    before = {row.stage: row.measured_in for row in known}
    for stage in evaluations_in(plan):
        result = workspace.read_result(stage.id)
        if result is None:
            continue
        facts = _facts(plan, stage, result)
        evaluations = result.report["evaluations"]
        for decoding in dict.fromkeys(e["decoding"] for e in evaluations):
            entries = [e for e in evaluations if e["decoding"] == decoding]
            main = next((e for e in entries if e["metric"] != "reward"), entries[0])
            row = NightRow(
                version=ROW_VERSION,
                nightly=nightly.name,
                night=night,
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
                run=run,
                fresh=stage.id not in before and bool(measured_in),
                late=False,
                measured_in=before.get(stage.id, measured_in),
                evaluated_at=now_text(),
                numbers={e["metric"]: {k: e.get(k) for k in _NUMBER} for e in entries},
                facts=facts,
            )
            _keep_values(workspace, records, row, nightly.alerts.metrics)
            records.add_row(row)


def _keep_values(
    workspace: Workspace, records: NightlyRecords, row: NightRow, watched: Sequence[str]
) -> None:
    there = [metric for metric in watched if metric in row.numbers]
    wanted = [m for m in there if records.values(row.stage, row.protocol, m) is None]
    output = workspace.output_dir(row.stage)
    if not wanted or output is None or not (output / row.samples).exists():
        return
    from refiner_core.evaluation.metrics import load_samples

    samples = load_samples(output / row.samples)
    found = {metric: per_prompt(samples, metric) for metric in wanted}
    records.keep_values(row.stage, row.protocol, found)


def _facts(plan: Plan, stage: PlannedStage, result: StageResult) -> dict[str, str]:
    """Facts beside the weights that may have changed."""
    judge, said = plan.config_of(stage).judge, result.provenance
    host, usage = said.get("host") or {}, result.report.get("judge_usage") or {}
    found = {
        "judge.kind": judge.kind,
        "judge.model": judge.model,
        "judge.revision": judge.revision or "",
        "judge.served": ", ".join(sorted(usage.get("served") or {})),
        "code": said.get("code") or "",
        "python": said.get("python") or "",
        "host.name": host.get("name") or "",
        "host.cpu": host.get("cpu") or "",
        "host.gpus": ", ".join(host.get("gpus") or ()),
        **{f"versions.{k}": v for k, v in (said.get("versions") or {}).items()},
    }
    return {name: str(value) for name, value in found.items() if value}


# ---------------------------------------------------------------- status

_LAST = 7


def status_json(reading: HistoryView, records: NightlyRecords, now: datetime) -> dict[str, Any]:
    """Status of a nightly evaluation as JSON."""
    nightly = reading.nightly
    schedule = Schedule(nightly.schedule, nightly.timezone)
    current = schedule.night_at(now)
    return {
        **{"version": HISTORY_VERSION, "nightly": nightly.name, "night": current},
        **picked(nightly, "schedule", "timezone"),
        "state": night_state(records, current),
        "next": schedule.next_after(now).isoformat(),
        "nights": {n: night_state(records, n) for n in reading.nights[-_LAST:]},
        "series": [_series_json(s) for s in reading.series],
        "open_alerts": [dict(a) for a in open_alerts(reading.alerts)],
        "undelivered": {a["id"]: whys for a in reading.alerts if (whys := records.unsent(a["id"]))},
    }


def night_state(records: NightlyRecords, night: str) -> str:
    """``done``, ``running``, ``incomplete`` (begun, without an orchestrator) or ``not begun``."""
    if records.ended(night) is not None:
        return "done"
    who = records.worker_of(night)
    if who.standing == "none":
        return "not begun"
    return "running" if who.works else "incomplete"


def _series_json(series: Any) -> dict[str, Any]:
    key, last = series.key, series.rows[-1]
    return {
        **picked(key, "checkpoint", "metric", "decoding", "protocol"),
        **picked(series, "canary", "protocol_name"),
        **picked(last, "protocol_set", "night", "source"),
        "nights": len(series.rows),
        **{k: last.numbers[key.metric].get(k) for k in ("value", "low", "high", "n")},
    }


def status_rows(status: dict[str, Any]) -> list[list[str]]:
    """A table: checkpoint, metric, protocol file, value with interval, night, weights."""
    return [
        [
            s["checkpoint"] + (" (canary)" if s["canary"] else ""),
            f"{s['metric']} ({s['decoding']})",
            s["protocol_set"] or "(the recipe's)",
            measured(s),
            s["night"],
            str(s["nights"]),
            s["source"],
        ]
        for s in status["series"]
    ]
