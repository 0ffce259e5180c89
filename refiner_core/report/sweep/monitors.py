"""Arms of a sweep by their monitors: compared at the last step that all reached, and at their ends.

In: the monitors' series in the trials' evidence. Out: rows of the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from refiner_core.report.printing import number
from refiner_core.report.sweep.evidence import SweepEvidence
from refiner_core.report.sweep.sweep_report import Row


def make_monitors(evidence: SweepEvidence) -> tuple[Row, ...]:
    """A row for each arm with a monitor: means over its finished trials.

    Arms are comparable if they have the same gold protocols and rows; others have no numbers.
    ``at`` is the last step at which all trials were looked at.
    """
    found = {t.place: t.monitor for t in evidence.trials if t.monitor}
    if not found:
        return ()
    steps = [set(dict(monitor["gold"])) for monitor in found.values()]
    at = max(set.intersection(*steps), default=None)
    alike = len({(tuple(m["golds"]), m["rows"]) for m in found.values()}) == 1
    arms = dict.fromkeys(arm for arm, _ in found)
    return tuple(_row(arm, [m for p, m in found.items() if p[0] == arm], at, alike) for arm in arms)


def _row(arm: str, monitors: Sequence[Mapping[str, Any]], at: int | None, alike: bool) -> Row:
    known = monitors if alike else ()
    return {
        **{"arm": arm, "trials": len(monitors), "at": at},
        "stopped": [m["stopped"] for m in monitors if m["stopped"] is not None],
        "alarms": [m["alarm"] for m in monitors if m["alarm"] is not None],
        **_means("equal", [(m, at) for m in known]),
        **_means("end", [(m, m["gold"][-1][0]) for m in known]),
        **_means("best", [(m, m["best"]) for m in known]),
    }


def _means(
    when: str, looks: Sequence[tuple[Mapping[str, Any], int | None]]
) -> dict[str, float | None]:
    """Mean proxy and gold of monitors, each at a step."""
    found: dict[str, float | None] = {}
    for name in ("proxy", "gold"):
        values = [dict(m[name])[step] for m, step in looks if step in dict(m[name])]
        found[f"{name}_{when}"] = sum(values) / len(values) if values else None
    return found


def monitor_cells(row: Row) -> tuple[str, ...]:
    """A row as text; see :func:`header`."""

    def steps(values: Sequence[int]) -> str:
        return f"{len(values)} (step {', '.join(map(str, values))})" if values else "0"

    pairs = [
        " / ".join(number(row[f"{name}_{when}"], 3) for name in ("proxy", "gold"))
        for when in ("equal", "end", "best")
    ]
    return (row["arm"], str(row["trials"]), steps(row["alarms"]), steps(row["stopped"]), *pairs)


def header(rows: Sequence[Row]) -> tuple[str, ...]:
    """The header for :func:`monitor_cells`."""
    at = rows[0]["at"] if rows else None
    pairs = (f"at step {at}" if at is not None else "at an equal step", "at the end", "at the best")
    return ("arm", "trials", "alarms", "stopped", *(f"proxy / gold {text}" for text in pairs))
