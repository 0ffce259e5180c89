"""Whether means corrected by people's labels hold the truth, on simulated judges.

    python -m tests.prove.labels      two minutes

A held-out set of 200 prompts with four answers each is scored by a judge of known sensitivity and
specificity, and people label one answer of some prompts. In every cell: 93 to 97 % of 2,000 95 %
intervals hold the mean that people would give to all answers. Beside it, how often the judge's own
interval does. Cells in which nearly every answer is good are shown and do not count: with few
labels the rare bad answers are too few for a t interval, as for people's labels alone. It ends
with 1 if something does not hold.
"""

from __future__ import annotations

import sys
from itertools import product

from tests.support.judged_worlds import LabelWorld, covered

QUALITIES, EXTREME = (0.5, 0.7, 0.85), 0.97
JUDGES = ((0.9, 0.6), (0.8, 0.9), (0.95, 0.95))
LABELLED = (30, 60, 100)
REPETITIONS = 2000
COVERED = (0.93, 0.97)


def main() -> int:
    """Print a line per cell; 1 if something does not hold."""
    wrong = 0
    print(
        "quality, sensitivity, specificity, labelled | corrected holds, width | judge's own holds"
    )
    for quality, (sensitivity, specificity), n in product((*QUALITIES, EXTREME), JUDGES, LABELLED):
        world = LabelWorld(quality, sensitivity, specificity)
        share, raw, width = covered(world, n, REPETITIONS)
        counts = quality != EXTREME
        holds = COVERED[0] <= share <= COVERED[1]
        wrong += counts and not holds
        said = "" if holds else "   DOES NOT HOLD" if counts else "   (not counted)"
        print(
            f"{quality:.2f}, {sensitivity:.2f}, {specificity:.2f}, {n:3} | {share:.1%}, "
            f"{width:.3f} | {raw:.1%}{said}",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
