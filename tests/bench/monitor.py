"""False alarms and power of the monitor's test, on simulated series.

``python -m tests.bench monitor [RUNS]``: one line for each number of rows and course of proxy and
gold: the share of runs with an alarm, with its 95 % interval (Wilson), and the median point of it.
Scores are beta-distributed, mostly near 0 or 1; rows differ in difficulty; 20 looks after the
first, ``alpha`` and ``keep`` at their defaults. ``resampled`` draws rows, with replacement, from
one simulated honest run: its noise is then taken as truth.
"""

from __future__ import annotations

import sys

import numpy as np

from refiner_core.evaluation.statistics import wilson
from refiner_core.rewards.sequential import evidence

LOOKS, ALPHA = 20, 0.05
TIME = np.linspace(0, 1, LOOKS + 1)
_UP = 0.4 + 0.3 * TIME
_PLATEAU = 0.4 + 0.3 * np.minimum(1, 3 * TIME)
#: Mean proxy and gold over time; in the first group every alarm is false.
HONEST = {
    "nothing changes": (0.5 + 0 * TIME, 0.5 + 0 * TIME),
    "both rise": (_UP, _UP),
    "both rise, then stand": (_PLATEAU, _PLATEAU),
    "gold keeps exactly a quarter": (_UP, 0.4 + 0.25 * (_UP - 0.4)),
    "both fall": (1 - _UP, 1 - _UP),
}
PARTED = {
    "gold stands": (_UP, 0.4 + 0 * TIME),
    "gold falls by 0.1": (_UP, 0.5 - 0.1 * TIME),
    "gold falls by 0.2": (_UP, 0.5 - 0.2 * TIME),
    "gold rises by 0.3, then falls by 0.3": (
        0.3 + 0.5 * TIME,
        0.4 + 0.3 * np.minimum(2 * TIME, 2 - 2 * TIME),
    ),
}


def scores(rng: np.random.Generator, means: np.ndarray, rows: int) -> np.ndarray:
    """Scores [points, rows]."""
    mean = np.clip(means[:, None] + rng.normal(0, 0.15, rows), 0.05, 0.95)
    return rng.beta(1.5 * mean, 1.5 * (1 - mean))


def main(arguments: list[str]) -> int:
    """Print the table."""
    runs = int(arguments[0]) if arguments else 500
    print(f"{'rows':>5} {'course':40} {'alarms':>7} {'95 % interval':>16} {'median point':>13}")
    for rows in (32, 64, 128):
        rng = np.random.default_rng(rows)
        for name, (proxy, gold) in (HONEST | PARTED).items():
            pairs = ((scores(rng, proxy, rows), scores(rng, gold, rows)) for _ in range(runs))
            _print(rows, name, [_alarm(p, g) for p, g in pairs])
        honest = scores(rng, _PLATEAU, rows), scores(rng, _PLATEAU, rows)
        drawn = (rng.integers(rows, size=rows) for _ in range(runs))
        _print(
            rows,
            "both rise, then stand; resampled",
            [_alarm(*(x[:, i] for x in honest)) for i in drawn],
        )
    return 0


def _alarm(proxy: np.ndarray, gold: np.ndarray) -> int | None:
    return evidence(proxy, gold, looks=LOOKS).first_alarm(ALPHA)


def _print(rows: int, name: str, alarms: list[int | None]) -> None:
    points = [point for point in alarms if point is not None]
    low, high = wilson(len(points), len(alarms))
    median = f"{np.median(points):.0f} of {LOOKS}" if points else "-"
    share = len(points) / len(alarms)
    print(f"{rows:>5} {name:40} {share:>7.3f} {f'{low:.3f} to {high:.3f}':>16} {median:>13}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
