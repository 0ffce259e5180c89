"""Nightly evaluations in words: how a night went, how things stand. In: values. Out: lines."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from flows.nightly.night import NightOutcome
from flows.nightly.reading import Reading
from infra.store.nightly_records import NightlyRecords
from refiner_core.nightly.page import open_alerts
from refiner_core.nightly.schedule import Schedule

OUTPUT_VERSION = 1
_LAST = 7


def outcome_json(outcome: NightOutcome) -> dict[str, Any]:
    """A night for scripts."""
    return {
        "version": OUTPUT_VERSION,
        "nightly": outcome.nightly,
        "night": outcome.night,
        "state": outcome.state,
        "late": outcome.late,
        "message": outcome.message,
        "checkpoints": [
            {"checkpoint": e.checkpoint, "state": e.state, "why": e.why, "run": e.run}
            for e in outcome.entries
        ],
        "looked_after": dict(outcome.looked_after),
        "alerts": [dict(a) for a in outcome.alerts],
        "undelivered": dict(outcome.undelivered),
        "page": outcome.page,
        "exit_code": outcome.exit_code,
    }


def outcome_lines(outcome: NightOutcome) -> Iterator[str]:
    """A night for people."""
    late = ", late" if outcome.late else ""
    yield f"{outcome.nightly}, night of {outcome.night}{late}: {outcome.state}"
    if outcome.message:
        yield f"  {outcome.message}"
    for entry in outcome.entries:
        why = f": {entry.why}" if entry.why else ""
        run = f" ({entry.run})" if entry.run else ""
        yield f"  {entry.checkpoint}: {entry.state}{run}{why}"
    for night, state in outcome.looked_after.items():
        if night != outcome.night:
            yield f"  night of {night}: looked after late, {state}"
    for alert in outcome.alerts:
        yield f"  alert: {alert['title']}"
        yield f"    {alert['text']}"
    for what, why in outcome.undelivered.items():
        yield f"  not delivered: {what}: {why}"
    if outcome.page:
        yield f"  page: {outcome.page}"


def status_json(reading: Reading, records: NightlyRecords, now: datetime) -> dict[str, Any]:
    """How a nightly evaluation stands, for scripts."""
    nightly = reading.nightly
    schedule = Schedule(nightly.schedule, nightly.timezone)
    current = schedule.night_at(now)
    return {
        "version": OUTPUT_VERSION,
        "nightly": nightly.name,
        "schedule": nightly.schedule,
        "timezone": nightly.timezone,
        "night": current,
        "state": night_state(records, current),
        "next": schedule.next_after(now).isoformat(),
        "nights": {n: night_state(records, n) for n in reading.nights[-_LAST:]},
        "series": [_series_json(s) for s in reading.series],
        "open_alerts": [dict(a) for a in open_alerts(reading.alerts)],
        "undelivered": {
            a["id"]: whys for a in reading.alerts if (whys := records.not_told(a["id"]))
        },
    }


def night_state(records: NightlyRecords, night: str) -> str:
    """``done``, ``running``, ``incomplete`` (begun, and nobody works on it) or ``not begun``."""
    if records.ended(night) is not None:
        return "done"
    who = records.worker_of(night)
    if who is None:
        return "not begun"
    return "running" if who.works else "incomplete"


def _series_json(series: Any) -> dict[str, Any]:
    key, last = series.key, series.rows[-1]
    return {
        "checkpoint": key.checkpoint,
        "canary": series.canary,
        "metric": key.metric,
        "decoding": key.decoding,
        "protocol": key.protocol,
        "protocol_name": series.protocol_name,
        "protocol_set": last.protocol_set,
        "nights": len(series.rows),
        "night": last.night,
        "source": last.source,
        **{k: last.numbers[key.metric].get(k) for k in ("value", "low", "high", "n")},
    }


def status_rows(status: dict[str, Any]) -> list[list[str]]:
    """A table: checkpoint, metric, protocol file, value with interval, night, weights."""
    return [
        [
            s["checkpoint"] + (" (canary)" if s["canary"] else ""),
            f"{s['metric']} ({s['decoding']})",
            s["protocol_set"] or "(the recipe's)",
            _value(s),
            s["night"],
            str(s["nights"]),
            s["source"],
        ]
        for s in status["series"]
    ]


def _value(number: dict[str, Any]) -> str:
    low, high = number.get("low"), number.get("high")
    bounds = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{number['value']:.3f}{bounds}"
