"""Whether `refiner rubrics report` finds what is known, on simulated judgements.

    python -m tests.prove.criteria      two minutes

For sets of criteria with known parameters (a sixth nearly always met, a sixth nearly never, some
with paraphrases), over 1,600 answers of 200 prompts, five draws each: the mean absolute error and
the correlation of the estimated slopes and places, and the share of criteria (= judge calls, if
each criterion is a call) that the proposed set needs, with the rank correlation that it keeps on
prompts that did not choose it. It ends with 1 if parameters are not recovered (correlations of at
least 0.9, in worlds without paraphrases, which break the model's assumption that criteria are
independent at a given quality: their slopes come out too high), if the proposed sets do not keep
0.95 on average, or if worlds marked with * need more than 40 % of the calls. The others show where
40 % do not suffice: few criteria of low discrimination, and none alike.
"""

from __future__ import annotations

import sys

import numpy as np

from refiner_core.rescoring.criteria import criteria_report
from tests.support.judged_worlds import draw_criteria, judge_answers

#: Criteria, paraphrases among them, median slope, and whether 40 % must suffice.
WORLDS = (
    *((30, 10, 1.0, True), (30, 10, 1.5, True), (20, 6, 1.5, True), (40, 0, 1.5, True)),
    *((30, 0, 1.5, False), (30, 0, 1.0, False), (20, 0, 1.0, False)),
)
DRAWS = 5
KEEP, CALLS, RECOVERED = 0.95, 0.40, 0.9


def measure(criteria: int, copies: int, slope: float, seed: int) -> tuple[float, ...]:
    """Errors and correlations of slopes and places, share of calls, rank correlation, tau-b."""
    made = draw_criteria(seed, criteria=criteria, copies=copies, slope=slope)
    found = criteria_report(judge_answers(made, seed))
    inside = made.informative
    pairs = [
        (truth[inside], np.array([row[name] for row in found["criteria"]][inside], dtype=float))
        for name, truth in (("slope", made.slopes), ("place", made.places))
    ]
    errors = (float(np.nanmean(np.abs(a - b))) for a, b in pairs)
    known = (~np.isnan(b) for _, b in pairs)
    alike = (float(np.corrcoef(a[k], b[k])[0, 1]) for (a, b), k in zip(pairs, known, strict=True))
    smaller = found["smaller"]
    share = len(smaller["kept"]) / smaller["of"]
    return (*errors, *alike, share, smaller["spearman"], smaller["kendall"]["value"])


def main() -> int:
    """Print a line per world; 1 if something does not hold."""
    wrong = 0
    print("criteria (paraphrases), slope | error of slope, place | correlation | calls | spearman, "
          "tau-b in groups")  # fmt: skip
    for criteria, copies, slope, enough in WORLDS:
        rows = [measure(criteria, copies, slope, seed) for seed in range(DRAWS)]
        of_slope, of_place, slopes, places, share, spearman, tau = np.mean(rows, axis=0)
        holds = (copies > 0 or min(slopes, places) >= RECOVERED) and spearman >= KEEP
        holds = bool(holds and (share <= CALLS or not enough))
        wrong += not holds
        print(
            f"{criteria} ({copies:2}), {slope} | {of_slope:.2f}, {of_place:.2f} | {slopes:.3f}, "
            f"{places:.3f} | {share:.0%}{'*' if enough else ''} | {spearman:.3f}, {tau:.2f}"
            + ("" if holds else "   DOES NOT HOLD"),
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
