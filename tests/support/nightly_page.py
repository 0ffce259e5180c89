"""Sixty nights of a nightly evaluation as values: a drift, a regression and its recovery, a change
of protocol, nights without a number."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import numpy as np

from refiner_core.nightly.changes import Values, alert_of, series_of
from refiner_core.nightly.definition import (
    ROW_VERSION,
    Alerts,
    Checkpoint,
    Nightly,
    Row,
    Source,
)
from refiner_core.nightly.page import Reading

NIGHTS = [(date(2026, 9, 1) + timedelta(days=i)).isoformat() for i in range(60)]
PROMPTS = tuple(f"p{i:02d}" for i in range(50))
DRIFT, BAD, GOOD = 20, 35, 45
HOSTILE = "<script>alert(1)</script>"


def sixty_nights(name: str = "regressions") -> Reading:
    """The page's content."""
    rng = np.random.default_rng(7)
    base, rows = rng.uniform(0.3, 0.7, len(PROMPTS)), list[Row]()
    values: dict[str, Values] = {}
    for number in range(len(NIGHTS)):
        if number in (12, 13):
            continue
        for checkpoint in ("canary", "latest", "released"):
            made = number
            if checkpoint == "released":
                made = 0
            elif checkpoint == "latest":
                made = number - number % 5 if number < GOOD else number
            stage = f"evaluate-{checkpoint}-{made}"
            if stage not in values:
                shift = 0.1 if made >= DRIFT else 0.0
                if checkpoint == "latest":
                    shift += -0.12 if BAD <= made < GOOD else 0.002 * made
                scored = base + shift + rng.normal(0, 0.04, len(PROMPTS))
                values[stage] = Values(PROMPTS, scored)
            rows.append(_row(checkpoint, number, made, stage, values[stage].mean))
    alerts = Alerts(("reward",))
    series = series_of(rows, lambda row, _: values[row.stage], alerts)
    told = [alert_of(name, s, c, ["latest"]) for s in series for c in s.told]
    canary = Checkpoint("canary", Source("folder", "canary"))
    return Reading(
        Nightly(name, "0 3 * * *", "Europe/Berlin", "tiny", (), (), canary, alerts),
        tuple(rows),
        tuple(series),
        tuple(sorted(told, key=lambda a: a["night"])),
        {n: {"canary": "nobody measured the canary that night"} for n in NIGHTS[12:14]},
    )


def _row(checkpoint: str, number: int, made: int, stage: str, mean: float) -> Row:
    numbers: dict[str, Any] = {
        "reward": {"value": mean, "low": mean - 0.03, "high": mean + 0.03, "n": len(PROMPTS)}
    }
    numbers["reward"]["protocol"] = "0123456789ab"
    return Row(
        version=ROW_VERSION,
        nightly="regressions",
        night=NIGHTS[number],
        checkpoint=checkpoint,
        canary=checkpoint == "canary",
        protocol="0123456789ab",
        protocol_name="held-out-judge-v1/greedy/judge-7b@v1",
        protocol_set="held-out-judge-v1",
        decoding="greedy",
        digest=f"{checkpoint}-{made if checkpoint == 'latest' else 0}",
        source=f"grpo-step{made} {HOSTILE}" if checkpoint == "latest" else checkpoint,
        stage=stage,
        samples="samples-greedy.parquet",
        run="",
        fresh=made == number,
        late=number == 14,
        measured_in=NIGHTS[made],
        evaluated_at="",
        numbers=numbers,
        facts={
            "judge.served": "judge-7b-0826" if made >= DRIFT else "judge-7b-0713",
            "code": "b2" if made >= 30 else "a1",
        },
    )
