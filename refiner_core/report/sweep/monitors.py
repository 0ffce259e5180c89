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
    steps = [{look["step"] for look in monitor["looks"]} for monitor in found.values()]
    at = max(set.intersection(*steps), default=None)
    alike = len({(tuple(m["golds"]), m["rows"]) for m in found.values()}) == 1
    arms = dict.fromkeys(arm for arm, _ in found)
    return tuple(_row(arm, [m for p, m in found.items() if p[0] == arm], at, alike) for arm in arms)


def _row(arm: str, monitors: Sequence[Mapping[str, Any]], at: int | None, alike: bool) -> Row:
    ends = [monitor["looks"][-1] for monitor in monitors]
    equal = [look for m in monitors for look in m["looks"] if look["step"] == at]
    best = [look for m in monitors for look in m["looks"] if look["step"] == m["best"]]
    return {
        **{"arm": arm, "trials": len(monitors), "at": at},
        "stopped": [m["stopped"] for m in monitors if m["stopped"] is not None],
        "alarms": [m["alarm"] for m in monitors if m["alarm"] is not None],
        **_means("equal", equal if alike else []),
        **_means("end", ends if alike else []),
        **_means("best", best if alike else []),
    }


def _means(when: str, looks: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean proxy and gold of some looks."""
    names = ("proxy", "gold")
    if not looks:
        return {f"{name}_{when}": None for name in names}
    return {f"{n}_{when}": sum(look[f"{n}_mean"] for look in looks) / len(looks) for n in names}


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
